"""Measures of the source that CONTRIBUTING promises; `scripts/house.py` has the others."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
MAX_LINES = 60


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those below a node; expressions, which are most of a tree, are not looked into."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


@pytest.fixture(scope="module")
def nodes() -> list[tuple[str, ast.AST]]:
    """Every statement of the source, with the file it is in."""
    files = sorted(SOURCE.rglob("*.py"))
    return [(path.name, node) for path in files for node in statements(ast.parse(path.read_text("utf-8")))]


def test_a_class_name_is_used_once(nodes: list[tuple[str, ast.AST]]) -> None:
    """One word, one thing."""
    names = Counter(node.name for _, node in nodes if isinstance(node, ast.ClassDef))

    assert [name for name, count in names.items() if count > 1] == []


def test_a_function_fits_a_screen(nodes: list[tuple[str, ast.AST]]) -> None:
    """None has more than 60 lines."""
    functions = [(file, node) for file, node in nodes if isinstance(node, FUNCTIONS)]
    long = [(f, n.name) for f, n in functions if (n.end_lineno or 0) - n.lineno >= MAX_LINES]

    assert long == []
