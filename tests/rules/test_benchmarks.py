"""Benchmarks start: every command line parses, and every option that is read exists."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks").glob("*.py"))
COMMANDS = [path for path in FILES if "ArgumentParser(" in path.read_text("utf-8")]


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function or method of this name."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in nodes if getattr(node.func, "attr", getattr(node.func, "id", "")) == name]


def options(tree: ast.AST) -> set[str]:
    """Names under which the parser stores what it reads."""
    names = set()
    for call in calls(tree, "add_argument"):
        spelled = next(str(a.value) for a in call.args[::-1] if isinstance(a, ast.Constant))
        dest = [k.value.value for k in call.keywords if k.arg == "dest" and isinstance(k.value, ast.Constant)]
        names.add(str(dest[0]) if dest else spelled.lstrip("-").replace("-", "_"))
    return names


def reads(tree: ast.AST) -> set[str]:
    """Attributes that are read from a variable named `args`."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "args"}


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_help_is_printed(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")

    assert (0, True) == (end.value.code, "usage:" in capsys.readouterr().out)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_every_option_that_is_read_exists(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))

    assert set() == reads(tree) - options(tree)


def test_benchmarks_have_no_import_cycle() -> None:
    imports = {path.stem: set[str]() for path in FILES}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks"):
                module = str(node.module).removeprefix("benchmarks").lstrip(".").partition(".")[0]
                imports[path.stem] |= {module} if module else {alias.name for alias in node.names}

    def reaches(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            new = imports.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    assert [] == [name for name in imports if name in reaches(name)]
