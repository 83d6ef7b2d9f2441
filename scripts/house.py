"""How large the house is: lines, files, classes, long functions, import cycles, by package, at any revision.

    python scripts/house.py                              the working tree
    python scripts/house.py --rev 9ad0cce                a revision
    python scripts/house.py --before 9ad0cce             both, one after the other

Code is lines that are neither blank nor comments nor docstrings. Imports count wherever they stand, also in
functions. A cycle is one of modules; what a package takes from its own modules for others to import is none.
A module with one importer is one that a single other module imports.
"""

import argparse
import ast
import io
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG = 60
# Not of the core, under their names of then and now.
APART = ("tessera_ptx", "tessera.analyze.ptx.", "tessera.paper")
COLUMNS = ("files", "code", "total", "classes", "functions", "long functions", "one importer")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Module:
    """What one file holds."""

    name: str
    is_package: bool
    code: int = 0
    total: int = 0
    classes: list[str] = field(default_factory=list)
    num_functions: int = 0
    num_long: int = 0
    imports: set[str] = field(default_factory=set)

    @property
    def package(self) -> str:
        """ "plan" of tessera.plan.solve; other libraries, and modules of no package, by their own names."""
        library, *inside = self.name.split(".")
        if library != "tessera":
            return library
        return inside[0] if len(inside) > 1 or (inside and self.is_package) else "(modules)"


def measure(source: Path) -> dict[str, Module]:
    """The modules of a source folder, by name."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = _read(Module(name, is_package), path.read_text(encoding="utf-8"))
    for module in modules.values():
        module.imports = {m for m in module.imports if m in modules} - {module.name}
    return modules


def _read(module: Module, text: str) -> Module:
    tree = ast.parse(text)
    module.total = len(text.splitlines())
    module.code = len(_code_lines(text) - _docstring_lines(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            module.classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.num_functions += 1
            module.num_long += (node.end_lineno or node.lineno) - node.lineno + 1 > LONG
        module.imports |= set(_imported(node))
    return module


def _code_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def _imported(node: ast.AST) -> Iterator[str]:
    """Modules and names that a statement imports; both forms of `from package import name`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def cycles(modules: dict[str, Module]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group by imports, the largest first."""
    reach: dict[str, set[str]] = {}
    for name in (name for name, module in modules.items() if not module.is_package):
        seen, waiting = set[str](), [name]
        while waiting:
            others = {m for m in modules[waiting.pop()].imports if not modules[m].is_package} - seen
            seen |= others
            waiting += others
        reach[name] = seen
    groups = {frozenset(o for o in reach[n] if n in reach[o]) for n in reach if n in reach[n]}
    return sorted((sorted(group) for group in groups), key=len, reverse=True)


def rows(modules: dict[str, Module]) -> dict[str, Counter[str]]:
    """Package -> its figures; "all" has the sums."""
    importers = Counter(other for module in modules.values() for other in module.imports)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for module in modules.values():
        figures = Counter(
            {
                "files": 1,
                "code": module.code,
                "total": module.total,
                "classes": len(module.classes),
                "functions": module.num_functions,
                "long functions": module.num_long,
                "one importer": importers[module.name] == 1 and not module.is_package,
            }
        )
        found[module.package] += figures
        found["all"] += figures
    return found


def facts(modules: dict[str, Module]) -> dict[str, str]:
    """What is not by package."""
    names = Counter(name for module in modules.values() for name in module.classes)
    groups = cycles(modules)
    core = [m for m in modules.values() if not m.name.startswith(APART)]
    sizes = ", ".join(str(len(group)) for group in groups)
    return {
        "core, without PTX and paper": f"{sum(m.code for m in core):,} lines of code in {len(core)} files",
        "import cycles": f"{len(groups)}" + (f" (of {sizes} modules)" if groups else ""),
        "class names used more than once": str(sum(n > 1 for n in names.values())),
        f"functions over {LONG} lines": str(sum(m.num_long for m in modules.values())),
        "files of fewer than 80 lines": str(sum(m.total < 80 for m in modules.values())),
        "files of more than 600 lines": str(sum(m.total > 600 for m in modules.values())),
    }


def at(revision: str) -> dict[str, Module]:
    """The modules of a revision; of the working tree for none."""
    if not revision:
        return measure(ROOT / "src")
    packed = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
        return measure(Path(folder) / "src")


def table(modules: dict[str, Module]) -> list[str]:
    """A Markdown table by package, the largest first, and the facts."""
    lines = ["| package | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, figures in sorted(rows(modules).items(), key=lambda row: -row[1]["code"]):
        lines.append(f"| {name} | " + " | ".join(f"{figures[column]:,}" for column in COLUMNS) + " |")
    return [*lines, "", *(f"- {name}: {said}" for name, said in facts(modules).items())]


def main() -> None:
    """Prints one revision, or two one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rev", default="", help="a revision; without it the working tree")
    parser.add_argument("--before", default="", help="another revision, shown first")
    args = parser.parse_args()
    for name, revision in (
        (("Before", args.before), ("After", args.rev)) if args.before else (("", args.rev),)
    ):
        if name:
            print(f"## {name}{f' ({revision})' if revision else ''}\n")
        print("\n".join([*table(at(revision)), ""]))


if __name__ == "__main__":
    main()
