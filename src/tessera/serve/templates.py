"""ChatTemplate: a checkpoint's chat template, rendered in a sandbox process with limits.

A template is untrusted code that may loop or fill the memory, and a thread cannot be stopped. So jinja2's
sandbox runs in one process (this file as a program) with a memory limit. A conversation over the time limit
kills it; the next one starts another. It inherits no environment and no open files, and imports nothing of
Tessera.

It receives JSON messages: the template, then the variables of each conversation; it answers {"text": ...} or
{"error": ...}. Not handled: templates that need documents.
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
from datetime import datetime
from multiprocessing.connection import Connection, Pipe
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Common templates take a millisecond.
LIMIT_S = 5.0
ALARM_S = 6
# Python and jinja2 take a tenth.
MEMORY_BYTES = 768 * 2**20
DIED = f"its process died; it may use {MEMORY_BYTES >> 20} MiB of memory"
MAX_CHARS = 8 * 2**20
ERROR_CHARS = 500
# For the loader to find Python's libraries.
KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


class ChatTemplate:
    def __init__(self, template: str) -> None:
        self._template, self._lock = template, threading.Lock()
        self._child, self._pipe = self._start()

    def render(self, variables: Mapping[str, Any]) -> str:
        import msgspec

        from tessera.errors import AskError

        raw = msgspec.json.encode(variables)
        with self._lock:
            # Twice, in case the process was killed from outside.
            answer = self._exchange(raw) or self._exchange(raw) or {"error": DIED}
        if "error" in answer:
            raise AskError(f"the model's chat template refuses this: {answer['error']}", "", "messages")
        return str(answer["text"])

    def _exchange(self, raw: bytes) -> dict[str, Any]:
        import msgspec

        if self._child.poll() is not None:
            self._child, self._pipe = self._start()
        try:
            self._pipe.send_bytes(raw)
            if self._pipe.poll(LIMIT_S):
                return dict(msgspec.json.decode(self._pipe.recv_bytes()))
            answer = {"error": f"it takes more than {LIMIT_S:g} s"}
        except (OSError, EOFError, ValueError):
            answer = {}
        _end(self._child, self._pipe)
        return answer

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        pipe, child_pipe = Pipe()
        with child_pipe:
            child = subprocess.Popen(
                [sys.executable, "-I", __file__, str(child_pipe.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in KEPT if name in os.environ},
                pass_fds=(child_pipe.fileno(),),
                start_new_session=True,  # Ctrl-C is for the server; this process ends with its pipe
            )
        weakref.finalize(self, _end, child, pipe)
        pipe.send_bytes(self._template.encode())
        return child, pipe


def _end(child: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    child.kill()
    child.wait()


class GenerationTag(Extension):
    """`{% generation %}` marks answers for training; only its contents are rendered."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def main() -> None:
    limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    pipe = Connection(int(sys.argv[1]))
    source, template = pipe.recv_bytes().decode(), None
    while True:
        try:
            variables = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        signal.alarm(ALARM_S)  # a server that was killed cannot end this process
        try:
            template = template or environment().from_string(source)
            answer = {"text": _rendered(template, variables)}
        except MemoryError:
            answer = {"error": "it takes too much memory"}
        except jinja2.TemplateError as error:
            answer = {"error": str(error.message)[:ERROR_CHARS]}
        except Exception as error:  # noqa: BLE001 - a template is untrusted code
            answer = {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARS]}
        signal.alarm(0)
        pipe.send_bytes(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))


def _rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    text = template.render(variables)
    if len(text) > MAX_CHARS:
        raise jinja2.TemplateError(f"it makes a text of {len(text):,} characters")
    return text


def environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face templates expect it."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = fail
    sandbox.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return sandbox


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Without the HTML escapes of jinja2's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def fail(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
