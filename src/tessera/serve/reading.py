"""Reading: request bodies are parsed and tokenised in threads.

No body delays other clients: the parts of a body are bounded before decoding (`openai.bodies.check_parts`),
which takes milliseconds; the tokenizer releases the interpreter lock. Large bodies have one thread of their
own; clients take turns.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from tessera.execute.admission import FairQueue
from tessera.serve.openai.errors import ApiError
from tessera.serve.openai.read import Draft, EmbeddingDraft, ModelCard
from tessera.serve.records import ImageDraft

# A body of this size takes about 0.2 s to read.
SMALL_BYTES = 2**19
SMALL_THREADS, LARGE_THREADS = 4, 1

ReadBody = Draft | EmbeddingDraft | ImageDraft | bytes
Read = Callable[[bytes, ModelCard], ReadBody]

Result = TypeVar("Result")
WaitingJob = tuple[asyncio.Future[Result], Future[Result], Callable[[], Result]]


class FairPool(Generic[Result]):
    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._waiting: FairQueue[WaitingJob[Result]] = FairQueue()

    async def run(self, client: str, job: Callable[[], Result]) -> Result:
        result: Future[Result] = Future()
        awaited = asyncio.wrap_future(result)
        self._waiting.push(client, (awaited, result, job))
        self._threads.submit(self._run_next)
        return await awaited

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        waiting = self._waiting.pop()
        assert waiting is not None, "there is a turn for every job"
        awaited, result, job = waiting
        if awaited.cancelled() or not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(job())
        except Exception as error:  # noqa: BLE001 - raised where the client waits
            result.set_exception(error)


class Reading:
    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._small: FairPool[ReadBody] = FairPool(SMALL_THREADS, "tessera-reading")
        self._large: FairPool[ReadBody] = FairPool(LARGE_THREADS, "tessera-reading-large")

    async def read(self, read: Read, raw: bytes, client: str = "") -> ReadBody:
        pool = self._small if len(raw) <= SMALL_BYTES else self._large
        try:
            return await pool.run(client, partial(read, raw, self._card))
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None

    def close(self) -> None:
        self._small.close()
        self._large.close()
