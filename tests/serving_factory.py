"""A toy model behind the stepper's protocol, and readers of answers.

The toy's pages hold the tokens that it has read; its logits follow from all that a sequence's pages hold, so
a token in the wrong page, at the wrong place or from another request changes everything behind it. It checks
what it is handed, ends steps of different microbatches in any order, and loses devices when it is told to.
"""

import asyncio
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from types import TracebackType
from typing import Any, TypeVar

import pytest
import torch

from factories import make_plan, make_trace
from tessera.execute.lanes import Lanes
from tessera.execute.stepper import (
    DeviceBack,
    DeviceLost,
    DeviceStatus,
    DeviceUse,
    Moved,
    PageMove,
    StepCall,
    StepDone,
    Stepper,
    Tensors,
)
from tessera.execute.stepper import Event as StepperEvent
from tessera.ir import Cluster, Device, DeviceKind, Group, Link, Load, Plan, Role, ServicePlan, Trace
from tessera.kernels import PAGE, of_group
from tessera.kernels.choice import INPUTS
from tessera.kernels.choose import choose
from tessera.serve import grammar, sequences
from tessera.serve.answer import ActiveRequest
from tessera.serve.grammar import prepare_masks
from tessera.serve.groups import plans_of
from tessera.serve.records import AnswerPiece, Ask, Event, Finish, Sampling, Shape, Token
from tessera.serve.rehearse import rated
from tessera.serve.sampling import Choice, ChoiceInputs, Pick, read_tokens
from tessera.serve.service import Service
from tessera.serve.text import END, ByteText

VOCAB = 258
SHAPE = Shape(microbatches=2, rows=3, capacity=48, sizes=(3, 8), pool_tokens=16 * 11, vocab_size=VOCAB)
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


TOYS = ("toy:0", "toy:1")


def toy_plan(
    policy: str, placement: Sequence[int], shape: Shape = SHAPE, kind: DeviceKind = DeviceKind.EMU
) -> Plan:
    """One lane: a device for each step. Pages on one device are those of all plans there."""
    gpu = "" if kind is DeviceKind.CPU else "a100"
    links = tuple(Link(a, b, "wire", 1.0, 1.0) for a, b in (TOYS, TOYS[::-1]))
    cluster = Cluster(tuple(Device(name, kind, gpu, 1 << 30) for name in TOYS), links)
    traces = [toy_trace(size, shape) for size in shape.sizes]
    placed = [[(device,) for device in placement]]
    plan = make_plan(traces, placed, (4,) * len(traces), cluster, microbatches=shape.microbatches)
    home = ",".join(sorted({TOYS[device] for device in placement}))
    return replace(plan, policy=policy, home=home)


def toy_group(
    policy: str,
    device: int,
    role: Role = Role.MIXED,
    shape: Shape = SHAPE,
    kind: DeviceKind = DeviceKind.EMU,
    microbatches: int | None = None,
) -> Group:
    """All on one device, with half of the microbatches."""
    microbatches = microbatches or max(1, shape.microbatches // 2)
    plan = toy_plan(policy, [device] * len(shape.sizes), shape, kind)
    return Group(role, replace(plan, microbatches=microbatches), shape.rows, microbatches)


def toy_policy(name: str, *groups: Group) -> ServicePlan:
    return ServicePlan("toy", name, Load(8, 16), groups)


def toy_policies(
    names: Sequence[str], shape: Shape = SHAPE, kind: DeviceKind = DeviceKind.EMU
) -> tuple[ServicePlan, ...]:
    """A mixed group on each of two devices, or one group of one microbatch."""
    devices = (0, 1) if shape.microbatches > 1 else (0,)
    return tuple(
        toy_policy(name, *(toy_group(name, device, Role.MIXED, shape, kind) for device in devices))
        for name in names
    )


def split_policy(name: str, role: Role, shape: Shape = SHAPE, reader: int = 0) -> ServicePlan:
    """One device reads prompts; groups of this role are on the other."""
    prompts = toy_group(name, reader, Role.PROMPTS, shape, microbatches=2)
    return toy_policy(name, prompts, toy_group(name, 1 - reader, role, shape))


def policies_of(stepper: Stepper, shape: Shape) -> tuple[ServicePlan, ...]:
    """A policy per plan: all microbatches in one group."""
    return tuple(
        ServicePlan("", plan.policy, Load(8, 16), (Group(Role.MIXED, plan, shape.rows, shape.microbatches),))
        for plan in stepper.plans
    )


def toy_trace(size: int, shape: Shape = SHAPE) -> Trace:
    """A step of so many tokens, of which nothing is known."""
    made = make_trace([[(0, 0, 64, "w")]], kind="tokens")
    return replace(made, step=replace(made.step, context=size, reserve=shape.pool_tokens, rows=shape.rows))


@dataclass(frozen=True)
class Loss:
    """What happens at the end of a step, in its place: the device of its lane is lost, or these are."""

    devices: tuple[str, ...] = ()
    # Seconds until a device is back; None: it never is.
    retry_s: float | None = 0.0
    failures: int = 1
    is_certain: bool = True


@dataclass
class Space:
    """The state of one microbatch."""

    lane: int
    # Token by place, shared with all of its home; by row where state is kept so.
    pages: dict[int, int] = field(default_factory=dict)
    rows: dict[int, list[int]] = field(default_factory=dict)
    # What runs, and what is queued behind it.
    steps: deque[StepCall] = field(default_factory=deque)
    # What the last step chose, by the row of its outputs.
    newest: list[int] = field(default_factory=list)


class ToyStepper:
    """Steps of the toy; `losses` by the number of the step at whose end they happen."""

    def __init__(
        self,
        shape: Shape = SHAPE,
        policies: tuple[str, ...] = ("quick", "wide"),
        seed: int = 0,
        losses: Mapping[int, Loss] | None = None,
        step_s: float = 0.0,
        plans: Sequence[ServicePlan] = (),
        busy_s: Mapping[str, float] | None = None,
        queues: bool = True,
    ) -> None:
        self.shape, self._queues = shape, queues
        self.policies = tuple(plans) or toy_policies(policies, shape)
        self.plans = plans_of(self.policies)
        self.lanes = Lanes(self.plans)
        self._random = random.Random(seed)
        self._losses = dict(losses or {})
        self._step_s = step_s
        # What steps take each device, as they say.
        self.busy_s = dict(busy_s or {})
        self._spaces: dict[int, Space] = {}
        # Home -> token by place.
        self._homes: dict[str, dict[int, int]] = {}
        self._moves: list[PageMove] = []
        # Numbers of moves that fail; and all moves.
        self.failing: set[int] = set()
        self.moves: list[PageMove] = []
        self._events: deque[StepperEvent] = deque()
        # (when, device)
        self._backs: list[tuple[float, str]] = []
        self._is_awake = threading.Event()
        # (microbatch, tokens of its step)
        self.log: list[tuple[int, int]] = []
        # (microbatch, policy)
        self.opened: list[tuple[int, int]] = []
        self.restarts = dict.fromkeys(TOYS, 0)
        # Tokens read, of all steps; and steps that were started behind another.
        self.num_tokens = self.num_queued = 0
        # Steps that were started without their masks.
        self.num_open = 0

    def __enter__(self) -> "ToyStepper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def load(self, plans: Sequence[Plan]) -> None:
        """What is open goes on along its lane."""
        self.lanes.load(plans, self._spaces)
        self.plans = tuple(plans)

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        """A microbatch is opened once, and with empty state, on a lane that can be followed."""
        assert microbatch not in self._spaces
        assert not self.lanes.all[lane].devices & self.lanes.lost
        home = self.lanes.all[lane].plan.home
        pages = self._homes.setdefault(home, {}) if home else {}
        self._spaces[microbatch] = Space(lane, pages)
        self.opened.append((microbatch, self.lanes.all[lane].policy))

    def bring_back(self, device: str) -> None:
        """A device that is lost is back now; from any thread."""
        self._backs.append((time.monotonic(), device))
        self.wake()

    def close(self, microbatch: int) -> None:
        """Only one that runs and moves nothing is closed."""
        assert not any(microbatch in (move.source, move.destination) for move in self._moves)
        assert not self._spaces.pop(microbatch).steps

    def can_queue(self, microbatch: int) -> bool:
        """Its lanes have one device each."""
        return self._queues

    def start(self, call: StepCall) -> None:
        """One step a microbatch runs, and one at most waits behind it; none while its rows move."""
        rows = [move for move in self._moves if move.rows is not None and not self.shape.is_flat]
        assert not any(call.microbatch in (move.source, move.destination) for move in rows)
        space = self._spaces[call.microbatch]
        assert len(space.steps) <= self._queues
        inputs = {name: tensor.clone() for name, tensor in call.inputs.items()}
        space.steps.append(replace(call, inputs=inputs))
        self.num_queued += len(space.steps) > 1
        self.num_open += call.is_open

    def give(self, microbatch: int, inputs: Tensors) -> None:
        """Only to a step that is open, and alone."""
        space = self._spaces[microbatch]
        (call,) = space.steps
        assert call.is_open
        late = {name: tensor.clone() for name, tensor in inputs.items()}
        space.steps[0] = replace(call, inputs={**call.inputs, **late}, is_open=False)

    def move(self, move: PageMove) -> None:
        """Copies when it ends; pages are read as they are then."""
        assert len(move.from_pages) == len(move.to_pages)
        assert 0 not in (*move.from_pages, *move.to_pages)
        ends = (self._spaces[move.source], self._spaces[move.destination])
        assert ends[0].pages is not ends[1].pages or not move.from_pages
        is_beside = move.rows is None or self.shape.is_flat
        assert is_beside or not any(space.steps for space in ends), "steps write all rows"
        self._moves.append(move)
        self.moves.append(move)

    def _end_move(self, move: PageMove) -> Moved:
        self._moves.remove(move)
        source, destination = self._spaces.get(move.source), self._spaces.get(move.destination)
        if source is None or destination is None or move.number in self.failing:
            return Moved(move.number, "it was told to fail")
        for one, other in zip(move.from_pages, move.to_pages, strict=True):
            for at in range(PAGE):
                if one * PAGE + at in source.pages:
                    destination.pages[other * PAGE + at] = source.pages[one * PAGE + at]
        if move.rows is not None:
            destination.rows[move.rows[1]] = source.rows.get(move.rows[0], [])
        return Moved(move.number, "", 1e-3, len(move.from_pages))

    def take(self, timeout_s: float | None) -> StepperEvent | None:
        """Any of the steps that run, or of the moves."""
        for back in [back for back in self._backs if back[0] <= time.monotonic()]:
            self._backs.remove(back)
            self.lanes.lost.discard(back[1])
            self.restarts[back[1]] += 1
            self._events.append(DeviceBack(back[1]))
        if self._events:
            return self._events.popleft()
        running = [number for number, space in self._spaces.items() if space.steps]
        if self._moves and self._random.random() < 0.5:
            return self._end_move(self._random.choice(self._moves))
        if not running and self._moves:
            return self._end_move(self._moves[0])
        if not running:
            waits = [max(0.0, at - time.monotonic()) for at, _ in self._backs]
            self._is_awake.wait(min([*waits, *([] if timeout_s is None else [timeout_s])], default=None))
            self._is_awake.clear()
            return None
        if self._step_s:
            time.sleep(self._step_s)
        return self._end(self._random.choice(running))

    def _end(self, microbatch: int) -> StepperEvent:
        space = self._spaces[microbatch]
        call = space.steps[0]
        assert not call.is_open, "a step ends when it has all inputs"
        self.log.append((microbatch, int((call.inputs["lengths"] > 0).sum())))
        loss = self._losses.get(len(self.log))
        if loss is not None:
            for device in loss.devices or tuple(self.lanes.all[space.lane].devices):
                self.lose(device, loss)
            return self._events.popleft()
        space.steps.popleft()
        read = self._flat if self.shape.is_flat else self._by_row
        tables = {name: call.inputs[name] for name in INPUTS}
        inputs = {n: t.tolist() for n, t in call.inputs.items() if n not in INPUTS}
        inputs["tokens"] = [x if x >= 0 else space.newest[-1 - x] for x in inputs["tokens"]]
        logits = read(space, self.shape.sizes[call.step], inputs)
        last = inputs["tokens"]
        if self.shape.is_flat:
            last = [last[max(0, end - 1)] for end in inputs["query_starts"][1:]]
        tokens, logprobs, top = choose(logits, torch.tensor(last), tables)
        space.newest = tokens.clamp_min(0).tolist()
        outputs = {"logits": logits, "next_tokens": tokens, "logprobs": logprobs, "top_tokens": top}
        kept = {name: tensor for name, tensor in outputs.items() if name not in call.skips}
        here = {name: self.busy_s.get(name, 1e-3) for name in self.lanes.all[space.lane].devices}
        return StepDone(microbatch, call.step, kept, 1e-3, busy_s=here)

    def lose(self, device: str, loss: Loss) -> None:
        """Takes a device out, with what is open on it."""
        self.lanes.lost.add(device)
        gone = tuple(n for n, space in self._spaces.items() if device in self.lanes.all[space.lane].devices)
        for number in gone:
            del self._spaces[number]
        self.failing |= {move.number for move in self._moves if {move.source, move.destination} & {*gone}}
        for home in [home for home in self._homes if device in home.split(",")]:
            del self._homes[home]
        if loss.retry_s is not None:
            self._backs.append((time.monotonic() + loss.retry_s, device))
        self._events.append(
            DeviceLost(device, gone, "it was told to", loss.failures, loss.retry_s, loss.is_certain)
        )

    def _flat(self, space: Space, size: int, inputs: dict[str, list[int]]) -> torch.Tensor:
        rows, starts = min(size, self.shape.rows), inputs["query_starts"]
        assert [size, size, rows] == [len(inputs[name]) for name in ("tokens", "positions", "lengths")]
        assert self.shape.num_page_entries >= len(inputs["pages"])
        assert rows + 1 == len(starts)
        assert sorted(starts) == starts
        for group in range(len(self.shape.windows)):
            slots = inputs[of_group("slots", group)]
            assert (size, rows) == (len(slots), len(inputs[of_group("page_starts", group)]))
            assert not any(slots[starts[-1] :]), "padding writes into page 0"
            for at in range(starts[-1]):
                assert slots[at] >= PAGE, "page 0 is nobody's"
                space.pages[slots[at]] = inputs["tokens"][at]
        self.num_tokens += starts[-1]
        logits = torch.zeros(rows, VOCAB)
        for row, length in enumerate(inputs["lengths"]):
            count = starts[row + 1] - starts[row]
            assert (count > 0) == (length > 0)
            assert count <= 1 or size > rows, "a small step has one token of each"
            if not length:
                continue
            positions = inputs["positions"][starts[row] : starts[row + 1]]
            assert list(range(length - count, length)) == positions
            held: list[int] = []
            for group, window in enumerate(self.shape.windows):
                first, slots = inputs[of_group("page_starts", group)][row], inputs[of_group("slots", group)]
                seen = range(max(0, length - count - window + 1) if window else 0, length)
                places = [inputs["pages"][first + at // PAGE] * PAGE + at % PAGE for at in seen]
                assert places[-count:] == slots[starts[row] : starts[row + 1]]
                # Behind the window it reads what another group holds.
                last = [space.pages[place] for place in places]
                held = last if len(held) <= len(last) else held
                assert last == held[len(held) - len(last) :], "all groups hold the same tokens"
            if self.shape.has_rows:
                held = self._recurrent(space, inputs["rows"][row], held[length - count :])
                assert len(held) == length
            logits[row] = toy_logits(held)
        return logits

    def _recurrent(self, space: Space, row: int, new: list[int]) -> list[int]:
        """What a sequence has read, by its row; a negative row begins."""
        number = -1 - row if row < 0 else row
        space.rows[number] = [*([] if row < 0 else space.rows[number]), *new]
        return space.rows[number]

    def _by_row(self, space: Space, size: int, inputs: dict[str, list[int]]) -> torch.Tensor:
        logits = torch.zeros(size, VOCAB)
        for row in range(size):
            assert inputs["query_starts"][row] == row
            if inputs["fresh"][row]:
                space.rows[row] = []
            if inputs["lengths"][row]:
                read = space.rows[row]
                assert inputs["positions"][row] == len(read) == inputs["lengths"][row] - 1
                read.append(inputs["tokens"][row])
                logits[row] = toy_logits(read)
        return logits

    def wake(self) -> None:
        """From any thread."""
        self._is_awake.set()

    def use(self) -> DeviceUse:
        """A busy toy."""
        status = {
            name: DeviceStatus("lost" if name in self.lanes.lost else "ready", 7, self.restarts[name])
            for name in TOYS
        }
        return DeviceUse({"toy:0": 1e-3 * len(self.log)}, {("toy:0", "toy:1"): 8 * len(self.log)}, status)

    def now_s(self) -> float:
        """This machine's clock."""
        return time.monotonic()


# Services of the same policies are many, and each would rehearse them anew.
_rated = cache(rated)


def service_of(stepper: ToyStepper, **changes: Any) -> Service:
    """A service of the toy, that says nothing."""
    known: dict[str, Any] = {"model": "toy", "log": lambda line: None}
    if len(stepper.policies) > 1 and "policy" not in changes:
        known["capabilities"] = _rated(tuple(stepper.policies), stepper.shape)
    return Service(stepper, stepper.policies, stepper.shape, ByteText(), **{**known, **changes})


def generated(reference: Any, ask: Ask) -> list[int]:
    """What Hugging Face generates."""
    prompt = torch.tensor([ask.prompt])
    out = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=ask.max_tokens,
        do_sample=False,
        eos_token_id=None if ask.ignores_end else END,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(ask.prompt) :]]


def wait_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is late, however busy the machine is."""
    monkeypatch.setattr(sequences, "PATIENCE_S", 20.0)
    monkeypatch.setattr(grammar, "SLOW_S", 20.0)


def choose_rows(
    logits: torch.Tensor,
    picks: Sequence[Pick],
    positions: Sequence[int] = (),
    num_due: int = 0,
    last: int = 0,
) -> list[Token | None]:
    """One token per row; `num_due` and `last`: a token that is read and not counted yet."""
    at = positions or [0] * len(picks)
    choices = [Choice(row, pick, at[row], num_due) for row, pick in enumerate(picks) if not pick.is_plain]
    inputs, guides = ChoiceInputs(len(picks), logits.shape[1]), [pick.guide for pick in picks if pick.guide]
    prepare_masks(guides, patience_s=None)
    tables = inputs.fill(len(picks), choices) | inputs.masks(guides)
    tokens, logprobs, top = choose(logits, torch.full((len(picks),), last), tables)
    outputs = {"next_tokens": tokens}
    if any(pick.sampling.logprobs is not None for pick in picks):
        outputs |= {"logprobs": logprobs, "top_tokens": top}
    return read_tokens(outputs, range(len(picks)), picks)


@lru_cache(10_000)
def expected(ask: Ask) -> tuple[list[int], str, str]:
    """The tokens, the text and the reason of the toy's answer, found without engine, pages or parts."""
    text = ByteText()
    request = ActiveRequest(ask, text.reader(), text.end)
    said = ""
    while True:
        (token,) = choose_rows(toy_logits(request.sequence)[None], [request.pick], [len(request.sequence)])
        assert token is not None
        number = token.number
        request.add(number)
        is_end = number == END and not ask.ignores_end
        if not is_end:
            made = request.text_of(number)
            said += request.reader.feed((number,)) if made is None else made
        is_stopped = request.watch is not None and request.watch.is_stopped
        if is_end or is_stopped or request.pick.is_over:
            reason = "stop"
        elif request.num_out == ask.max_tokens:
            reason = "length"
        else:
            continue
        rest = request.rest_of_text() if request.watch is not None else request.reader.flush()
        return request.sequence[len(ask.prompt) :], said + rest, reason


@dataclass
class Told:
    """All that a reader got."""

    pieces: list[AnswerPiece]
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
        """Numbers of the tokens."""
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
    pieces = [event for event in events if isinstance(event, AnswerPiece)]
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
