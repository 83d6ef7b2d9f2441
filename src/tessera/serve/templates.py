"""ChatTemplate: a folder's chat template, filled in by a process that has limits.

A template is a program of whoever made the checkpoint: it may loop for ever or fill the memory. So it runs in
a process of its own (`template_child`) with limits of CPU time and memory, which is kept for the next
conversation and started again after it has died of a limit. It inherits no environment and no open files.
In a process that has limits already (`reading`), it is filled in there.

Not handled: templates that need documents; they see none.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tessera.errors import AskError

# Of one conversation. Common templates take about a millisecond.
CPU_S = 2.0
# Of the process, of which Python and jinja2 take a tenth.
MEMORY_BYTES = 768 * 2**20
MAX_CHARS = 8 * 2**20
# What the loader may need to find Python's own libraries.
KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


class Template(Protocol):
    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation, or AskError."""


class TemplateHere:
    """Fills it in here: for a process that lives for one conversation, and ends if that takes too long."""

    def __init__(self, template: str) -> None:
        from tessera.serve.template_child import Filling

        self._filling = Filling(template, MAX_CHARS)

    def render(self, variables: Mapping[str, Any]) -> str:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = self._filling.answer(dict(variables))
        signal.setitimer(signal.ITIMER_PROF, 0)
        return _text_of(answer)


class ChatTemplate:
    """May be used by several threads; conversations take turns."""

    def __init__(self, template: str) -> None:
        self._template, self._lock = template, threading.Lock()
        self._child = self._start()

    def render(self, variables: Mapping[str, Any]) -> str:
        with self._lock:
            return _text_of(self._ask(json.dumps(variables).encode()))

    def _ask(self, raw: bytes) -> dict[str, Any]:
        if self._child.poll() is not None:
            self._child = self._start()
        try:
            _write(self._child, raw)
            assert self._child.stdout is not None
            (size,) = struct.unpack("<I", self._child.stdout.read(4))
            return dict(json.loads(self._child.stdout.read(size)))
        except (OSError, struct.error, ValueError):
            _end(self._child)
            limits = f"{CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory"
            return {"error": f"it has died; it may take {limits}"}

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("template_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in KEPT if name in os.environ},
            start_new_session=True,  # Ctrl-C is for the server; this ends with its input
        )
        weakref.finalize(self, _end, child)
        limits = {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES, "max_chars": MAX_CHARS}
        with suppress(OSError):  # whoever asks is told
            _write(child, json.dumps({**limits, "template": self._template}).encode())
        return child


def _text_of(answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        message = f"the model's chat template refuses this: {answer['error']}"
        raise AskError(message, "", "messages")
    return str(answer["text"])


def _write(child: subprocess.Popen[bytes], raw: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(struct.pack("<I", len(raw)) + raw)
    child.stdin.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(OSError):  # what was left to write has nobody to read it
            pipe.close()
    child.wait()
