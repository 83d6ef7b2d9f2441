"""Tools: the form of calls, as a grammar and as it is found in what a model says.

    answer_form, calls_form   schemas and tools -> rules of a grammar (see `grammar`)
    ForcedCalls               text that has the form of calls for certain: told while it comes
    FoundCalls                text that may hold calls: told when each is complete

Calls that are forced have one form, whatever the model: [{"name": "f", "arguments": {...}}, ...]. Where the
model may choose, it writes as it has learned to: calls are found between <tool_call> and </tool_call>, or if
the whole answer is a JSON object or a list of them that name known tools ("arguments" may be called
"parameters"). Anything else is text. Text that may become a call is held back until it is clear.

Not handled: formats that are neither, such as a call written as Python.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tessera.serve.text import overlap

# How JSON is written: on one line, so that no answer is filled up with spaces.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Of one answer.
MAX_CALLS = 32
OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Told:
    """What is new: text of the answer, or of call `call` its name (once, first) or more of its arguments."""

    text: str = ""
    call: int | None = None
    name: str = ""


def answer_form(schema: Mapping[str, Any]) -> str:
    """The rule of a text that is JSON of this schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


def calls_form(tools: Mapping[str, Mapping[str, Any]], most: int) -> str:
    """Rules, the first of them `calls`: at least one and at most so many calls of tools, name -> schema."""
    more = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
    lines = [f'calls: "[" call{more} "]"', "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for number, (name, schema) in enumerate(tools.items()):
        lines.append(f'call_{number}: {json.dumps(_head(name))} args_{number} "}}"')
        lines.append(f"args_{number}: {answer_form(schema)}")
    return "\n".join(lines)


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


class ForcedCalls:
    """Reads calls in the form of `calls_form`, in whatever pieces they come."""

    def __init__(self, names: Iterable[str]) -> None:
        self._heads = {_head(name): name for name in names}
        self.num_calls = 0
        # What stands before the arguments; None: they have begun.
        self._before: str | None = ""
        self._depth = 0
        self._in_text = self._is_escaped = False

    def feed(self, text: str) -> list[Told]:
        found: list[Told] = []
        given = 0
        for at, letter in enumerate(text):
            if self._before is not None:
                self._before = (self._before + letter).lstrip("[, ")
                name = self._heads.get(self._before)
                if name is not None:
                    found.append(Told("", self.num_calls, name))
                    self.num_calls += 1
                    self._before, self._depth, given = None, 0, at + 1
            elif self._is_end(letter):
                found += self._more(text[given:at])
                self._before = ""
        return found if self._before is not None else found + self._more(text[given:])

    def finish(self) -> list[Told]:
        return []

    def _more(self, text: str) -> list[Told]:
        return [Told(text, self.num_calls - 1)] if text else []

    def _is_end(self, letter: str) -> bool:
        """True for the brace behind the arguments."""
        if self._in_text:
            is_over = letter == '"' and not self._is_escaped
            self._is_escaped = letter == "\\" and not self._is_escaped
            self._in_text = not is_over
        elif letter == '"':
            self._in_text = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        return self._depth < 0


class FoundCalls:
    """Looks for calls in text of any form, in whatever pieces it comes. Spaces around calls are left out."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self.num_calls = 0
        self._held = ""
        # True if there was nothing but spaces since the beginning or the last call.
        self._is_blank = True
        # True if the answer begins as JSON does: only its end tells. None: it has not begun.
        self._is_json: bool | None = None

    def feed(self, text: str) -> list[Told]:
        self._held += text
        if self._is_json is None and (begun := self._held.lstrip()):
            self._is_json = begun[0] in "[{"
        if self._is_json:
            return []
        found: list[Told] = []
        while (at := self._held.find(OPEN)) >= 0:
            found += self._tell(at)
            start, end = self._held.find(OPEN), self._held.find(CLOSE)
            if end < 0:
                return found
            inside, whole = self._held[start + len(OPEN) : end], self._held[: end + len(CLOSE)]
            self._held = self._held[end + len(CLOSE) :]
            calls = self._calls(inside)
            found += calls or _said(whole)
            self._is_blank = bool(calls)
        return found + self._tell(len(self._held) - overlap(self._held, OPEN))

    def _tell(self, end: int) -> list[Told]:
        """What is held up to here, if it is more than spaces that may stand before a call."""
        self._is_blank = self._is_blank and not self._held[:end].strip()
        if self._is_blank:
            return []
        said, self._held = self._held[:end], self._held[end:]
        return _said(said)

    def finish(self) -> list[Told]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        inside = held.strip()
        calls = self._calls(inside.removeprefix(OPEN)) if self._is_json or inside.startswith(OPEN) else []
        return [] if self.num_calls and not inside else calls or _said(held)

    def _calls(self, text: str) -> list[Told]:
        """The calls that a text is; none, if it is anything else."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return []
        listed = document if isinstance(document, list) else [document]
        calls = [call for x in listed if (call := _call(x, self._names)) is not None]
        if not len(listed) == len(calls) <= MAX_CALLS:
            return []
        found: list[Told] = []
        for number, (name, arguments) in enumerate(calls, self.num_calls):
            found += (Told("", number, name), Told(arguments, number))
        self.num_calls += len(calls)
        return found


def _call(document: object, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of a call of a known tool."""
    if not isinstance(document, dict):
        return None
    name = document.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    arguments = document.get("arguments", document.get("parameters", {}))
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _said(text: str) -> list[Told]:
    return [Told(text)] if text else []
