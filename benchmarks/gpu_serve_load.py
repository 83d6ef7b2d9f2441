"""Loads on a service in this process, and what came of them; used by gpu_serve.py.

Closed: every client asks, reads its answer to the end and asks again, so that the service is always full.
Rates are counted between two moments at both of which it was full: no first prompts and no last answers.

Open: requests arrive when they do, and how long they take is looked at; once for real, and once by the same
engine in virtual time, over the same plans.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

from tessera.execute.stepper import Event, StepCall, StepDone, Tensors
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Arrivals, Load, ServicePlan
from tessera.serve.answer import ActiveRequest
from tessera.serve.engine import Engine
from tessera.serve.records import AnswerPiece, Ask, Finish, Sampling, Shape
from tessera.serve.router import plans_of
from tessera.serve.service import Service
from tessera.serve.steps import ServedModel
from tessera.serve.text import ByteText
from tessera.simulate.arrivals import lengths_of
from tessera.simulate.stepper import VirtualStepper

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

    def until() -> float:
        if not steady and tally.finished >= clients:
            steady.append(time.monotonic())
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
        "tpot ms": quantiles_ms(tally.each_s),
        "ttft ms": quantiles_ms(tally.first_s),
        "tokens per s": round(tally.per_s(start, start + seconds), 1),
        "by thirds": [
            round(tally.per_s(start + k * seconds / 3, start + (k + 1) * seconds / 3), 1) for k in range(3)
        ],
        "steady after s": round(start - begun, 1),
        "requests finished": tally.finished,
        "errors": tally.errors[:3],
    }


def quantiles_ms(times_s: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; the first round of requests, which all begin at once, is not counted."""
    later = sorted(times_s[len(times_s) // 3 :]) or [0.0]
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


@dataclass
class Waited:
    """What one request waited, in modelled seconds: for its first token, and for each one after that."""

    first_s: float
    # None: its answer has one token.
    each_s: float | None


def asks_of(arrivals: Arrivals, shape: Shape) -> list[tuple[float, Ask]]:
    """(second, ask) of every request; those that are too long are cut to what fits."""
    rng, found = random.Random(0), []
    for at, prompt, output in zip(arrivals.times_s, arrivals.prompts, arrivals.outputs, strict=True):
        size = min(prompt, shape.capacity // 2)
        tokens = tuple(rng.randrange(shape.vocab_size) for _ in range(size))
        length = min(output, shape.capacity - size)
        found.append((at, Ask(tokens, length, GREEDY, ignores_end=True)))
    return found


def arrive(service: Service, asks: Sequence[tuple[float, Ask]], scale: float) -> list[Waited]:
    """Asks come in real time, `scale` times as long apart as they are; what is waited is divided by it."""

    async def one(begun: float, at: float, ask: Ask) -> Waited:
        await asyncio.sleep(max(0.0, begun + at * scale - time.monotonic()))
        asked, came = time.monotonic(), list[float]()
        async for event in service.answer(ask):
            if isinstance(event, AnswerPiece):
                came += [time.monotonic()] * len(event.tokens)
            elif event.reason != "length":
                raise RuntimeError(f"a request ended by {event.reason}: {event.message}")
        return _waited(asked, came, scale)

    async def everybody() -> list[Waited]:
        begun = time.monotonic()
        return list(await asyncio.gather(*(one(begun, at, ask) for at, ask in asks)))

    return asyncio.run(everybody())


class _Arriving(VirtualStepper):
    """Virtual time stops where the next request arrives."""

    next_s = float("inf")

    def take(self, timeout_s: float | None) -> Event | None:
        """None when it does."""
        left_s = max(0.0, self.next_s - self.now_s())
        return super().take(left_s if timeout_s is None else min(timeout_s, left_s))


def arrive_virtually(plan: ServicePlan, shape: Shape, asks: Sequence[tuple[float, Ask]]) -> list[Waited]:
    """The same asks through the service's engine, over the simulator's stepper."""
    rows = max(group.sequences for group in plan.groups)

    def outputs(call: StepCall) -> Tensors:
        return {"next_tokens": torch.zeros(rows, dtype=torch.int64)}

    stepper, text = _Arriving(plans_of([plan]), outputs=outputs), ByteText()
    engine = Engine(stepper, [plan], shape, (), len(asks) + 1, is_filled=False)
    due = sorted(asks, key=lambda pair: pair[0])[::-1]
    open_: dict[ActiveRequest, tuple[float, list[float]]] = {}
    found: list[Waited] = []
    while due or open_:
        while due and due[-1][0] <= stepper.now_s() + 1e-9:
            at, ask = due.pop()
            request = ActiveRequest(ask, text.reader(), ())
            open_[request] = (at, [])
            engine.submit(request)
        stepper.next_s = due[-1][0] if due else float("inf")
        engine.step()
        for request, (at, came) in list(open_.items()):
            came.extend([stepper.now_s()] * (request.num_out - len(came)))
            if len(came) == request.ask.max_tokens:
                found.append(_waited(at, came, 1.0))
                del open_[request]
    return found


def _waited(asked: float, came: Sequence[float], scale: float) -> Waited:
    each = (came[-1] - came[0]) / (len(came) - 1) / scale if len(came) > 1 else None
    return Waited((came[0] - asked) / scale, each)


def compared_waits(real: Sequence[Waited], virtual: Sequence[Waited]) -> dict[str, Any]:
    """Medians of both in milliseconds, and real / virtual."""
    found: dict[str, Any] = {"requests": len(real)}
    for name, of in (
        ("time to first token", lambda w: w.first_s),
        ("time per output token", lambda w: w.each_s),
    ):
        a, b = (statistics.median(x for x in map(of, w) if x is not None) * 1e3 for w in (real, virtual))
        found[name] = {"real ms": round(a, 3), "virtual ms": round(b, 3), "ratio": round(a / b, 4)}
    return found
