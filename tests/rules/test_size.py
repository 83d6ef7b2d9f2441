"""The size check of `make check`: what it counts, and that it can fail."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "size.py"
LONG_FUNCTION = "def long() -> None:\n" + "    print()\n" * 60


def run(root: Path) -> tuple[int, dict[str, object], str]:
    """Exit code, document and complaints of the script for one checkout."""
    words = [sys.executable, str(SCRIPT), "--json", "--root", str(root)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def checkout(folder: Path, *, budget: int, **modules: str) -> Path:
    """A source tree with the given modules of `tessera`."""
    (folder / "src" / "tessera").mkdir(parents=True)
    (folder / "src" / "tessera_ptx").mkdir()
    (folder / "src" / "tessera_ptx" / "__init__.py").write_text("")
    (folder / "pyproject.toml").write_text(f"[tool.tessera]\ncore-lines = {budget}\nptx-lines = 10\n")
    for name, text in modules.items():
        (folder / "src" / "tessera" / f"{name}.py").write_text(text)
    return folder


def test_source_is_within_its_budget() -> None:
    """No excess of lines, no import cycle, no class name twice, no function longer than a screen."""
    code, document, complaints = run(ROOT)

    assert (0, "") == (code, complaints), document


def test_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    text = '"""Two\nlines."""\n\n# a comment\nx = (1,\n     2)\n'
    _, document, _ = run(checkout(tmp_path, budget=2, a=text))

    assert (2, 5) == (document["core"], document["words"])


def test_directives_to_tools_are_no_words(tmp_path: Path) -> None:
    text = "x = 1  # noqa: E501\ny = (2)  # fmt: skip  # a remark\nz = y  # type: ignore[misc]\n"
    _, document, _ = run(checkout(tmp_path, budget=3, a=text))

    assert (3, 3) == (document["core"], document["words"])


def test_line_above_the_budget_fails(tmp_path: Path) -> None:
    code, _, complaints = run(checkout(tmp_path, budget=1, a="x = 1\ny = 2\n"))

    assert (1, "error: src/tessera has 2 code lines; the budget is 1\n") == (code, complaints)


def test_import_cycle_fails(tmp_path: Path) -> None:
    a, b = "import tessera.b\n", "def f() -> None:\n    import tessera.a\n"
    code, document, _ = run(checkout(tmp_path, budget=9, a=a, b=b))

    assert (1, [["tessera.a", "tessera.b"]]) == (code, document["import_cycles"])


def test_class_name_used_twice_fails(tmp_path: Path) -> None:
    code, document, _ = run(checkout(tmp_path, budget=9, a="class A: ...\n", b="class A: ...\n"))

    assert (1, ["A"]) == (code, document["class_names_twice"])


def test_function_longer_than_a_screen_fails(tmp_path: Path) -> None:
    code, document, _ = run(checkout(tmp_path, budget=99, a=LONG_FUNCTION))

    assert (1, ["tessera.a.long"]) == (code, document["long_functions"])
