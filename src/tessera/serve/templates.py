"""ChatTemplate: a folder's chat template, filled in by a process that has limits.

A template is a program of whoever made the checkpoint: it may loop for ever or fill the memory. So it runs in
a process of its own, this file as a program, with limits of CPU time and memory, which is kept for the next
conversation and started again after it has died of a limit. It inherits no environment and no open files, and
imports nothing of Tessera, so that it starts quickly and holds nothing worth having. In a process that has
limits already (`reading`), it is filled in there.

The process reads frames from standard input (four bytes of length, then JSON): first the limits and the
template, then the variables of one conversation after the other; it answers each with {"text": ...} or
{"error": ...}. A conversation that takes too much CPU time ends it by SIGPROF, whatever it is doing then.

Not handled: templates that need documents; they see none.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import IO, Any, Protocol

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
        self._filling = Filling(template)

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
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            write_frame(self._child.stdin, raw)
            return dict(read_frame(self._child.stdout))
        except (OSError, TypeError, ValueError):  # its answer is missing or cut short
            _end(self._child)
            limits = f"{CPU_S:g} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory"
            return {"error": f"it has died; it may take {limits}"}

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in KEPT if name in os.environ},
            start_new_session=True,  # Ctrl-C is for the server; this ends with its input
        )
        weakref.finalize(self, _end, child)
        assert child.stdin is not None
        with suppress(OSError):  # whoever asks is told
            write_frame(child.stdin, json.dumps({"cpu_s": CPU_S, "template": self._template}).encode())
        return child


def _text_of(answer: Mapping[str, Any]) -> str:
    from tessera.errors import AskError

    if "error" in answer:
        message = f"the model's chat template refuses this: {answer['error']}"
        raise AskError(message, "", "messages")
    return str(answer["text"])


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(OSError):  # what was left to write has nobody to read it
            pipe.close()
    child.wait()


# The process.


class GenerationTag(Extension):
    """`{% generation %}`, by which templates mark answers for training: here only its contents count."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        """The statements up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(source)
    for limit, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    template = None
    while True:
        variables = read_frame(source)
        if variables is None:
            return
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"])
        template = template or Filling(setup["template"])
        raw = json.dumps(template.answer(variables)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sink, raw)


class Filling:
    """A template that is filled in here, whatever it does; limits of time and memory are the process's."""

    def __init__(self, template: str) -> None:
        self._source = template
        self._template: jinja2.Template | None = None

    def answer(self, variables: dict[str, Any]) -> dict[str, str]:
        try:
            if self._template is None:
                self._template = environment().from_string(self._source)
            text = self._template.render(variables)
            if len(text) > MAX_CHARS:
                raise jinja2.TemplateError(f"it makes a text of {len(text):,} characters")
        except MemoryError:
            return {"error": "it takes too much memory"}
        except jinja2.TemplateError as error:
            return {"error": str(error.message)[:500]}
        except Exception as error:  # noqa: BLE001 - the edge of a process: a stranger's program runs in it
            return {"error": f"{type(error).__name__}: {error}"[:500]}
        return {"text": text}


def read_frame(source: IO[bytes]) -> Any:
    """None at the end."""
    head = source.read(4)
    return json.loads(source.read(int.from_bytes(head, "little"))) if len(head) == 4 else None


def write_frame(sink: IO[bytes], raw: bytes) -> None:
    sink.write(len(raw).to_bytes(4, "little") + raw)
    sink.flush()


def environment() -> ImmutableSandboxedEnvironment:
    """What templates of Hugging Face models count on."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = fail
    made.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return made


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As it stands: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def fail(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
