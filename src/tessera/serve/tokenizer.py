"""The tokenizer and chat template of a checkpoint folder.

Read with Hugging Face transformers, from local files only; no code that a folder brings along is run. Text of
a client cannot become a special token: where a message holds the words of one (such as "<|im_end|>"), those
words are read letter by letter. Nor do special tokens show in an answer.

Text of tokens is found by decoding a short window of the newest ones, as a token's text can depend on those
before it. What may yet change is held back: at most three U+FFFD at the end, which stand for the beginning of
a character.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.capture.models.checkpoint import first_line, read_json
from tessera.errors import ArtifactError, AskError, MissingExtra, TesseraError
from tessera.serve.templates import ChatTemplate
from tessera.serve.text import Messages, Reader

UNSURE = "\ufffd"
# Incomplete characters of UTF-8 have up to three bytes.
MAX_UNSURE = 3
# Tokens of a window that never ends in a whole character: then the text is given as it is.
MAX_WINDOW = 32
# Stand for the words of special tokens while a template is filled in: characters of no language.
FIRST, LAST = "\U00100000", "\U0010fffd"
MARKS = re.compile(f"([{FIRST}-{LAST}])")
MAX_WORDS = ord(LAST) - ord(FIRST) + 1
# How tokenizers with a fallback to bytes write one.
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class FolderText:
    """Text by a folder's own tokenizer."""

    def __init__(self, folder: Path) -> None:
        with _told(folder):
            self._tokenizer = made = _load(folder)
            words = sorted({str(w) for w in made.all_special_tokens if w}, key=len, reverse=True)
            self._words = words[:MAX_WORDS]
            self._special = frozenset(made.all_special_ids)
            kind = type(getattr(getattr(made, "backend_tokenizer", None), "decoder", None)).__name__
            self._by_letter = _letters() if kind == "ByteLevel" else {}
            template = made.get_chat_template() if made.chat_template else None
            self._variables = {
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
                **{
                    name: str(word) for name, word in made.special_tokens_map.items() if isinstance(word, str)
                },
            }
        self.end = _ends(folder, made)
        self._numbers = {word: chr(ord(FIRST) + number) for number, word in enumerate(self._words)}
        self._marked = re.compile("|".join([f"[{FIRST}-{LAST}]", *map(re.escape, self._words)]))
        self._lock = threading.Lock()  # how special words are read is a setting of the whole tokenizer
        self._template = ChatTemplate(template) if template else None

    def encode(self, text: str) -> list[int]:
        """A prompt, with what the tokenizer puts before it; its words are never special tokens."""
        with self._lock:
            return self._ids(text, adds=True, plain=True)

    def chat(self, messages: Messages) -> list[int]:
        """A conversation by the folder's template."""
        if self._template is None:
            remedy = "Use /v1/completions, or add a chat_template to tokenizer_config.json."
            raise AskError("this model has no chat template", remedy, "messages")
        marked = [{key: self._mark(value) for key, value in message.items()} for message in messages]
        text = self._template.render({**self._variables, "messages": marked})
        tokens = []
        with self._lock:
            for part in MARKS.split(text):
                is_word = FIRST <= part <= LAST
                tokens += self._ids(self._word(part) if is_word else part, adds=False, plain=is_word)
        return tokens

    def _mark(self, text: str) -> str:
        """The words of special tokens, each as its own character."""
        return self._marked.sub(lambda found: self._numbers.get(found.group(), UNSURE), text)

    def _word(self, mark: str) -> str:
        number = ord(mark) - ord(FIRST)
        return self._words[number] if number < len(self._words) else UNSURE

    def _ids(self, text: str, adds: bool, plain: bool) -> list[int]:
        if not text:
            return [] if not adds else list(self._tokenizer("", add_special_tokens=True)["input_ids"])
        try:
            found = self._tokenizer(text, add_special_tokens=adds, split_special_tokens=plain)["input_ids"]
        except UnicodeEncodeError as error:
            raise AskError("half a surrogate pair is no text", "Send valid Unicode.", "prompt") from error
        return list(found)

    def reader(self) -> Reader:
        """For one answer."""
        return WindowReader(self)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        # A model's last rows may have no token: its vocabulary is often rounded up.
        known = [token for token in tokens if token < len(self._tokenizer)]
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(known, **options))

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for by itself; of tokenizers that know bytes, its very bytes."""
        if token >= len(self._tokenizer) or token in self._special:
            return b""
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if self._by_letter and all(letter in self._by_letter for letter in piece):
            return bytes(self._by_letter[letter] for letter in piece)
        if BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return self.decode([token]).encode()


class WindowReader:
    """Reads tokens one by one; decodes a window of the newest."""

    __slots__ = ("_given", "_num_old", "_text", "_window")

    def __init__(self, text: FolderText) -> None:
        self._text = text
        self._window: list[int] = []
        # Tokens of the window that are there only for those behind them; characters given of its text.
        self._num_old = self._given = 0

    def feed(self, token: int) -> str:
        """The text that is certain now."""
        self._window.append(token)
        text = self._text.decode(self._window)
        sure = len(text)
        if len(self._window) - self._num_old < MAX_WINDOW:
            while sure > max(0, len(text) - MAX_UNSURE) and text[sure - 1] == UNSURE:
                sure -= 1
        new = text[self._given : sure]
        self._given = max(self._given, sure)
        if sure == len(text) and new:
            del self._window[: self._num_old]
            self._num_old = len(self._window)
            self._given = len(self._text.decode(self._window))
        return new

    def flush(self) -> str:
        """What was held back."""
        return self._text.decode(self._window)[self._given :]


def _load(folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "serve") from error
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        remedy = "Save its tokenizer there: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)."
        raise ArtifactError("this folder holds no tokenizer", remedy, str(folder))
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Whatever the files of a tokenizer make a library raise is one line about the folder."""
    try:
        yield
    except TesseraError:
        raise
    except BaseException as error:  # a stranger's files in a library's code: anything can come
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust
            raise
        remedy = "Save it again with save_pretrained, as tokenizer.json."
        message = f"its tokenizer cannot be read: {first_line(error)}"
        raise ArtifactError(message, remedy, str(folder)) from error


def _letters() -> dict[str, int]:
    """Letter -> byte, as byte-level tokenizers write them: as itself if it prints, else from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def _ends(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end, and those of generation_config.json or else config.json."""
    found = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for name in ("generation_config.json", "config.json"):
        listed = _listed(folder / name)
        if listed:
            return tuple(dict.fromkeys([*found, *listed]))
    return tuple(found)


def _listed(path: Path) -> list[int]:
    value = read_json(path).get("eos_token_id") if path.exists() else None
    listed = value if isinstance(value, list) else [value]
    return [x for x in listed if isinstance(x, int) and x >= 0]
