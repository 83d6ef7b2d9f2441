"""The library by itself: its README runs, and it needs nothing but NumPy."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```(python)?\n(.*?)^```",
    (ROOT / "src" / "tessera_ptx" / "README.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
EXAMPLES = [code for language, code in BLOCKS if language]


def test_the_two_line_example_prints_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block after the first example is the beginning of what it prints."""
    monkeypatch.chdir(ROOT)
    exec(EXAMPLES[0], {})
    shown = next(text for language, text in BLOCKS if not language)

    assert 2 == len(EXAMPLES[0].split("\n\n"))
    assert capsys.readouterr().out.startswith(shown.removesuffix("...\n"))


def test_the_interpreter_example_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second example asserts is true: `y` is left as it was."""
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(EXAMPLES[1], names)

    assert (names["y"] == 1).all()


def test_it_imports_numpy_and_nothing_else() -> None:
    """People who place no kernels need only this package and NumPy."""
    found = set()
    for file in (ROOT / "src" / "tessera_ptx").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            found |= {str(node.module)} if isinstance(node, ast.ImportFrom) else set(names)

    assert {"numpy", "tessera_ptx"} == {name.partition(".")[0] for name in found} - sys.stdlib_module_names
