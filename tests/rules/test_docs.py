"""The documents tell the truth: links lead somewhere, commands and targets exist, the examples run."""

import importlib.util
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from tessera.capture import known_models
from tessera.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples", "corpus")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

Found = tuple[str, str]  # (document, what it says)


def prose(path: Path) -> str:
    """A document without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def commands(program: str) -> list[Found]:
    """Every command line of one program in the code of all documents."""
    found = []
    for path in DOCUMENTS:
        lines = [
            line for block in FENCE.findall(path.read_text(encoding="utf-8")) for line in block.splitlines()
        ]
        spans = SPAN.findall(prose(path))
        for line in [*lines, *spans]:
            words = line.removeprefix("$ ").removeprefix(".venv/bin/")
            if words.startswith(f"{program} "):
                found.append((path.name, words))
    return found


def problem_of(line: str) -> str:
    """What is wrong with a `tessera` command line; empty if nothing is."""
    _, *words = shlex.split(line, comments=True)
    root: Any = typer.main.get_command(app)
    if words[0].startswith("-"):
        known = {o for p in root.params for o in p.opts} | {"-h", "--help"}
        return "" if words[0] in known else f"no option {words[0]}"
    command = root
    for word in words[:2]:
        if hasattr(command, "commands"):  # the root, or a group such as `bench`
            if word not in command.commands:
                return f"no command {word}"
            command = command.commands[word]
    known = {o for p in command.params for o in p.opts} | {"-h", "--help"}
    unknown = [w for w in words if w.startswith("-") and w.partition("=")[0] not in known]
    return f"no option {unknown[0]} of {words[0]}" if unknown else ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """A relative link names a file or folder of the repository."""
    inside = [target for target in LINK.findall(prose(document)) if not re.match(r"[a-z]+:|#", target)]

    assert [to for to in inside if not document.parent.joinpath(to.partition("#")[0]).exists()] == []


def test_commands_exist() -> None:
    """A `tessera` command in a document has that subcommand and those options."""
    found = [(document, line, problem_of(line)) for document, line in commands("tessera")]

    assert len(found) > 50
    assert [row for row in found if row[-1]] == []


@pytest.mark.parametrize(
    "line",
    [
        "tessera teleport x",
        "tessera plan --fast",
        "tessera --fast",
        "tessera bench x",
        "tessera bench serve -z",
    ],
)
def test_a_made_up_command_is_found(line: str) -> None:
    """The check above does find a command that does not exist."""
    assert problem_of(line)


@pytest.mark.parametrize(("document", "line"), commands("make"))
def test_a_target_exists(document: str, line: str) -> None:
    """A `make` target in a document is a target of the Makefile."""
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)

    assert shlex.split(line, comments=True)[1] in targets, document


@pytest.mark.parametrize(("document", "line"), commands("python"))
def test_a_script_exists(document: str, line: str) -> None:
    """A Python file or module that a document tells to run exists."""
    _, first, *more = shlex.split(line, comments=True)
    is_there = importlib.util.find_spec(more[0]) if first == "-m" else (ROOT / first).is_file()
    assert is_there, document


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"])
def test_a_file_that_is_named_exists(document: Path) -> None:
    """A Python file that a document speaks of is there, also where it is no link."""
    names = {name for span in SPAN.findall(prose(document)) for name in re.findall(r"[\w/]+\.py\b", span)}
    files = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]

    assert [name for name in names if not any(file.endswith(f"/{name}") for file in files)] == []


def test_the_readme_is_read_to_its_end() -> None:
    """It has at most 150 lines."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_document_can_be_found() -> None:
    """The index of docs and the menu of the site name every document there."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "docs").glob("*.md")]

    assert [name for name in names if f"({name})" not in index] == ["README.md"]
    assert [name for name in names if f"docs/{name}" not in menu] == []


@pytest.mark.parametrize("name", ["capture", "analyze", "profile", "plan", "run", "simulate", "demo"])
def test_the_readme_shows_every_stage(name: str) -> None:
    """The README's tour has a command for every stage of the flow."""
    shown = [line.split()[1] for document, line in commands("tessera") if document == "README.md"]

    assert name in shown


def test_the_guide_names_every_model() -> None:
    """The guide's table of models has the built-in names and no others."""
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\| `([^`]+)` \| `([^`]+)` \|.*\|$", guide, re.MULTILINE)

    assert sorted(known_models()) == sorted(name for row in rows for name in row)


@pytest.mark.parametrize(
    ("example", "ending"),
    [
        ("compile_a_model.py", "equal bit for bit"),
        ("own_triton_model.py", "on two workers, equal bit for bit"),
        ("train_on_two.py", "parameters equal bit for bit"),
        pytest.param("two_unlike_boxes.py", "over TCP, equal bit for bit", marks=pytest.mark.slow),
        pytest.param("what_to_rent.py", "both: a100 + l40s at $", marks=pytest.mark.slow),
    ],
)
def test_an_example_runs(example: str, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An example runs as a program, and its last line says what it is to show."""
    if "triton" in example:
        pytest.importorskip("triton")
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    finally:
        torch.set_num_threads(threads)

    assert ending in capsys.readouterr().out.splitlines()[-1]
