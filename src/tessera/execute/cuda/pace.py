"""pace: which launches and sends of one device keep time, and how long each takes.

On a dilated device every launch that costs time holds the device for its modelled time, and every send on a
link that touches such a device holds the link. In a profiled graph everything else is stamped: a hold of
nothing, in no queue. Who goes first on a device is decided as in `execute.schedule`; a link serves who comes
first. Each sender keeps its own links' time: links of a group that several devices send on share a bus only
as far as one device's sends go.

A dilated device (`cuda:N/as=GPU`) runs each launch for real and lets it end when it would have ended on
another GPU. It serves launches one at a time, in the order in which they become ready, whatever request they
belong to; so does a throttled link. A launch that is due to end before the card itself is done cannot be
kept to its time. Then the whole run is slowed down by one factor: the time scale. It is the least factor at
which launches that make up 99 % of the modelled time can be met while every device of the card is busy, that
is, with the card's own time multiplied by the number of devices on it. Rates of such a run are divided out
again: modelled rate = measured rate x scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tessera.execute.schedule import until_wait
from tessera.ir import Cluster, Link, Program, Run

# Share of the modelled time whose launches must be met.
COVERED = 0.99
# What the two pace kernels around a launch cost by themselves, in microseconds.
TURN_US = 3.0
# A pace kernel is this late by itself; taken off every wait.
SLACK_NS = 1000


@dataclass(frozen=True, slots=True)
class TimeScale:
    """The common time scale of a run, and what it cannot keep."""

    factor: float
    # Share of the modelled time whose launches are met at this factor.
    covered: float
    # Launches times devices that are not.
    num_missed: int
    num_launches: int


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a launch or copy occupies what it runs on, and how much later it is done."""

    hold_ns: int
    extra_ns: int = 0
    # Of a launch: how long its device is at work until it must wait for a transfer, or the step ends there.
    left_ns: int = 0


def choose_scale(
    targets_us: Sequence[Sequence[float]], own_us: Sequence[float], num_sharing: int
) -> TimeScale:
    """The least factor for targets_us[launch][device] of launches that take own_us[launch] on the card."""
    wanted = []
    for row, own in zip(targets_us, own_us, strict=True):
        for target in row:
            if target > 0.0:
                wanted.append(((own * num_sharing + TURN_US) / target, target))
    total = sum(target for _, target in wanted)
    factor, met = 1.0, 0.0
    for needed, target in sorted(wanted):
        if met >= COVERED * total:
            break
        factor = max(factor, needed)
        met += target
    missed = [(needed, target) for needed, target in wanted if needed > factor]
    covered = 1.0 - sum(target for _, target in missed) / total if total else 1.0
    return TimeScale(factor, covered, len(missed), len(wanted))


def launch_hold(us: float, scale: float, left_us: float = 0.0) -> Hold:
    return Hold(round(us * scale * 1e3), left_ns=round(left_us * scale * 1e3))


def link_hold(link: Link, num_bytes: int, scale: float) -> Hold:
    """A message holds its wire while its bytes pass, and arrives a latency later."""
    return Hold(round(link.wire_us(num_bytes) * scale * 1e3), round(link.latency_us * scale * 1e3))


def throttled_links(cluster: Cluster) -> Mapping[tuple[int, int], Link]:
    """Links that must be slowed down: those that touch a dilated device. Others are what they are."""
    found = {}
    for a, src in enumerate(cluster.devices):
        for b, dst in enumerate(cluster.devices):
            link = cluster.link(a, b) if a != b else None
            if link is not None and (src.is_dilated or dst.is_dilated):
                found[a, b] = link
    return found


STAMP = Hold(0)


@dataclass(frozen=True)
class Pace:
    """How long things take in one program where that is not left to the card. Missing: no pace kernel.

    A hold without a queue stamps: nothing waits for anything but its own end.
    """

    # launch -> hold
    launches: Mapping[int, Hold] = field(default_factory=dict)
    # transfer -> hold of its link; also of those that arrive here, for their latency
    transfers: Mapping[int, Hold] = field(default_factory=dict)


class Clockwork:
    """The times of one device: its queue, those of the links it sends on, and the pace of its programs."""

    def __init__(
        self,
        cluster: Cluster,
        device: int,
        us: Sequence[Sequence[float]],
        num_microbatches: int,
        scale: float,
        is_profiled: bool,
        card: torch.device,
        keeps_links: bool = True,
    ) -> None:
        """`us[step][launch]`: modelled time on this device; empty where it keeps its own.

        `keeps_links`: links take their modelled time; else what their transport takes.
        """
        self._device, self._us, self._scale, self._is_profiled = device, us, scale, is_profiled
        self._is_dilated = cluster.devices[device].is_dilated
        self._links: Mapping[tuple[int, int], Link] = throttled_links(cluster) if keeps_links else {}
        # Until when the device is taken, and a place for each microbatch that waits for it.
        self.queue = _words(1 + num_microbatches, card) if self._is_dilated else None
        # Destination -> until when the link there is taken.
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
        us = self._us[program.step]
        left = until_wait(column, lambda x: us[x.launch] if isinstance(x, Run) else 0.0)
        holds = {launch: launch_hold(us[launch], self._scale, left[at]) for at, launch in runs}
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
