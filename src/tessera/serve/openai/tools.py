"""Tool calls: their grammar, and the parser that finds them in a model's output.

Forced calls are a list: [{"name": "f", "arguments": {...}}, ...]. A call stands between <tool_call> and
</tool_call>, or the whole answer is a JSON object or list that names tools of the request ("parameters" may
replace "arguments"). Anything else is text. Text that may become a call is held back.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tessera.serve.text import overlap

# So that answers are not padded with spaces.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_CALLS = 32
OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class OutputPart:
    """Text; or the name of call number `call` (once, first); or more of its arguments."""

    text: str = ""
    call: int | None = None
    name: str = ""


class CalledTool(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()

    @property
    def text(self) -> str:
        """The arguments as they were written; some models write them as a text."""
        raw = bytes(self.arguments or self.parameters or b"{}")
        return msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()


CALLED = msgspec.json.Decoder(CalledTool)
SCANNER = json.JSONDecoder()


def answer_form(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


def calls_form(tools: Mapping[str, Mapping[str, Any]], most: int) -> str:
    """Rules, the first of them `calls`: 1 to `most` calls of tools (name -> schema)."""
    more = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
    lines = [f'calls: "[" call{more} "]"', "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for number, (name, schema) in enumerate(tools.items()):
        lines.append(f'call_{number}: {json.dumps(_head(name))} args_{number} "}}"')
        lines.append(f"args_{number}: {answer_form(schema)}")
    return "\n".join(lines)


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


class FoundCalls:
    """Spaces around calls are dropped."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self.num_calls = 0
        self._held = ""
        # Only spaces came since the beginning or the last call.
        self._is_blank = True
        # An answer that begins like JSON is parsed at its end; None: no output yet.
        self._is_json: bool | None = None

    def feed(self, text: str) -> list[OutputPart]:
        self._held += text
        if self._is_json is None and (begun := self._held.lstrip()):
            self._is_json = begun[0] in "[{"
        if self._is_json:
            return []
        parts: list[OutputPart] = []
        while (at := self._held.find(OPEN)) >= 0:
            parts += self._release(at)
            start, end = self._held.find(OPEN), self._held.find(CLOSE)
            if end < 0:
                return parts
            inside, whole = self._held[start + len(OPEN) : end], self._held[: end + len(CLOSE)]
            self._held = self._held[end + len(CLOSE) :]
            calls = self._calls(inside)
            parts += calls or _text(whole)
            self._is_blank = bool(calls)
        return parts + self._release(len(self._held) - overlap(self._held, OPEN))

    def _release(self, end: int) -> list[OutputPart]:
        self._is_blank = self._is_blank and not self._held[:end].strip()
        if self._is_blank:
            return []
        text, self._held = self._held[:end], self._held[end:]
        return _text(text)

    def finish(self) -> list[OutputPart]:
        held, self._held = self._held, ""
        inside = held.strip()
        calls = self._calls(inside.removeprefix(OPEN)) if self._is_json or inside.startswith(OPEN) else []
        return [] if self.num_calls and not inside else calls or _text(held)

    def _calls(self, text: str) -> list[OutputPart]:
        calls = _called(text.strip())
        if not 0 < len(calls) <= MAX_CALLS or not all(call.name in self._names for call in calls):
            return []
        parts: list[OutputPart] = []
        for number, call in enumerate(calls, self.num_calls):
            parts += (OutputPart("", number, call.name), OutputPart(call.text, number))
        self.num_calls += len(calls)
        return parts


def _called(text: str) -> list[CalledTool]:
    """Calls of an object or a list; of a list that was cut short, the complete ones."""
    calls, at = list[CalledTool](), 1
    try:
        if not text.startswith("["):
            return [CALLED.decode(text)]
        while True:
            at = len(text) - len(text[at:].lstrip(", \n\r\t"))
            if text[at:].startswith("]"):
                return calls if at + 1 == len(text) else []
            end = SCANNER.raw_decode(text, at)[1]
            calls.append(CALLED.decode(text[at:end]))
            at = end
    except json.JSONDecodeError:
        return calls
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return []


def _text(text: str) -> list[OutputPart]:
    return [OutputPart(text)] if text else []
