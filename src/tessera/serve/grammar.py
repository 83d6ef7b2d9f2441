"""Grammars: which tokens may come next, so that an answer has the requested form.

A source is in llguidance's dialect of Lark, which has JSON schemas as `%json`. The library bounds the work of
a grammar. Tokens are known by their bytes, so any tokenizer works. An answer ends with its grammar, with or
without an end token.

Masks are computed by threads without the interpreter's lock, while a step ordered without them runs
(`sequences`). An answer whose mask is late sits steps out, and its later masks are computed alone, so that
hard grammars delay no other answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tessera.errors import AskError, MissingExtra, extra_module, first_line
from tessera.kernels.choice import num_words
from tessera.serve.text import Text

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

log = logging.getLogger("tessera.serve")

MAX_CHARS = 2**17
MAX_KEPT, THREADS = 32, 4
# Lexer states; each takes one or two kilobytes.
MAX_STATES = 20_000
# A step waits `PATIENCE_S` for masks; one that takes `SLOW_S` is slow.
MASK_THREADS, PATIENCE_S, SLOW_S = 4, 5e-3, 2e-3
TOO_LARGE = (
    "the answer's grammar became too large to follow. Ask for a simpler form: fewer optional properties, "
    "shorter repetitions."
)


class Guide:
    __slots__ = ("is_slow", "job", "mask", "matcher", "num_words")

    def __init__(self, matcher: "LLMatcher", num_words: int) -> None:
        self.matcher, self.num_words = matcher, num_words
        # `job` computes `mask`: a bit per token that may come next, token 0 lowest; none after a failure.
        self.job: Future[None] | None = None
        self.mask: npt.NDArray[np.int32] | None = None
        self.is_slow = False

    def add(self, number: int) -> None:
        self.matcher.consume_token(number)
        self.job = self.mask = None

    @property
    def is_ready(self) -> bool:
        return self.job is not None and self.job.done()

    @property
    def is_over(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def failure(self) -> str:
        error = first_line(self.matcher.get_error())
        if error:
            log.info("a grammar failed: %s", error)
        return TOO_LARGE if error else ""


class Grammar:
    __slots__ = ("_matcher", "_num_words")

    def __init__(self, matcher: "LLMatcher", num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words

    def start(self) -> Guide:
        return Guide(self._matcher.deep_copy(), self._num_words)


def prepare_masks(
    guides: Iterable[Guide], on_late: Callable[[], None] = lambda: None, patience_s: float | None = PATIENCE_S
) -> None:
    """`on_late` is called, by any thread, when a late mask is ready. `patience_s` None: waits for all."""
    missing = [guide for guide in guides if guide.job is None]
    together = missing if patience_s is None else [guide for guide in missing if not guide.is_slow]
    jobs = [together] if together else []
    jobs += [[guide] for guide in missing if guide.is_slow and patience_s is not None]
    for some in jobs:
        job = _threads().submit(_compute_masks, some)
        for guide in some:
            guide.job = job
        if some is together:
            wait([job], patience_s)
        if not job.done():
            for guide in some:
                guide.is_slow = True
            job.add_done_callback(lambda _: on_late())


def _compute_masks(guides: Sequence[Guide]) -> None:
    begun_s = time.perf_counter()
    masks = np.zeros((len(guides), guides[0].num_words), dtype=np.int32)
    matchers = [(guide.matcher, row) for row, guide in enumerate(guides)]
    _executor().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks[0].nbytes, len(masks))
    for guide, mask in zip(guides, masks, strict=True):
        if guide.matcher.is_error():
            mask[:] = 0
        guide.mask = mask
    if len(guides) == 1:
        guides[0].is_slow = time.perf_counter() - begun_s > SLOW_S


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MASK_THREADS, "tessera-masks")


@cache
def _executor() -> "LLExecutor":
    executor: LLExecutor = extra_module("llguidance", "grammar").LLExecutor()
    return executor


class GrammarCompiler:
    def __init__(self, text: Text, vocab_size: int) -> None:
        library = self._library = extra_module("llguidance", "grammar")
        vocabulary = _Vocabulary(text, vocab_size)
        self._num_words = num_words(vocab_size)
        wrapped, size = library.TokenizerWrapper(vocabulary), len(vocabulary.tokens)
        self._tokenizer = library.LLTokenizer(wrapped, n_vocab=size, eos_token=vocabulary.ends)
        self._limits = library.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        self._threads = ThreadPoolExecutor(THREADS, "tessera-grammars")
        self._kept = lru_cache(MAX_KEPT)(self.compile)

    async def compiled(self, source: str, place: str) -> Grammar:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._kept, source, place)

    def compile(self, source: str, place: str) -> Grammar:
        """Thread-safe."""
        if len(source) > MAX_CHARS:
            raise AskError(f"its grammar has {len(source):,} characters", f"Use up to {MAX_CHARS:,}.", place)
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            first, *more = matcher.get_error().strip().splitlines()
            reason = " ".join([first, *(line for line in more if line.startswith("error: "))])
            raise AskError(f"it makes no grammar: {reason}", "", place)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise AskError("no text fits it", "A schema must not refer to nothing but itself.", place)
        return Grammar(matcher, self._num_words)


def open_grammars(text: Text, vocab_size: int) -> GrammarCompiler | None:
    try:
        return GrammarCompiler(text, vocab_size)
    except MissingExtra:
        return None
    except Exception as error:  # noqa: BLE001 - an optional feature never ends the service
        log.warning("answers of a form are off: llguidance does not load: %s", first_line(error))
        return None


class _Vocabulary:
    bos_token_id = None

    def __init__(self, text: Text, vocab_size: int) -> None:
        self.tokens = [text.token_bytes(number) for number in range(vocab_size)]
        self.ends = [number for number in text.end if number < vocab_size]
        if not self.ends:  # required by the library
            self.ends.append(vocab_size)
            self.tokens.append(b"")
        self.eos_token_id = self.ends[0]
        self.special_token_ids = [number for number, raw in enumerate(self.tokens) if not raw]
        self._by_byte = {raw[0]: number for number, raw in enumerate(self.tokens) if len(raw) == 1}

    def __call__(self, raw: bytes) -> list[int]:
        """Called only for texts that a grammar forces, which are not used."""
        return [self._by_byte[byte] for byte in raw if byte in self._by_byte]
