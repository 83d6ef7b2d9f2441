"""A toy model behind the stepper's protocol, and readers of answers.

The toy's state of a row is the tokens it has read; its logits follow from all of them, so a token in the
wrong row, at the wrong place or from another request changes everything behind it. It checks what it is
handed, ends steps of different slots in any order, and loses devices when it is told to.
"""

import asyncio
import random
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch

from tessera.errors import WorkerError
from tessera.execute.serving import Shape, SlotsLost, StepDone, StepKind, Tensors, Use
from tessera.serve.records import Ask, Event, Finish, Piece, Sampling, Token
from tessera.serve.rows import Request
from tessera.serve.sampling import choose
from tessera.serve.service import Service
from tessera.serve.text import END, ByteText

VOCAB = 258
SHAPE = Shape(slots=2, rows=3, capacity=48, chunk=4, vocab_size=VOCAB)
GREEDY = Sampling(temperature=0.0)
T = TypeVar("T")


def toy_logits(read: Sequence[int]) -> torch.Tensor:
    """What the toy says after some tokens."""
    return _toy_logits(tuple(read))


@lru_cache(100_000)
def _toy_logits(read: tuple[int, ...]) -> torch.Tensor:
    seed = zlib.crc32(bytes(str(read), "ascii"))
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[END] += 1.0  # an end within some tens of tokens
    return logits


@dataclass
class Space:
    """The state of one slot."""

    policy: int
    rows: list[list[int]]
    spare: list[int] = field(default_factory=list)
    step: tuple[StepKind, Tensors, tuple[str, ...]] | None = None


class ToyStepper:
    """Steps of the toy; `events` holds losses by the number of the step at whose end they happen."""

    def __init__(
        self,
        shape: Shape = SHAPE,
        policies: tuple[str, ...] = ("quick", "wide"),
        seed: int = 0,
        losses: Mapping[int, bool] | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.shape, self.policies = shape, policies
        self._random = random.Random(seed)
        # Number of a step -> whether all is over then.
        self._losses = dict(losses or {})
        self._step_s = step_s
        self._spaces: dict[int, Space] = {}
        self._is_awake = threading.Event()
        self.log: list[tuple[int, StepKind]] = []
        self.opened: list[tuple[int, int]] = []
        self._is_over = False

    def open(self, slot: int, policy: int) -> int:
        """A slot is opened once, and with empty state."""
        if self._is_over:
            raise WorkerError("nothing can be opened")
        assert slot not in self._spaces
        assert 0 <= slot < self.shape.slots
        self._spaces[slot] = Space(policy, [[] for _ in range(self.shape.rows)])
        self.opened.append((slot, policy))
        return policy

    def close(self, slot: int) -> None:
        """Only a slot that runs nothing is closed."""
        assert self._spaces.pop(slot).step is None

    def run(self, slot: int, kind: StepKind, inputs: Tensors, skips: tuple[str, ...] = ()) -> None:
        """One step a slot at a time."""
        space = self._spaces[slot]
        assert space.step is None
        space.step = (kind, inputs, skips)

    def take(self, timeout_s: float | None) -> StepDone | SlotsLost | None:
        """Any of the steps that run."""
        running = [number for number, space in self._spaces.items() if space.step is not None]
        if not running:
            self._is_awake.wait(timeout_s)
            self._is_awake.clear()
            return None
        if self._step_s:
            time.sleep(self._step_s)
        slot = self._random.choice(running)
        step = self._spaces[slot].step
        assert step is not None
        kind, inputs, skips = step
        self.log.append((slot, kind))
        if len(self.log) in self._losses:
            return self._lose(slot, self._losses[len(self.log)])
        self._spaces[slot].step = None
        outputs = {"chunk": self._chunk, "insert": self._insert, "decode": self._decode}[kind](slot, inputs)
        return StepDone(slot, kind, {k: v for k, v in outputs.items() if k not in skips}, 1e-3)

    def _lose(self, slot: int, is_over: bool) -> SlotsLost:
        lost = tuple(self._spaces) if is_over else (slot,)
        self._is_over = is_over
        for number in lost:
            del self._spaces[number]
        return SlotsLost(lost, "toy:1", "it was told to", is_over)

    def _chunk(self, slot: int, inputs: Tensors) -> dict[str, torch.Tensor]:
        space, last = self._spaces[slot], int(inputs["last"])
        assert inputs["tokens"].shape == inputs["positions"].shape == (1, self.shape.chunk)
        tokens, positions = (inputs[name][0, : last + 1].tolist() for name in ("tokens", "positions"))
        if positions[0] == 0:
            space.spare = []
        assert list(range(len(space.spare), len(space.spare) + len(positions))) == positions
        space.spare = space.spare + tokens
        logits = toy_logits(space.spare)[None]
        return {"logits": logits, "next_tokens": logits.argmax(-1)}

    def _insert(self, slot: int, inputs: Tensors) -> dict[str, torch.Tensor]:
        space = self._spaces[slot]
        space.rows[int(inputs["row"])] = list(space.spare)
        return {}

    def _decode(self, slot: int, inputs: Tensors) -> dict[str, torch.Tensor]:
        rows = self._spaces[slot].rows
        for row, token, at in zip(rows, inputs["tokens"].tolist(), inputs["positions"].tolist(), strict=True):
            assert 0 <= at[0] < self.shape.capacity
            del row[at[0] :]
            row.append(token[0])
        logits = torch.stack([toy_logits(row) for row in rows])
        return {"logits": logits, "next_tokens": logits.argmax(-1)}

    def wake(self) -> None:
        """From any thread."""
        self._is_awake.set()

    def use(self) -> Use:
        """A busy toy."""
        return Use({"toy:0": 1e-3 * len(self.log)}, {("toy:0", "toy:1"): 8 * len(self.log)})


def expected(ask: Ask) -> tuple[list[int], str, str]:
    """The tokens, the text and the reason of the toy's answer, found without engine, rows or chunks."""
    text = ByteText()
    request = Request(ask, text.reader(), text.end)
    said = ""
    while True:
        logits = toy_logits(request.sequence)[None]
        (token,) = choose(logits, logits.argmax(-1).tolist(), [0], [request.pick])
        assert token is not None
        request.add(token.number)
        said += request.text_of(token.number)
        if request.watch.is_stopped or (token.number == END and not ask.ignores_end):
            reason = "stop"
        elif request.num_out == ask.max_tokens:
            reason = "length"
        else:
            continue
        return request.sequence[len(ask.prompt) :], said + request.rest_of_text(), reason


@dataclass
class Told:
    """All that a reader got."""

    pieces: list[Piece]
    finish: Finish

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[Token]:
        """Those of all pieces."""
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def numbers(self) -> list[int]:
        """Of the tokens."""
        return [token.number for token in self.tokens]

    @property
    def what(self) -> tuple[list[int], str, str]:
        """As `expected` has it."""
        return self.numbers, self.text, self.finish.reason


async def read(service: Service, ask: Ask) -> Told:
    """One answer, read to its end."""
    events: list[Event] = [event async for event in service.answer(ask)]
    finish = events.pop()
    assert isinstance(finish, Finish)
    pieces = [event for event in events if isinstance(event, Piece)]
    assert len(pieces) == len(events), "one finish, at the end"
    return Told(pieces, finish)


async def read_some(service: Service, ask: Ask, num_pieces: int) -> int:
    """Reads some pieces, then closes the answer; how many came."""
    answer = service.answer(ask)
    came = 0
    async for event in answer:
        if isinstance(event, Finish):
            return came
        came += 1
        if came >= num_pieces:
            break
    await answer.aclose()
    return came


async def read_all(service: Service, asks: Sequence[Ask]) -> list[Told]:
    """Answers to all, asked at once."""
    return list(await asyncio.gather(*(read(service, ask) for ask in asks)))


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Waits for something that another thread does."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def random_ask(rng: random.Random, capacity: int, **changes: Any) -> Ask:
    """Any length that fits, greedy or drawn."""
    length = rng.randrange(1, capacity // 2)
    drawn = Sampling(
        rng.choice((0.5, 1.0, 1.5)), rng.choice((0.5, 1.0)), rng.choice((0, 5)), rng.randrange(99)
    )
    known: dict[str, Any] = {
        "prompt": tuple(rng.randrange(256) for _ in range(length)),
        "max_tokens": rng.randrange(1, capacity - length + 1),
        "sampling": rng.choice((GREEDY, drawn)),
        "stop": rng.choice(((), (), ("e", "\ufffd\ufffd"))),
        "client": rng.choice("abc"),
    }
    return Ask(**{**known, **changes})


def wait_for(work: Coroutine[Any, Any, T], limit_s: float = 60.0) -> T:
    """Runs something on an event loop of its own."""
    return asyncio.run(asyncio.wait_for(work, limit_s))
