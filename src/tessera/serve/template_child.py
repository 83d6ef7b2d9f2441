"""Fills in one chat template, in a process of its own: see `templates`, which starts this file as a program.

Reads frames from standard input (four bytes of length, then JSON): first the limits and the template, then
the variables of one conversation after the other; answers each with {"text": ...} or {"error": ...}.
A conversation that takes too much CPU time ends the process by SIGPROF, whatever it is doing at that moment.
Imports nothing of Tessera, so that it starts quickly and holds nothing worth having.
"""

import json
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """`{% generation %}`, by which templates mark answers for training: here only its contents count."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        """The statements up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = read(source)
    for limit, most in (
        (resource.RLIMIT_AS, setup["memory_bytes"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    template = None
    while True:
        variables = read(source)
        if variables is None:
            return
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"])
        template = template or Filling(setup["template"], setup["max_chars"])
        raw = json.dumps(template.answer(variables)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(struct.pack("<I", len(raw)) + raw)
        sink.flush()


class Filling:
    """A template that is filled in here, whatever it does; limits of time and memory are the process's."""

    def __init__(self, template: str, max_chars: int) -> None:
        self._source, self._max_chars = template, max_chars
        self._template: jinja2.Template | None = None

    def answer(self, variables: dict[str, Any]) -> dict[str, str]:
        try:
            if self._template is None:
                self._template = environment().from_string(self._source)
            text = self._template.render(variables)
            if len(text) > self._max_chars:
                raise jinja2.TemplateError(f"it makes a text of {len(text):,} characters")
        except MemoryError:
            return {"error": "it takes too much memory"}
        except jinja2.TemplateError as error:
            return {"error": str(error.message)[:500]}
        except Exception as error:  # noqa: BLE001 - the edge of a process: a stranger's program runs in it
            return {"error": f"{type(error).__name__}: {error}"[:500]}
        return {"text": text}


def read(source: BinaryIO) -> Any:
    """One frame; None at the end."""
    head = source.read(4)
    return json.loads(source.read(*struct.unpack("<I", head))) if len(head) == 4 else None


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
