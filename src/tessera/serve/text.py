"""Text: conversion between text and tokens.

Tokens of built-in models are the 256 bytes, begin (256) and end (257); other tokens show as their number. A
folder's tokenizer and chat template are read from local files, without running its code. A client's text
cannot become a special token; special tokens do not show in an answer. Where tokenizers are not byte-level, a
token's text can depend on those before it: a window of the newest is decoded, and text that may still change
held back.
"""

import codecs
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.errors import ArtifactError, AskError, TesseraError, extra_module, first_line
from tessera.serve.templates import ChatTemplate

BEGIN, END = 256, 257
Messages = Sequence[Mapping[str, Any]]
# In OpenAI's form.
Tools = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]
NO_VARIABLES: Variables = {}
GENERATES, CONTINUES = "add_generation_prompt", "continue_final_message"
# Longer texts are tokenised in pieces, so that one far too long is not read to its end.
PIECE_CHARS = 2**14
NO_LIMIT = 2**62
UNSURE = "\ufffd"
# For an incomplete UTF-8 character.
MAX_UNSURE = 3
# Tokens decoded without releasing the interpreter lock.
FEW_TOKENS = 1024
# Tokens of a window without a complete character at its end; tokens added at once.
MAX_WINDOW, AT_ONCE = 32, 8
# Tokens of a prompt that are decoded with an answer that continues it.
MAX_CONTEXT = 8
# Stand-ins of special tokens.
FIRST, LAST = "\U00100000", "\U0010fffd"
# In place of a picture.
MARK = "\U0010fff1"
MARKS = re.compile(f"[{FIRST}-{LAST}]")
MAX_WORDS = ord(LAST) - ord(FIRST) + 1
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"
# Letter -> byte of byte-level tokenizers: itself if printable, else from 256 on.
PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHERS = (byte for byte in range(256) if byte not in PRINTED)
LETTERS = {chr(b): b for b in PRINTED} | {chr(256 + i): b for i, b in enumerate(OTHERS)}


class ByteText:
    end: tuple[int, ...] = (END,)

    def encode(self, text: str, most: int = NO_LIMIT, adds: bool = True) -> list[int]:
        """Text beyond `most` tokens may be left out."""
        return [*([BEGIN] if adds else ()), *_bytes(text[: most + 1])]

    def chat(
        self, messages: Messages, tools: Tools = (), most: int = NO_LIMIT, variables: Variables = NO_VARIABLES
    ) -> list[int]:
        turns = [{"role": "tools", "content": json.dumps(tools)}] if tools else []
        tokens = [BEGIN]
        for message in (*turns, *messages):
            calls = message.get("tool_calls")
            content = message.get("content") or ""
            content += json.dumps([call["function"] for call in calls]) if calls else ""
            tokens += [*_bytes(f"{message['role']}:\n{content[:most]}\n"), END]
            if len(tokens) > most:
                break
        if variables.get(CONTINUES):
            return tokens[:-2]  # a line end and an end token
        return tokens + (list(b"assistant:\n") if variables.get(GENERATES, True) else [])

    def reader(self, _before: Sequence[int] = ()) -> "ByteReader":
        return ByteReader(self.token_bytes)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Possibly incomplete characters."""
        if token < BEGIN:
            return bytes([token])
        return b"" if token <= END else b"<%d>" % token


class ByteReader:
    """`feed` returns the text that has become final, `flush` the rest. Invalid bytes become U+FFFD."""

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._token_bytes = token_bytes

    def feed(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, tokens)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise AskError("half a surrogate pair is no text", "Send valid Unicode.", "prompt") from error


def within(encode: Callable[[str], list[int]], text: str, most: int) -> list[int]:
    """Tokens of a text, or of its beginning if it certainly has more than `most`.

    Cutting adds a few tokens.
    """
    if len(text) > max(PIECE_CHARS, most):
        tokens: list[int] = []
        for start in range(0, len(text), PIECE_CHARS):
            tokens += encode(text[start : start + PIECE_CHARS])
            if len(tokens) > most + most // 4 + PIECE_CHARS:
                return tokens
    return encode(text)


class StopWatch:
    """An answer ends where the first stop string is complete; the longest one counts and is not part of it.

    Text that may become one is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        if self.is_stopped or not text:
            return ""
        seen = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if matches:
            self.is_stopped, self._held = True, ""
            return seen[: min(matches)[1]]
        hold = max(overlap(seen, stop) for stop in self._stops)
        cut = len(seen) - hold
        self._held = seen[cut:]
        return seen[:cut]

    def skip(self, text: str) -> str:
        held, self._held = self._held, ""
        return held + text

    def flush(self) -> str:
        return self.skip("")


def overlap(text: str, stop: str) -> int:
    """The longest suffix of the text that is a prefix of the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class SpecialWords:
    """Texts of special tokens, and the marks in their place while a template is rendered."""

    def __init__(self, words: Iterable[str]) -> None:
        longest_first = sorted({*words}, key=len, reverse=True)[:MAX_WORDS]
        self._marks = {word: chr(ord(FIRST) + number) for number, word in enumerate(longest_first)}
        self._words = {mark: word for word, mark in self._marks.items()}
        self._pattern = _marked(longest_first)

    def marked(self, value: Any) -> Any:
        """Texts anywhere in the value with marks for words; a client's own marks are removed."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._marks.get(match.group(), UNSURE), value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(x) for key, x in value.items()}
        return [self.marked(x) for x in value] if isinstance(value, list | tuple) else value

    def word(self, mark: str) -> str:
        return self._words.get(mark, UNSURE)


class FolderText:
    def __init__(self, folder: Path, template: str = "") -> None:
        with _blamed(folder):
            tokenizer = _read(folder)
            fast = getattr(tokenizer, "backend_tokenizer", None)
            self._tokenizer = SlowTokenizer(tokenizer) if fast is None else FastTokenizer(fast.to_str())
            self.end = _ends(folder, tokenizer)
            self._special = {*tokenizer.all_special_ids, *self._tokenizer.special}
            if self._tokenizer.size <= len(self._special):
                raise ValueError("it has special tokens alone")
            self._words = SpecialWords(str(word) for word in tokenizer.all_special_tokens if word)
            named = {k: str(w) for k, w in tokenizer.special_tokens_map.items() if isinstance(w, str)}
            sources = [template, template] if template else _templates_of(tokenizer)
        templates = {source: ChatTemplate(source) for source in {*sources} if source}
        self._templates = [templates.get(source) for source in sources]
        self._variables = {"tools": None, "documents": None, GENERATES: True, **named}
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, most: int = NO_LIMIT, adds: bool = True) -> list[int]:
        return self._ids(text, adds=adds, plain=True, most=most)

    def chat(
        self, messages: Messages, tools: Tools = (), most: int = NO_LIMIT, variables: Variables = NO_VARIABLES
    ) -> list[int]:
        if (template := self._templates[bool(tools)]) is None:
            remedy = "Use /v1/completions, or start the server with --chat-template."
            raise AskError("this model has no chat template", remedy, "messages")
        turns = [{**turn, "content": _shown(turn["content"])} for turn in messages]
        marked = self._words.marked
        conversation = {"messages": marked(turns), "tools": marked(tools) if tools else None}
        text = template.render({**self._variables, **marked(variables), **conversation})
        if variables.get(CONTINUES):
            text = _open_end(text, marked(messages[-1]["content"].rpartition(MARK)[2]))
        tokens: list[int] = []
        for part in _parts(text):
            is_word = FIRST <= part <= LAST
            word = self._words.word(part) if is_word else part
            tokens += self._ids(word, adds=False, plain=is_word, most=most)
            if len(tokens) > most:
                break
        return tokens

    def _ids(self, text: str, adds: bool, plain: bool, most: int) -> list[int]:
        if not text and not adds:
            return []
        _bytes(text)  # refuses half a surrogate pair
        return within(lambda piece: self._tokenizer.encode(piece, adds, plain), text, most)

    def reader(self, before: Sequence[int] = ()) -> "Reader":
        """`before`: tokens from which the text goes on."""
        return ByteReader(self.token_bytes) if self._tokenizer.is_bytes else WindowReader(self, before)

    def decode(self, tokens: Sequence[int]) -> str:
        # Vocabularies are often padded: the last rows have no token.
        size = self._tokenizer.size
        return self._tokenizer.decode([token for token in tokens if token < size])

    def token_bytes(self, token: int) -> bytes:
        raw = self._bytes.get(token)
        if raw is None:
            is_text = token < self._tokenizer.size and token not in self._special
            raw = self._bytes[token] = self._tokenizer.token_bytes(token) if is_text else b""
        return raw


class FastTokenizer:
    """Thread-safe."""

    def __init__(self, written: str) -> None:
        # Batch methods release the interpreter lock. Special words are a setting of a whole tokenizer: two.
        self._special, self._plain = self._read(written), self._read(written)
        self._plain.encode_special_tokens = True
        self.size = self._special.get_vocab_size(with_added_tokens=True)
        document = json.loads(written)
        self.special = {token["id"] for token in document.get("added_tokens") or () if token["special"]}
        decoder = json.dumps(document.get("decoder"), ensure_ascii=False)
        # True if a text is the bytes of its tokens.
        self.is_bytes = (document.get("decoder") or {}).get("type") == "ByteLevel"
        self._by_letter = LETTERS if "ByteLevel" in decoder else {}
        self._space = SPACE if SPACE in decoder or "Metaspace" in decoder else ""

    @staticmethod
    def _read(written: str) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(written)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def encode(self, text: str, adds: bool, plain: bool) -> list[int]:
        """`plain`: no special tokens."""
        tokenizer = self._plain if plain else self._special
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=adds)[0].ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        if len(tokens) <= FEW_TOKENS:  # faster with the lock
            return str(self._special.decode(tokens))
        return str(self._special.decode_batch([tokens])[0])

    def token_bytes(self, token: int) -> bytes:
        piece = self._special.id_to_token(token) or ""
        if self._by_letter and all(letter in self._by_letter for letter in piece):
            return bytes(self._by_letter[letter] for letter in piece)
        if BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        if self._space:
            return piece.replace(self._space, " ").encode()
        return self.decode([token]).encode()


class SlowTokenizer:
    is_bytes, special = False, ()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.size, self._lock = tokenizer, len(tokenizer), threading.Lock()

    def encode(self, text: str, adds: bool, plain: bool) -> list[int]:
        with self._lock:
            return list(
                self._tokenizer(text, add_special_tokens=adds, split_special_tokens=plain)["input_ids"]
            )

    def decode(self, tokens: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), **options))

    def token_bytes(self, token: int) -> bytes:
        """A space before a word may be lost."""
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        return bytes.fromhex(piece[3:5]) if BYTE_TOKEN.fullmatch(piece) else self.decode([token]).encode()


class WindowReader:
    __slots__ = ("_num_old", "_num_returned", "_text", "_window")

    def __init__(self, text: FolderText, before: Sequence[int]) -> None:
        self._text = text
        self._window = list(before[-MAX_CONTEXT:])
        # Context tokens; returned characters of the window.
        self._num_old, self._num_returned = len(self._window), len(text.decode(self._window))

    def feed(self, tokens: Sequence[int]) -> str:
        parts = range(0, len(tokens), AT_ONCE)
        return "".join([self._feed(tokens[start : start + AT_ONCE]) for start in parts])

    def _feed(self, tokens: Sequence[int]) -> str:
        self._window += tokens
        text = self._text.decode(self._window)
        sure = len(text)
        if len(self._window) - self._num_old < MAX_WINDOW:
            while sure > max(0, len(text) - MAX_UNSURE) and text[sure - 1] == UNSURE:
                sure -= 1
        new = text[self._num_returned : sure]
        self._num_returned = max(self._num_returned, sure)
        if sure == len(text) and new:
            del self._window[: self._num_old]
            self._num_old = len(self._window)
            self._num_returned = len(self._text.decode(self._window))
        return new

    def flush(self) -> str:
        rest = self._text.decode(self._window)[self._num_returned :]
        self._num_returned += len(rest)
        return rest


Reader = ByteReader | WindowReader
Text = ByteText | FolderText


@contextmanager
def _blamed(folder: Path) -> Iterator[None]:
    """Untrusted files can make a library raise anything."""
    try:
        yield
    except TesseraError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust
            raise
        remedy = "Save it again with save_pretrained, as tokenizer.json."
        message = f"its tokenizer cannot be read: {first_line(error)}"
        raise ArtifactError(message, remedy, str(folder)) from error


def _templates_of(tokenizer: Any) -> list[str]:
    """Without and with tools; empty: it has none."""
    if not tokenizer.chat_template:
        return ["", ""]
    return [str(tokenizer.get_chat_template(tools=tools)) for tools in (None, [NO_VARIABLES])]


def _read(folder: Path) -> Any:
    transformers = extra_module("transformers", "serve")
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        remedy = "Save its tokenizer there: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        raise ArtifactError("the folder has no tokenizer", remedy, str(folder))
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _open_end(text: str, message: str) -> str:
    """The rendered text without what the template writes after the last message."""
    for written in (message, message.strip()):
        if (start := text.rfind(written)) >= 0:
            return text[: start + len(written)]
    remedy = "Leave continue_final_message out."
    raise AskError("the chat template changes the last message", remedy, "continue_final_message")


def _shown(content: str) -> str | list[dict[str, str]]:
    """Content of a turn; with pictures a list of parts, as templates expect it."""
    if MARK not in content:
        return content
    parts = [[{"type": "image"}, {"type": "text", "text": text}] for text in content.split(MARK)]
    return [part for pair in parts for part in pair if part.get("text") != ""][1:]


def _parts(text: str) -> Iterator[str]:
    """Text and marks in turn; `re.split` would hold the interpreter lock."""
    start = 0
    for match in MARKS.finditer(text):
        yield text[start : match.start()]
        yield match.group()
        start = match.end()
    yield text[start:]


def _marked(words: Sequence[str]) -> re.Pattern[str]:
    """Pattern of stand-ins and special words; its look-ahead is fast in text without them."""
    stand_in = f"{FIRST}-{LAST}"
    first = stand_in + "".join(re.escape(letter) for letter in sorted({word[0] for word in words}))
    return re.compile(f"(?=[{first}])(?:{'|'.join([f'[{stand_in}]', *map(re.escape, words)])})")


def _ends(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    from tessera.capture.models.checkpoint import read_json

    ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = read_json(path).get("eos_token_id") if path.exists() else None
        listed = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int) and x >= 0]
        if listed:
            return tuple(dict.fromkeys([*ends, *listed]))
    return tuple(ends)


def open_text(model: str, template: str = "") -> Text:
    """`template` replaces the folder's chat template."""
    if Path(model).is_dir():
        return FolderText(Path(model), template)
    if template:
        remedy = "Serve a folder with a tokenizer."
        raise TesseraError("a built-in model has no chat template", remedy, "--chat-template")
    return ByteText()
