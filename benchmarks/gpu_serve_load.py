"""A closed load on a service in this process, and what came of it; used by gpu_serve.py.

Every client asks, reads its answer to the end and asks again, so that the service is always full. Rates are
counted between two moments at both of which it was full: no first prompts and no last answers.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera.execute.cuda.stepper import CudaStepper
from tessera.execute.serving import StepDone
from tessera.serve.records import Ask, Finish, Piece, Sampling
from tessera.serve.service import Service

GREEDY = Sampling(temperature=0.0)
# A load that is not steady by then is counted all the same; the result says so.
WARM_S = 20.0


@dataclass
class Tally:
    """Moments at which tokens came."""

    # (moment, tokens) of every piece.
    came: list[tuple[float, int]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    finished: int = 0

    def per_s(self, start: float, stop: float) -> float:
        """Tokens a second between two moments."""
        return sum(n for at, n in self.came if start <= at < stop) / (stop - start)


def run_load(service: Service, clients: int, prompt: int, output: int, seconds: float) -> dict[str, Any]:
    """Clients that ask again and again: the rate of so many seconds, counted from when the load is steady.

    It is when so many requests have ended as there are clients. A client's first answer has any length up to
    the average, so that rows end one after another from the start, as they do later on.
    """
    tally, begun, shape = Tally(), time.monotonic(), service.shape
    steady: list[float] = []

    def until() -> float:
        if not steady and tally.finished >= clients:
            steady.append(time.monotonic())
        return (steady[0] if steady else begun + WARM_S) + seconds

    async def one(number: int) -> None:
        rng = random.Random(number)
        length = rng.randint(1, output)
        while time.monotonic() < until() and not tally.errors:
            size = rng.randint(prompt - shape.chunk + 1, prompt)
            tokens = tuple(rng.randrange(shape.vocab_size) for _ in range(size))
            await _read(service, Ask(tokens, length, GREEDY, ignores_end=True), tally, until)
            length = rng.randint(output * 3 // 4, output * 5 // 4)

    async def everybody() -> None:
        await asyncio.gather(*(one(number) for number in range(clients)))

    asyncio.run(everybody())
    start, firsts = until() - seconds, sorted(tally.first_s)
    return {
        "tokens per s": round(tally.per_s(start, start + seconds), 1),
        "by thirds": [
            round(tally.per_s(start + k * seconds / 3, start + (k + 1) * seconds / 3), 1) for k in range(3)
        ],
        "steady after s": round(start - begun, 1),
        "requests finished": tally.finished,
        "time to first token, median s": round(firsts[len(firsts) // 2], 3) if firsts else None,
        "errors": tally.errors[:3],
    }


def run_full(service: Service, clients: int, prompt: int, output: int, vocab: int) -> dict[str, Any]:
    """All clients at once, each one answer; the rate while all rows decode: after the last first token."""
    tally, starts, stops = Tally(), list[float](), list[float]()

    async def one(number: int) -> None:
        rng = random.Random(number)
        ask = Ask(tuple(rng.randrange(vocab) for _ in range(prompt)), output, GREEDY, ignores_end=True)
        before = len(tally.came)
        await _read(service, ask, tally, lambda: float("inf"), starts.append)
        stops.append(time.monotonic())
        assert len(tally.came) > before

    async def everybody() -> None:
        await asyncio.gather(*(one(number) for number in range(clients)))

    begun = time.monotonic()
    asyncio.run(everybody())
    start, stop = max(starts), min(stops)
    return {
        "decoding, tokens per s": round(tally.per_s(start, stop), 1),
        "decoding s": round(stop - start, 3),
        "with prompts, tokens per s": round(sum(n for _, n in tally.came) / (max(stops) - begun), 1),
        "prompts s": round(start - begun, 2),
        "errors": tally.errors[:3],
    }


def stepper_per_s(stepper: CudaStepper, steps: int) -> dict[str, float]:
    """Tokens a second of decodes one after the other in one slot, tokens passing through the host."""
    rows = stepper.shape.rows
    stepper.open(0, 0)
    tokens = torch.zeros(rows, 1, dtype=torch.int64)
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        for number in range(steps):
            positions = torch.full((rows, 1), stepper.shape.capacity - steps + number)
            stepper.run(0, "decode", {"tokens": tokens, "positions": positions}, ("logits",))
            done = stepper.take(60.0)
            assert isinstance(done, StepDone), done
            tokens = done.outputs["next_tokens"][:, None]
        times.append(time.perf_counter() - began)
    stepper.close(0)
    return {
        "tokens per s": round(rows * steps / min(times), 1),
        "us a step": round(min(times) / steps * 1e6, 1),
    }


async def _read(
    service: Service,
    ask: Ask,
    tally: Tally,
    until: Callable[[], float],
    on_first: Callable[[float], Any] = lambda moment: None,
) -> None:
    """Reads one answer, or as much of it as comes before the end."""
    asked, is_first = time.monotonic(), True
    answer = service.answer(ask)
    async for event in answer:
        now = time.monotonic()
        if isinstance(event, Piece):
            tally.came.append((now, len(event.tokens)))
            if is_first:
                tally.first_s.append(now - asked)
                on_first(now)
            is_first = False
        elif isinstance(event, Finish):
            tally.finished += event.reason == "length"
            if event.reason == "error":
                tally.errors.append(event.message)
        if now > until():
            await answer.aclose()
            return
