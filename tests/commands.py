"""Commands of `tessera` in this process, with what they print."""

import json
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
