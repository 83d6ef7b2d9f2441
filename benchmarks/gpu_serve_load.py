"""Loads on a service in this process, and what came of them; used by gpu_serve.py and gpu_services.py.

Closed: every client asks, reads its answer to the end and asks again, so that the service is always full.
Rates are counted between two moments at both of which it was full: no first prompts and no last answers.

Open: requests arrive at given moments, however many are under way.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from tessera.execute.stepper import StepCall, StepDone
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Arrivals, Load
from tessera.serve.records import AnswerPiece, Ask, Finish, Sampling
from tessera.serve.service import Service
from tessera.serve.steps import ServedModel
from tessera.simulate.arrivals import lengths_of

GREEDY = Sampling(temperature=0.0)
# A load that is not steady by then is counted all the same; the result says so.
WARM_S = 20.0
# Requests of one client whose lengths are drawn; then they repeat.
MAX_EACH = 1000


@dataclass
class Tally:
    """Moments at which tokens came."""

    # (moment, tokens) of every piece.
    came: list[tuple[float, int]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    # Seconds per token after the first, of whole answers.
    each_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    finished: int = 0

    def per_s(self, start: float, stop: float) -> float:
        """Tokens a second between two moments."""
        return sum(n for at, n in self.came if start <= at < stop) / (stop - start)


def run_load(service: Service, clients: int, load: Load, seconds: float) -> dict[str, Any]:
    """Clients that ask again and again: the rate of so many seconds, counted from when the load is steady.

    It is steady when as many requests have ended as there are clients. Lengths are those of a rehearsal; a
    client's first answer is cut at random, so that rows end one after another from the start.
    """
    tally, begun, shape = Tally(), time.monotonic(), service.shape
    steady: list[float] = []
    # First tokens and answers before it is steady: of prompts that all began at once.
    early = [0, 0]

    def until() -> float:
        if not steady and tally.finished >= clients:
            steady.append(time.monotonic())
            early[:] = len(tally.first_s), len(tally.each_s)
        return (steady[0] if steady else begun + WARM_S) + seconds

    async def one(number: int) -> None:
        rng, is_first = random.Random(number), True
        lengths = cycle(lengths_of(load, MAX_EACH, number))
        while time.monotonic() < until() and not tally.errors:
            size, length = next(lengths)
            length = min(rng.randint(1, length) if is_first else length, shape.max_tokens - 1)
            size = min(size, shape.max_tokens - length)
            tokens = tuple(rng.randrange(shape.vocab_size) for _ in range(size))
            await _read(service, Ask(tokens, length, GREEDY, ignores_end=True), tally, until)
            is_first = False

    async def everybody() -> None:
        await asyncio.gather(*(one(number) for number in range(clients)))

    asyncio.run(everybody())
    start = until() - seconds
    return {
        "tpot ms": quantiles_ms(tally.each_s[early[1] :]),
        "ttft ms": quantiles_ms(tally.first_s[early[0] :]),
        "tokens per s": round(tally.per_s(start, start + seconds), 1),
        "by thirds": [
            round(tally.per_s(start + k * seconds / 3, start + (k + 1) * seconds / 3), 1) for k in range(3)
        ],
        "steady after s": round(start - begun, 1),
        "requests finished": tally.finished,
        "errors": tally.errors[:3],
    }


def quantiles_ms(times_s: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    later = sorted(times_s) or [0.0]
    return 1e3 * later[len(later) // 2], 1e3 * later[min(len(later) - 1, len(later) * 99 // 100)]


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


def stepper_per_s(stepper: WorkerStepper, model: ServedModel, steps: int) -> dict[str, float]:
    """Answers alone, one step after the other in one microbatch, tokens passing through the host."""
    rows, lane = model.shape.rows, stepper.lanes.take(0)
    assert lane is not None, "nothing is lost"
    number = model.shape.sizes.index(rows)
    given = {name: tensor.cpu() for name, tensor in model.workloads[number].make_inputs(0).items()}
    stepper.open(0, lane.number)
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(steps):
            stepper.start(StepCall(0, number, given, ("logits",)))
            done = stepper.take(60.0)
            assert isinstance(done, StepDone), done
            given["tokens"] = done.outputs["next_tokens"]
        times.append(time.perf_counter() - began)
    stepper.close(0)
    stepper.lanes.give_back(lane.number)
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
    asked, first = time.monotonic(), 0.0
    answer = service.answer(ask)
    async for event in answer:
        now = time.monotonic()
        if isinstance(event, AnswerPiece):
            tally.came.append((now, len(event.tokens)))
            if not first:
                first = now
                tally.first_s.append(now - asked)
                on_first(now)
        elif isinstance(event, Finish):
            tally.finished += event.reason == "length"
            if event.output_tokens > 1:
                tally.each_s.append((now - first) / (event.output_tokens - 1))
            if event.reason == "error":
                tally.errors.append(event.message)
        if now > until():
            await answer.aclose()
            return


# Arrivals ---------------------------------------------------------------------------------------------------


def arrive(service: Service, arrivals: Arrivals, scale: float) -> tuple[Tally, float]:
    """Requests that come in real time, `scale` times as far apart; what came, and the seconds it took."""
    tally, rng, shape = Tally(), random.Random(0), service.shape

    async def one(begun: float, at: float, prompt: int, output: int) -> None:
        length = min(output, shape.max_tokens - 1)
        tokens = tuple(rng.randrange(shape.vocab_size) for _ in range(min(prompt, shape.max_tokens - length)))
        await asyncio.sleep(max(0.0, begun + at * scale - time.monotonic()))
        await _read(service, Ask(tokens, length, GREEDY, ignores_end=True), tally, lambda: float("inf"))

    async def everybody() -> None:
        begun = time.monotonic()
        rows = zip(arrivals.times_s, arrivals.prompts, arrivals.outputs, strict=True)
        await asyncio.gather(*(one(begun, *row) for row in rows))

    began = time.monotonic()
    asyncio.run(everybody())
    return tally, time.monotonic() - began
