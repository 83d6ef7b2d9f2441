"""What the documents show of a command is what the command prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# In this order: a command may read what one before it has written.
DOCUMENTS = ("docs/guide.md", "docs/trust.md", "docs/deciding.md", "README.md")
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
# One process for all commands: each prints its number first.
RUN = """
import runpy, sys
from tessera.cli import _main

for number, line in enumerate(sys.argv[1:]):
    program, *words = line.split()
    print(f"== {number}", flush=True)
    if program == "tessera":
        _main(words)
    else:
        runpy.run_path(words[0], run_name="__main__")
    sys.stdout.flush()
"""


def shown() -> list[tuple[str, str]]:
    """(command, line) for every line that a document shows under a command."""
    found = []
    for document in DOCUMENTS:
        for block in BLOCK.findall((ROOT / document).read_text(encoding="utf-8")):
            command = ""
            for line in filter(str.strip, block.splitlines()):
                if line.startswith("$ "):
                    command = line[2:]
                elif line != "...":
                    found.append((command, plain(line)))
    return found


def plain(text: str) -> str:
    """Text without the width of its lines and columns."""
    return re.sub(r"[\s┃│]+", " ", text).strip()


@pytest.mark.slow
def test_commands_print_what_is_shown(tmp_path: Path) -> None:
    """Every line that a document shows under a command is in what it prints, in a folder of its own."""
    commands = list(dict.fromkeys(command for command, _ in shown()))
    for name in ("corpus", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *commands],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    parts = re.split(r"^== \d+\n", done.stdout, flags=re.MULTILINE)[1:]

    assert len(commands) == len(parts), done.stderr[-2000:]
    printed = dict(zip(commands, map(plain, parts), strict=True))
    assert [(command, line) for command, line in shown() if line not in printed[command]] == []
