"""Pace: which launches and sends of one device keep modelled time, and for how long.

A dilated device (`cuda:N/as=GPU`) ends each launch when it would have ended on another GPU, one at a time, in
the order of `execute.schedule`; a throttled link serves first come, first served. Links of a
group share a bus only among one device's sends.

Where the card is too slow, the time scale slows the whole run: the least factor at which launches of 99 % of
the modelled time are met while every device of the card is busy. Modelled rate = measured rate x scale.

`PaceKernel` (`pace.ptx`) is a one-thread kernel before and after every launch. A record is four words: start,
due time, real end (nanoseconds of %globaltimer), spare. A call does two optional things:

    leave   waits until the previous record's due time (plus `extra`), and writes the real end;
    enter   takes a place in a queue: start = max(now - slack, when it is free), end = start + hold.

A queue is a word that says until when it is taken and, for a device, one word per microbatch: the key of the
launch that waits, or zero. The least key goes first: the segment that ends soonest, then the first to come.
The arrival time in the key, in units of 1,024 ns, wraps every 17 s; then a launch may overtake its equal
once. A launch that directly follows another sets its key before that one ends.

A kernel waits only for the clock and for running kernels with smaller keys, so every wait ends. The analyzer
proves that it touches only its records and queue.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch

from tessera.execute.messages import Setup
from tessera.execute.schedule import until_wait
from tessera.ir import Cluster, Kernel, Link, Origin, Program, Run
from tessera.kernels.launch import PtxKernel

COVERED = 0.99
# Cost of the two pace kernels around a launch.
TURN_US = 3.0
# Delay of a pace kernel, subtracted from every wait.
SLACK_NS = 1000
RECORD_WORDS = 4
STARTED, DUE, ENDED = 0, 1, 2
ENTRY = "tessera_pace"
PTX = files("tessera.execute.cuda").joinpath("pace.ptx").read_text(encoding="ascii")
SIGNATURE = (
    ("previous", "*u64"), ("extra_ns", "u64"), ("queue", "*u64"), ("next", "*u64"), ("hold_ns", "u64"),
    ("slack_ns", "u64"), ("places", "u64"), ("place", "u64"), ("key", "u64"), ("lead_ns", "u64"),
)  # fmt: skip
# A turn is taken this long before the device is free: the start-up of a launch.
LEAD_NS = 2000
# Bits of a key: arrival below the time left; the last bit is always set.
_CAME_BITS = 24
_MAX_LEFT_NS = 1 << 38
# (microbatches that may wait, this microbatch, key); none: first come, first served.
Turn = tuple[int, int, int]
NO_TURN = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class TimeScale:
    factor: float
    covered: float


@dataclass(frozen=True, slots=True)
class Hold:
    hold_ns: int
    extra_ns: int = 0
    # Time until the device must wait for a transfer or the step ends there.
    left_ns: int = 0


def choose_scale(
    targets_us: Sequence[Sequence[float]], own_us: Sequence[float], num_sharing: int
) -> TimeScale:
    """`targets_us[launch][device]`; `own_us[launch]`: the card's own time."""
    factors = []
    for row, launch_us in zip(targets_us, own_us, strict=True):
        for target in row:
            if target > 0.0:
                factors.append(((launch_us * num_sharing + TURN_US) / target, target))
    total = sum(target for _, target in factors)
    factor, met = 1.0, 0.0
    for needed, target in sorted(factors):
        if met >= COVERED * total:
            break
        factor = max(factor, needed)
        met += target
    missed = sum(target for needed, target in factors if needed > factor)
    return TimeScale(factor, 1.0 - missed / total if total else 1.0)


def link_hold(link: Link, num_bytes: int, scale: float) -> Hold:
    """A message occupies its wire while its bytes pass, and arrives a latency later."""
    return Hold(round(link.wire_us(num_bytes) * scale * 1e3), round(link.latency_us * scale * 1e3))


def throttled_links(cluster: Cluster) -> Mapping[tuple[int, int], Link]:
    """Links that touch a dilated device."""
    links = {}
    for a, src in enumerate(cluster.devices):
        for b, dst in enumerate(cluster.devices):
            link = cluster.link(a, b) if a != b else None
            if link is not None and (src.is_dilated or dst.is_dilated):
                links[a, b] = link
    return links


STAMP = Hold(0)


@dataclass(frozen=True)
class Pace:
    """Without a hold there is no pace kernel. A hold without a queue only stamps."""

    launches: Mapping[int, Hold] = field(default_factory=dict)
    # Includes arriving ones, for their latency.
    transfers: Mapping[int, Hold] = field(default_factory=dict)


class Clockwork:
    def __init__(
        self, setup: Setup, us: Sequence[Sequence[float]], card: torch.device, keeps_links: bool = True
    ) -> None:
        """`us[step][launch]`: modelled time here; empty: real time."""
        device, cluster = setup.device, setup.cluster
        self._device, self._us, self._scale, self._is_profiled = device, us, setup.scale, setup.is_profiled
        self._is_dilated = cluster.devices[device].is_dilated
        self._links: Mapping[tuple[int, int], Link] = throttled_links(cluster) if keeps_links else {}
        self.queue = _words(1 + setup.microbatches, card) if self._is_dilated else None
        self.wires: dict[int, torch.Tensor] = {}
        groups: dict[str, torch.Tensor] = {}
        for (src, dst), link in self._links.items():
            if src == device:
                word = groups.get(link.group) if link.group else None
                self.wires[dst] = groups[link.group] = _words(1, card) if word is None else word

    def pace(self, program: Program) -> Pace:
        return Pace(self._launches(program), self._transfers(program))

    def _launches(self, program: Program) -> dict[int, Hold]:
        column = program.instructions[self._device]
        runs = [(at, x.launch) for at, x in enumerate(column) if isinstance(x, Run)]
        if not self._is_dilated:
            return {launch: STAMP for _, launch in runs} if self._is_profiled else {}
        us, ns = self._us[program.step], self._scale * 1e3
        left = until_wait(column, lambda x: us[x.launch] if isinstance(x, Run) else 0.0)
        holds = {n: Hold(round(us[n] * ns), left_ns=round(left[at] * ns)) for at, n in runs}
        return {n: hold for n, hold in holds.items() if hold.hold_ns or self._is_profiled}

    def _transfers(self, program: Program) -> dict[int, Hold]:
        holds: dict[int, Hold] = {}
        for number, transfer in enumerate(program.transfers):
            if self._device not in (transfer.src, transfer.dst):
                continue
            link = self._links.get((transfer.src, transfer.dst))
            if link is not None:
                holds[number] = link_hold(link, transfer.num_bytes, self._scale)
            elif self._is_profiled:
                holds[number] = STAMP
        return holds


def _words(num: int, card: torch.device) -> torch.Tensor:
    return torch.zeros(num, dtype=torch.int64, device=card)


def kernel() -> Kernel:
    return Kernel(ENTRY, Origin.PTX, ptx=PTX, signature=SIGNATURE)


class PaceKernel:
    def __init__(self) -> None:
        self._kernel = PtxKernel(kernel(), (1,))

    def __call__(
        self,
        leave: torch.Tensor | None,
        extra_ns: int,
        queue: torch.Tensor | None,
        enter: torch.Tensor | None,
        hold_ns: int,
        turn: Turn = NO_TURN,
    ) -> None:
        slack = SLACK_NS if queue is not None else 0
        self._kernel(
            (1, 1, 1), [leave, extra_ns, queue, enter, hold_ns, slack, *turn, LEAD_NS if turn[0] else 0]
        )


class Chain:
    """Records of one stream of one graph, in launch order.

    One kernel leaves a record and enters the next. `settle`, or waiting for `open` on another stream, waits
    for the end before that.
    """

    def __init__(self, pace_kernel: Any, queue: torch.Tensor | None, place: int = 0) -> None:
        """`place`: the microbatch."""
        self._pace_kernel, self._queue, self._place = pace_kernel, queue, place
        # A queue of one word has no waiting places.
        self._places = queue.numel() - 1 if queue is not None else 0
        # The record not left yet.
        self.open: torch.Tensor | None = None
        self._extra_ns = 0

    @property
    def keeps_time(self) -> bool:
        """False if records are stamps, left at once."""
        return self._queue is not None

    def enter(self, record: torch.Tensor, hold: Hold) -> None:
        turn = (self._places, self._place, key_of(hold)) if self._places else NO_TURN
        self._pace_kernel(self.open, self._extra_ns, self._queue, record, hold.hold_ns, turn)
        self.open, self._extra_ns = record, 0

    def arrive(self, record: torch.Tensor, extra_ns: int) -> None:
        """The next launch starts `extra_ns` after the end of a copy's record, or later."""
        self.settle()
        self.open, self._extra_ns = record, extra_ns

    def settle(self) -> None:
        """Later work on the stream starts when the last launch is due."""
        if self.open is not None:
            self._pace_kernel(self.open, self._extra_ns, None, None, 0, NO_TURN)
            self.open = None


def key_of(hold: Hold) -> int:
    """Never zero; the kernel adds the arrival time."""
    return (min(hold.left_ns, _MAX_LEFT_NS) << (_CAME_BITS + 1)) + 1
