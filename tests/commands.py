"""Commands of `tessera`: in this process, with what they print, and the surroundings of others."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tessera.cli import _main


def call(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    capsys.readouterr()  # what was printed before it is not its own
    code = _main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def answer(*words: object, capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON document of a command that succeeds."""
    code, out, err = call(*words, "--json", capsys=capsys)
    assert 0 == code, err
    return json.loads(out)


@contextmanager
def within_s(seconds: int) -> Iterator[None]:
    """As by Ctrl-C, what is not over by then is ended."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def without_transformers(folder: Path) -> dict[str, str]:
    """The surroundings of processes that are sent weights: what builds models takes seconds to import."""
    (folder / "transformers.py").write_text("raise ImportError\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", ".")])}
