"""Names in backticks exist: in docstrings, comments and documents."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# History names what was there then.
HISTORY = {"CHANGELOG.md"}
SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# CamelCase, or words joined by underscores: names of Python code, not words, commands or JSON.
TEXTS = ("src/**/*.json", "src/**/*.html", "corpus/**/*.cu", "corpus/**/*.json", "corpus/**/*.py")
# Names of other projects.
FOREIGN = {"config.json", "generation_config.json", "is_tracing", "i_d"}
NAME = re.compile(r"_?[a-z]+(_[a-z0-9]+)+|[A-Z][a-z0-9]+([A-Z][a-z0-9]*)+")
FILE = re.compile(r"[\w.-][\w/.-]*\.(py|md|json|toml|sh|yml)")


# Comments, strings and names of Python code; `tokenize` takes several times as long.
TOKEN = re.compile(
    r"""#[^\n]*|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"|\b[^\W\d]\w*",
    re.DOTALL,
)


@cache
def tokens(path: Path) -> tuple[str, ...]:
    return tuple(TOKEN.findall(path.read_text("utf-8")))


@cache
def words() -> frozenset[str]:
    """Every name and every word of a string in source, tests, benchmarks and scripts."""
    names = set(dir(builtins))
    for folder in ("src", "tests", "benchmarks", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            names.add(path.stem)
            for token in tokens(path):
                if token[0] not in "#\"'":
                    names.add(token)
                elif token[0] != "#" and "`" not in token:
                    names |= set(re.findall(r"\w+", token))
    for path in [ROOT / "pyproject.toml", *(path for form in TEXTS for path in ROOT.glob(form))]:
        names |= set(re.findall(r"\w+", path.read_text("utf-8"))) | {path.stem}
    return frozenset(names)


@cache
def prose(path: Path) -> tuple[str, ...]:
    return tuple(_prose(path))


def _prose(path: Path) -> Iterator[str]:
    """Docstrings and comments of a module, or a document without its code blocks."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield FENCE.sub("", text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    yield from (token for token in tokens(path) if token[0] == "#")


def unknown(path: Path) -> list[str]:
    """Names in backticks that nothing in the repository has, and files that are not there."""
    missing = []
    for span in (span for part in prose(path) for span in SPAN.findall(part) if span not in FOREIGN):
        if FILE.fullmatch(span):
            places = (ROOT, ROOT / "src" / "tessera", path.parent)
            if not any((place / span).exists() for place in places) and not any(ROOT.rglob(span)):
                missing.append(span)
            continue
        parts = [part.removesuffix("_total") for part in re.split(r"[.(\[ ,=|]", span.strip())]
        missing += [part for part in parts if NAME.fullmatch(part) and part not in words() | FOREIGN]
    return missing


@pytest.mark.parametrize("package", sorted({path.parent for path in SOURCES}))
def test_names_in_docstrings_and_comments_exist(package: Path) -> None:
    missing = {path.name: names for path in package.glob("*.py") if (names := unknown(path))}

    assert {} == missing


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name not in HISTORY])
def test_names_in_documents_exist(document: Path) -> None:
    assert [] == unknown(document)


def test_a_name_that_is_gone_is_seen(tmp_path: Path) -> None:
    """The check can fail: joined here, so that the name is nowhere else."""
    gone = ["NoSuch" + "Class", "no_such" + "_function", "ir/gone.py"]
    (tmp_path / "x.py").write_text(f'"""See {", ".join(f"`{name}`" for name in gone)}."""\n')

    assert gone == unknown(tmp_path / "x.py")


def test_no_docstring_begins_with_of() -> None:
    """The noun comes first."""
    first = [
        (path.name, part[:40]) for path in SOURCES for part in prose(path) if re.match(r"(# )?Of ", part)
    ]

    assert [] == first
