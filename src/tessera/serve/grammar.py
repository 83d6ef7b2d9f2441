"""Grammars: which tokens may come next, so that an answer has the form that was asked for.

    compiler = GrammarCompiler(text, vocab_size)       once a service: takes a second for 128,000 tokens
    grammar = await compiler.compiled(source, place)   in a thread; the latest ones are kept
    grammar.start() -> Guide                           which follows the tokens of one answer

A source is a grammar in llguidance's dialect of Lark, which has JSON schemas as `%json`. The library bounds
what a grammar may take, when it is compiled and for every token; what goes beyond is told. Tokens are known
by their bytes, so any tokenizer will do. An answer is over where its grammar is, with or without an end.

Not handled: keywords of JSON schema that the library does not know; a schema with one is refused by name.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tessera.errors import AskError, MissingExtra, extra_module
from tessera.serve.text import Text

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Characters of a grammar.
MAX_CHARS = 2**17
# Grammars that are kept, and those that are compiled at once.
MAX_KEPT, THREADS = 32, 4
# States that a grammar's lexer may have, each one or two kilobytes.
MAX_STATES = 20_000


class Guide:
    """Follows one answer. Used by one thread at a time."""

    __slots__ = ("_mask", "_matcher")

    def __init__(self, matcher: "LLMatcher", mask: bytes) -> None:
        self._matcher = matcher
        self._mask: bytes | None = mask

    def add(self, number: int) -> None:
        self._matcher.consume_token(number)
        self._mask = None

    def mask(self) -> bytes:
        """A bit for every token that may come next, the lowest bit of the first byte for token 0.

        After a failure none may, also not the end that the library would allow.
        """
        if self._mask is None:
            mask = self._matcher.compute_bitmask()
            self._mask = bytes(len(mask)) if self._matcher.is_error() else mask
        return self._mask

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str:
        """Why the grammar cannot be followed further; empty: it can."""
        return _first_line(self._matcher.get_error())


class Grammar:
    """A compiled grammar; guides are made of it by any thread."""

    __slots__ = ("_mask", "_matcher")

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher, self._mask = matcher, matcher.compute_bitmask()

    def start(self) -> Guide:
        return Guide(self._matcher.deep_copy(), self._mask)


class GrammarCompiler:
    def __init__(self, text: Text, vocab_size: int) -> None:
        library = self._library = extra_module("llguidance", "grammar")
        known = _Vocabulary(text, vocab_size)
        wrapped = library.TokenizerWrapper(known)
        self._tokenizer = library.LLTokenizer(wrapped, n_vocab=len(known.tokens), eos_token=known.ends)
        self._limits = library.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        self._threads = ThreadPoolExecutor(THREADS, "tessera-grammars")
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    async def compiled(self, source: str, place: str) -> Grammar:
        """As `compile`, in a thread, unless it is known; by one event loop."""
        found = self._kept.get(source)
        if found is None:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, self.compile, source, place)
        self._kept[source] = found
        self._kept.move_to_end(source)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found

    def compile(self, source: str, place: str) -> Grammar:
        """A grammar, or AskError about the field that it came from; from any thread."""
        if len(source) > MAX_CHARS:
            raise AskError(f"a grammar of {len(source):,} characters", f"Use up to {MAX_CHARS:,}.", place)
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise AskError(f"it makes no grammar: {_first_line(matcher.get_error())}", "", place)
        return Grammar(matcher)


def open_grammars(text: Text, vocab_size: int) -> GrammarCompiler | None:
    """The compiler of a model's grammars; None where the extra 'grammar' is not installed."""
    try:
        return GrammarCompiler(text, vocab_size)
    except MissingExtra:
        return None


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, text: Text, vocab_size: int) -> None:
        self.tokens = [text.token_bytes(number) for number in range(vocab_size)]
        self.ends = [number for number in text.end if number < vocab_size]
        if not self.ends:  # the library wants one; such answers end where nothing more may come
            self.ends.append(vocab_size)
            self.tokens.append(b"")
        self.eos_token_id = self.ends[0]
        self.special_token_ids = [number for number, raw in enumerate(self.tokens) if not raw]
        self._by_byte = {raw[0]: number for number, raw in enumerate(self.tokens) if len(raw) == 1}

    def __call__(self, raw: bytes) -> list[int]:
        """The library only asks for texts that a grammar forces, and we take none of them."""
        return [self._by_byte[byte] for byte in raw if byte in self._by_byte]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
