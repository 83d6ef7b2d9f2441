"""Text: between the words of a client and the tokens of a model.

    text.encode, text.chat        a prompt, a conversation -> tokens; of one that is too long only a part
    text.reader()                 tokens one by one -> text that can no longer change

Built-in models have random weights and no tokenizer: their tokens are the 256 bytes, a begin (256) and an end
(257), and conversations follow a plain template of our own. A token of a larger vocabulary has no text; it is
shown as its number. Folders are read by `tokenizer`.
"""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tessera.errors import AskError

BEGIN, END = 256, 257
# A conversation's turns as chat templates know them: {"role": ..., "content": ...}; of an assistant that
# calls tools also "tool_calls", and of a tool's answer "tool_call_id".
Messages = Sequence[Mapping[str, Any]]
# Tools that a model may call, in OpenAI's shape.
Tools = Sequence[Mapping[str, Any]]
# Longer texts are looked at piece by piece first: one that is far too long is not read to its end.
PIECE_CHARS = 2**14
NO_LIMIT = 2**62


class Reader(Protocol):
    """Reads the tokens of one answer."""

    def feed(self, token: int) -> str:
        """The text that is certain now and was not before."""

    def flush(self) -> str:
        """The rest, at the end of the answer."""


class Text(Protocol):
    """What one model reads and writes."""

    # Tokens that end an answer.
    end: tuple[int, ...]

    def encode(self, text: str, most: int = NO_LIMIT, adds: bool = True) -> list[int]:
        """A prompt as it stands, with what the model expects at a beginning, unless `adds` is False.

        Of one with more tokens than `most` the rest may be left out; more than `most` are given.
        """

    def chat(self, messages: Messages, tools: Tools = (), most: int = NO_LIMIT) -> list[int]:
        """A conversation, and the beginning of the answer to it; `most` as above."""

    def reader(self) -> Reader:
        """For one answer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, all at once."""

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for by itself; it need not be whole characters."""


class ByteText:
    end: tuple[int, ...] = (END,)

    def encode(self, text: str, most: int = NO_LIMIT, adds: bool = True) -> list[int]:
        return [*([BEGIN] if adds else ()), *_bytes(text[: most + 1])]

    def chat(self, messages: Messages, tools: Tools = (), most: int = NO_LIMIT) -> list[int]:
        """Every turn on lines of its own, closed by an end; no text can look like a begin or an end."""
        turns = [{"role": "tools", "content": json.dumps(tools)}] if tools else []
        tokens = [BEGIN]
        for message in (*turns, *messages):
            calls = message.get("tool_calls")
            said = message.get("content") or ""
            said += json.dumps([call["function"] for call in calls]) if calls else ""
            tokens += [*_bytes(f"{message['role']}:\n{said[:most]}\n"), END]
            if len(tokens) > most:
                break
        return tokens + list(b"assistant:\n")

    def reader(self) -> Reader:
        return ByteReader()

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """One byte, nothing for begin and end, the number of any other."""
        if token < BEGIN:
            return bytes([token])
        return b"" if token <= END else b"<%d>" % token


class ByteReader:
    """UTF-8 that comes byte by byte; what is none becomes U+FFFD."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token < BEGIN:
            return self._decoder.decode(bytes((token,)))
        if token <= END:
            return ""
        return self._decoder.decode(b"<%d>" % token)

    def flush(self) -> str:
        """U+FFFD for a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise AskError("half a surrogate pair is no text", "Send valid Unicode.", "prompt") from error


def within(encode: Callable[[str], list[int]], text: str, most: int) -> list[int]:
    """The tokens of a text; of one that has certainly more than `most`, only those of its beginning.

    Pieces have about as many tokens as the text that they are of: where it is cut, some more.
    """
    if len(text) > max(PIECE_CHARS, most):
        tokens: list[int] = []
        for start in range(0, len(text), PIECE_CHARS):
            tokens += encode(text[start : start + PIECE_CHARS])
            if len(tokens) > most + most // 4 + PIECE_CHARS:
                return tokens
    return encode(text)


class StopWatch:
    """Finds stop strings in the text of one answer, in whatever pieces it comes.

    An answer ends where the first stop string is complete; of several that end there, the longest counts. The
    stop string is not part of the answer. Text that may yet become one is held back until it is clear.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """The text that is certainly part of the answer by now."""
        if not self._stops:
            return text
        if self.is_stopped or not text:
            return ""
        seen = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return seen[: min(found)[1]]
        hold = max(overlap(seen, stop) for stop in self._stops)
        cut = len(seen) - hold
        self._held = seen[cut:]
        return seen[:cut]

    def skip(self, text: str) -> str:
        """Text in which nothing is looked for; what was held back comes with it."""
        held, self._held = self._held, ""
        return held + text

    def flush(self) -> str:
        return self.skip("")


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
