"""What a release needs: the API's reference, notebooks that run, a wheel that works in an empty place."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tessera

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_reference_is_of_these_docstrings() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "api_reference.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == made


def test_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(tessera.__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)


def test_release_script_is_a_script() -> None:
    script = ROOT / "scripts" / "release.sh"
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([script, "--tga"], capture_output=True, text=True, check=False)
    assert (2, "usage: scripts/release.sh [--dry-run | --tag]\n") == (done.returncode, done.stdout)


def test_security_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 8
    assert [] == [name for name in named if not (ROOT / name).exists()]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: str(path.name))
def test_notebooks_run(path: Path) -> None:
    """Every cell in order; records of Tessera show as HTML."""
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (4, 5) == (book["nbformat"], book["nbformat_minor"])
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert [] == cell["outputs"], "keep outputs out of the repository"
            value = run_cell("".join(cell["source"]), names)
            if hasattr(value, "_repr_html_"):
                assert "<pre" in value._repr_html_()


def test_there_are_three_notebooks() -> None:
    assert 3 <= len(NOTEBOOKS)


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment() -> None:
    """Built, installed with the extra `serve`, a batch from Python and a service; needs a package index."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [ROOT / "scripts" / "release.sh", "--dry-run"],
        env=environment | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert f"would tag v{tessera.__version__}" in done.stdout


@pytest.mark.slow
def test_documents_of_two_versions_stand_side_by_side(tmp_path: Path) -> None:
    """In the branch gh-pages, with the newest as `latest`."""
    pytest.importorskip("mike", reason="needs the extra 'docs'")
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    who = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | who | {"PATH": path, "NO_MKDOCS_2_WARNING": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path / "clone", env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    for version in ("0.1", "0.2"):
        run("mike", "deploy", "--update-aliases", version, "latest")
    versions = json.loads(run("git", "show", "gh-pages:versions.json"))

    assert [("0.2", ["latest"]), ("0.1", [])] == [(one["version"], one["aliases"]) for one in versions]
    assert "Tessera" in run("git", "show", "gh-pages:0.1/README.html")
