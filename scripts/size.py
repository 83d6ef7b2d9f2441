"""Size of the source, held against the line budget of pyproject.toml.

    python scripts/size.py            a table by package; exit code 1 above the budget
    python scripts/size.py --json     {"core": n, "ptx": n, "packages": {...}, "budget": n, ...}

A code line has a token that is neither comment nor docstring. `core` is src/tessera; `ptx` is src/tessera_ptx
(a library with a budget of its own). `words` counts docstrings and comments of both, without directives to
tools (`noqa`, `fmt: skip`). Import cycles,
class names used twice and functions longer than a screen fail the check as well.
"""

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FUNCTION_LINES = 60
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DIRECTIVE = re.compile(r"#\s*(fmt: \w+|noqa\b|type: ignore|ruff: |mypy: |pragma: )[^#]*")
# Comments and strings; `tokenize` takes several times as long.
COMMENT_OR_STRING = re.compile(
    r"""#[^\n]*|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)


@dataclass(frozen=True)
class Module:
    name: str
    is_package: bool
    code: int
    words: int
    classes: tuple[str, ...]
    long_functions: tuple[str, ...]
    imports: frozenset[str]

    @property
    def package(self) -> str:
        """Name of the stage: "plan" for tessera.plan.solve; "(modules)" for modules outside of packages."""
        library, *inside = self.name.split(".")
        if library != "tessera":
            return library
        return inside[0] if len(inside) > 1 or (inside and self.is_package) else "(modules)"


def read_modules(source: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = read_module(name, is_package, path.read_text(encoding="utf-8"))
    return modules


def read_module(name: str, is_package: bool, text: str) -> Module:
    nodes = list(_statements(ast.parse(text)))
    docstrings = list(_docstrings(nodes))
    comments: list[str] = []

    def shortened(found: re.Match[str]) -> str:
        """A comment is nothing; each line of a string is code."""
        if found[0].startswith("#"):
            comments.append(found[0])
            return ""
        return "\n".join("s" * (1 + found[0].count("\n")))

    code = COMMENT_OR_STRING.sub(shortened, text)
    lines = {number for number, line in enumerate(code.split("\n"), 1) if line.strip()}
    lines -= {n for node in docstrings for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    prose = [str(node.value) for node in docstrings]
    prose += [DIRECTIVE.sub("", comment) for comment in comments]
    return Module(
        name,
        is_package,
        code=len(lines),
        words=sum(len(part.split()) for part in prose),
        classes=tuple(node.name for node in nodes if isinstance(node, ast.ClassDef)),
        long_functions=tuple(
            f"{name}.{node.name}"
            for node in nodes
            if isinstance(node, FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
        ),
        imports=frozenset(imported for node in nodes for imported in _imports(node)),
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the statements in it; expressions, which are most of a tree, are left out."""
    yield node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, field, ())
        for statement in inner if isinstance(inner, list) else ():
            yield from _statements(statement)


def _docstrings(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def _imports(node: ast.AST) -> Iterator[str]:
    """Modules and names that a statement imports, wherever it stands."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_cycles(modules: dict[str, Module]) -> list[list[str]]:
    """Groups of modules that all reach one another by imports. Re-exports of packages do not count."""
    plain = {name for name, module in modules.items() if not module.is_package}
    reach: dict[str, set[str]] = {}
    for name in plain:
        seen, waiting = set[str](), [name]
        while waiting:
            new = (modules[waiting.pop()].imports & plain) - seen
            seen |= new
            waiting += new
        reach[name] = seen
    groups = {frozenset(other for other in reach[n] if n in reach[other]) for n in plain if n in reach[n]}
    return sorted(sorted(group) for group in groups)


@dataclass(frozen=True)
class Size:
    core: int
    ptx: int
    packages: dict[str, int]
    budget: int
    ptx_budget: int
    words: int
    files: int
    import_cycles: list[list[str]]
    class_names_twice: list[str]
    long_functions: list[str]

    @property
    def complaints(self) -> list[str]:
        """One sentence for each rule that the source breaks."""
        rules = {
            f"src/tessera has {self.core:,} code lines; the budget is {self.budget:,}": self.core
            > self.budget,
            f"src/tessera_ptx has {self.ptx:,} code lines; the budget is {self.ptx_budget:,}": (
                self.ptx > self.ptx_budget
            ),
            f"import cycles: {self.import_cycles}": bool(self.import_cycles),
            f"class names used twice: {self.class_names_twice}": bool(self.class_names_twice),
            f"functions over {MAX_FUNCTION_LINES} lines: {self.long_functions}": bool(self.long_functions),
        }
        return [sentence for sentence, is_broken in rules.items() if is_broken]


def measure(root: Path) -> Size:
    budget = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["tessera"]
    modules = read_modules(root / "src")
    code = Counter[str]()
    for module in modules.values():
        code[module.package] += module.code
    names = Counter(name for module in modules.values() for name in module.classes)
    ptx = code.pop("tessera_ptx")
    return Size(
        core=code.total(),
        ptx=ptx,
        packages=dict(code.most_common()),
        budget=budget["core-lines"],
        ptx_budget=budget["ptx-lines"],
        words=sum(module.words for module in modules.values()),
        files=sum(module.package != "tessera_ptx" for module in modules.values()),
        import_cycles=import_cycles(modules),
        class_names_twice=sorted(name for name, count in names.items() if count > 1),
        long_functions=sorted(name for module in modules.values() for name in module.long_functions),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    args = parser.parse_args()
    size = measure(args.root)
    if args.json:
        print(json.dumps(asdict(size), indent=2))
    else:
        for name, lines in size.packages.items():
            print(f"{lines:8,}  {name}")
        print(f"{size.core:8,}  core, budget {size.budget:,}, {size.files} files")
        print(f"{size.ptx:8,}  tessera_ptx, budget {size.ptx_budget:,}")
        print(f"{size.words:8,}  words in docstrings and comments")
    for sentence in size.complaints:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if size.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
