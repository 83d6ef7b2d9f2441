"""Grammars: which tokens may come next, so that an answer has the requested form.

    compiler = GrammarCompiler(text, vocab_size)       once per service: a second for 128,000 tokens
    grammar = await compiler.compiled(source, place)   in a thread; the latest ones are cached
    grammar.start() -> Guide                           follows the tokens of one answer

A source is in llguidance's dialect of Lark, which has JSON schemas as `%json`. The library bounds the work of
a grammar. Tokens are known by their bytes, so any tokenizer works. An answer ends with its grammar, with or
without an end token.

Not handled: JSON schema keywords unknown to the library; such a schema is refused by name.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tessera.errors import AskError, MissingExtra, extra_module
from tessera.serve.text import Text

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

log = logging.getLogger("tessera.serve")

# Maximum characters of a source.
MAX_CHARS = 2**17
# Cached grammars, and concurrent compilations.
MAX_KEPT, THREADS = 32, 4
# Maximum lexer states, each one or two kilobytes.
MAX_STATES = 20_000


class Guide:
    """Follows one answer. Not thread-safe."""

    __slots__ = ("matcher",)

    def __init__(self, matcher: "LLMatcher") -> None:
        self.matcher = matcher

    def add(self, number: int) -> None:
        self.matcher.consume_token(number)

    @property
    def is_over(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def failure(self) -> str:
        """Why the grammar cannot be followed further; empty: it can."""
        error = _first_line(self.matcher.get_error())
        return f"the answer cannot follow its grammar any further ({error})" if error else ""


class Grammar:
    __slots__ = ("_matcher",)

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def start(self) -> Guide:
        return Guide(self._matcher.deep_copy())


def write_masks(guides: Sequence[Guide], masks: npt.NDArray[np.int32]) -> None:
    """Row i: a bit per token that may come next in guide i, token 0 lowest; none after a failure."""
    if not guides:
        return
    width = masks.shape[1] * masks.itemsize
    matchers = [(guide.matcher, row) for row, guide in enumerate(guides)]
    _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, width, len(masks))
    for row, guide in enumerate(guides):
        if guide.matcher.is_error():
            masks[row] = 0


@cache
def _executor() -> "LLExecutor":
    """Threads that compute the masks of a step together."""
    executor: LLExecutor = extra_module("llguidance", "grammar").LLExecutor()
    return executor


class GrammarCompiler:
    def __init__(self, text: Text, vocab_size: int) -> None:
        library = self._library = extra_module("llguidance", "grammar")
        vocabulary = _Vocabulary(text, vocab_size)
        wrapped, size = library.TokenizerWrapper(vocabulary), len(vocabulary.tokens)
        self._tokenizer = library.LLTokenizer(wrapped, n_vocab=size, eos_token=vocabulary.ends)
        self._limits = library.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        self._threads = ThreadPoolExecutor(THREADS, "tessera-grammars")
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    async def compiled(self, source: str, place: str) -> Grammar:
        """`compile` in a thread, with a cache. For one event loop."""
        grammar = self._kept.get(source)
        if grammar is None:
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._threads, self.compile, source, place)
        self._kept[source] = grammar
        self._kept.move_to_end(source)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return grammar

    def compile(self, source: str, place: str) -> Grammar:
        """A grammar, or `AskError` about its field. Thread-safe."""
        if len(source) > MAX_CHARS:
            raise AskError(f"its grammar has {len(source):,} characters", f"Use up to {MAX_CHARS:,}.", place)
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise AskError(f"it makes no grammar: {_first_line(matcher.get_error())}", "", place)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise AskError("no text fits it", "A schema must not refer to nothing but itself.", place)
        return Grammar(matcher)


def open_grammars(text: Text, vocab_size: int) -> GrammarCompiler | None:
    """None if the extra 'grammar' is missing or does not work."""
    try:
        return GrammarCompiler(text, vocab_size)
    except MissingExtra:
        return None
    except Exception as error:  # noqa: BLE001 - an optional feature never ends the service
        log.warning("answers of a form are off: llguidance does not load: %s", _first_line(str(error)))
        return None


class _Vocabulary:
    bos_token_id = None

    def __init__(self, text: Text, vocab_size: int) -> None:
        self.tokens = [text.token_bytes(number) for number in range(vocab_size)]
        self.ends = [number for number in text.end if number < vocab_size]
        if not self.ends:  # required by the library; such answers end with their grammar
            self.ends.append(vocab_size)
            self.tokens.append(b"")
        self.eos_token_id = self.ends[0]
        self.special_token_ids = [number for number, raw in enumerate(self.tokens) if not raw]
        self._by_byte = {raw[0]: number for number, raw in enumerate(self.tokens) if len(raw) == 1}

    def __call__(self, raw: bytes) -> list[int]:
        """Called only for texts that a grammar forces, which are not used."""
        return [self._by_byte[byte] for byte in raw if byte in self._by_byte]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
