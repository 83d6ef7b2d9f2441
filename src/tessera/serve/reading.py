"""Reading: request bodies are parsed and tokenised in threads.

No body delays other clients: the parts of a body are bounded before decoding (`openai.bodies.check_parts`),
which takes milliseconds, and the tokenizer releases the interpreter lock. Large bodies have one thread of
their own; clients take turns.

Not handled: stopping a thread whose client has gone.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from tessera.serve.openai.errors import ApiError
from tessera.serve.openai.read import (
    Draft,
    EmbeddingDraft,
    ModelCard,
    detokenize,
    read_chat,
    read_completion,
    read_embedding,
    read_image,
    tokenize,
)
from tessera.serve.records import ImageDraft

# A body of this size takes about 0.2 s to read.
SMALL_BYTES = 2**19
SMALL_THREADS, LARGE_THREADS = 4, 1

# A draft for the engine, or the answer itself.
ReadBody = Draft | EmbeddingDraft | ImageDraft | bytes
READERS: dict[str, Callable[[bytes, ModelCard], ReadBody]] = {
    "chat": read_chat,
    "completion": read_completion,
    "embedding": read_embedding,
    "image": read_image,
    "tokenize": tokenize,
    "detokenize": detokenize,
}

Result = TypeVar("Result")


class FairPool(Generic[Result]):
    """Runs jobs in a fixed number of threads; clients take turns. For one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads, self._free = ThreadPoolExecutor(num_threads, name), num_threads
        self._waiting: dict[str, deque[tuple[asyncio.Future[Result], Callable[[], Result]]]] = {}

    async def run(self, client: str, job: Callable[[], Result]) -> Result:
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((result, job))
        self._start()
        return await result

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._free and self._waiting:
            client = next(iter(self._waiting))
            jobs = self._waiting.pop(client)
            result, job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs  # behind the other clients
            if not result.cancelled():
                self._free -= 1
                running = asyncio.get_running_loop().run_in_executor(self._threads, job)
                running.add_done_callback(partial(self._finish, result))

    def _finish(self, result: asyncio.Future[Result], running: asyncio.Future[Result]) -> None:
        self._free += 1
        error = running.exception()
        if result.done():  # the client has gone
            pass
        elif error is not None:
            result.set_exception(error)
        else:
            result.set_result(running.result())
        self._start()


class Reading:
    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._small: FairPool[ReadBody] = FairPool(SMALL_THREADS, "tessera-reading")
        self._large: FairPool[ReadBody] = FairPool(LARGE_THREADS, "tessera-reading-large")

    async def read(self, kind: str, raw: bytes, client: str = "") -> ReadBody:
        pool = self._small if len(raw) <= SMALL_BYTES else self._large
        try:
            return await pool.run(client, partial(READERS[kind], raw, self._card))
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None

    def close(self) -> None:
        self._small.close()
        self._large.close()
