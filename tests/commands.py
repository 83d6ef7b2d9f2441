"""Commands of `tessera`: in this process, with what they print, and the surroundings of others."""

import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

import sampling
from tessera.cli import _main

T = TypeVar("T")


# Commands that plan, and take `--effort`.
PLANNING = ("plan", "advise")


def quickly(words: Sequence[object]) -> list[str]:
    """The words of a command; plans that are only used are quick ones, except in whole runs."""
    is_quick = words[0] in PLANNING and "--effort" not in words and not sampling.is_whole()
    return [*map(str, words), *(("--effort", "quick") if is_quick and len(words) > 1 else ())]


def call(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    capsys.readouterr()  # what was printed before it is not its own
    code = _main(quickly(words))
    out, err = capsys.readouterr()
    return code, out, err


def answer(*words: object, capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON document of a command that succeeds."""
    code, out, err = call(*words, "--json", capsys=capsys)
    assert 0 == code, err
    return json.loads(out)


def used(use: Callable[[Any], T], *words: object) -> tuple[T, str]:
    """What `use` makes of the JSON line of a command that serves, and all that is on standard error.

    The command has this thread, since it handles signals. SIGTERM ends it, and it has to end in good order.
    """
    reading, writing = os.pipe()
    found: list[T] = []

    def talk() -> None:
        with open(reading, encoding="utf-8") as lines:
            try:
                if line := lines.readline():  # else it was refused
                    found.append(use(json.loads(line)))
            finally:
                if line:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    talker, errors, switch_s = threading.Thread(target=talk), io.StringIO(), sys.getswitchinterval()
    with open(writing, "w", encoding="utf-8") as out:
        talker.start()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = _main([str(word) for word in words])
    talker.join()
    sys.setswitchinterval(switch_s)
    assert 0 == code, errors.getvalue()
    return found[0], errors.getvalue()


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
