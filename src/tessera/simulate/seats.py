"""Seats: requests over time in the slots of a policy, with batching between decodes.

A slot has `rows` seats. Waiting requests are served in the order in which they came. Between two decodes of a
slot those that are done leave, and waiting ones take their seats, so joining costs no one else anything but
the joiners' own head. A slot is opened only when the seats of open slots do not suffice, and a slot takes
only those for whom slots with smaller numbers have no seat: so when the load falls, slots empty and close. A
slot that empties gives its lane back; the next one to open it takes the lane that the table says.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.ir import Arrivals, WorkUnit
from tessera.simulate.machine import Work
from tessera.simulate.policy import Lane, Policy


@dataclass(frozen=True)
class Demand:
    """Requests as the simulator needs them."""

    times_us: Sequence[float]
    # Tokens that each one gives, and decodes that it takes.
    tokens: Sequence[int]
    decodes: Sequence[int]
    # Of a whole head, what each one's prompt takes.
    shares: Sequence[float]
    rows: int
    # True if a head gives the first token.
    head_speaks: bool

    def __len__(self) -> int:
        return len(self.times_us)


def demand_of(unit: WorkUnit, arrivals: Arrivals, rows: int | None = None) -> Demand:
    """What arrivals ask of a work unit; `rows` requests share a slot, by default the captured batch."""
    steps = [graph.trace.step for graph in unit.graphs]
    is_decode = steps[-1].kind == "decode"
    head_speaks = is_decode and any(s.kind == "prefill" for s in steps[:-1])
    rows = rows or max(1, steps[-1].batch)
    num = len(arrivals.times_s)
    usual = unit.counts[-1] + head_speaks if is_decode else 1
    tokens = arrivals.outputs if arrivals.outputs and is_decode else (usual,) * num
    context = max((s.context for s in steps if s.kind == "prefill"), default=0)
    shares = (
        [prompt / (context * rows) for prompt in arrivals.prompts]
        if context and arrivals.prompts
        else [1.0 / rows] * num
    )
    decodes = [n - head_speaks for n in tokens] if is_decode else [0] * num
    return Demand([t * 1e6 for t in arrivals.times_s], tokens, decodes, shares, rows, head_speaks)


@dataclass(slots=True)
class Slot:
    """What one slot is doing."""

    policy: Policy
    lane: Lane
    # Index of the lane among those that the policy's table knows; -1: not from the table that holds now.
    taken: int
    # Where it goes at its next boundary, in the table of the policy in force; -1: nowhere.
    target: int = -1
    # (decode after which it leaves, request)
    seats: list[tuple[int, int]] = field(default_factory=list)
    # Decodes done.
    clock: int = 0
    # What it runs before the next decode, last first.
    ahead: list[Work] = field(default_factory=list)
    # Requests in the head that it runs; requests that have not given a token yet.
    joining: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    is_decoding: bool = False
    # Requests that take seats here at the next boundary, with the lane that their state is in.
    coming: list["Guests"] = field(default_factory=list)
    # True once somebody sat here under this lane.
    is_used: bool = False

    @property
    def requests(self) -> list[int]:
        """All that sit here, or will."""
        guests = [request for group in self.coming for _, request in group.rows]
        return [request for _, request in self.seats] + self.joining + guests


@dataclass(frozen=True, slots=True)
class Guests:
    """Requests on their way from one slot to another."""

    lane: Lane
    # (decodes to go, request)
    rows: tuple[tuple[int, int], ...]
    # Of these, the ones that have not given a token yet.
    silent: tuple[int, ...]


@dataclass
class Ledger:
    """What happened to each request; times in microseconds, negative: it did not."""

    first_us: list[float]
    done_us: list[float]
    num_restarted: int = 0
    num_refused: int = 0
    num_failed: int = 0
    max_waiting: int = 0

    @staticmethod
    def of(num: int) -> "Ledger":
        """With nothing in it."""
        return Ledger([-1.0] * num, [-1.0] * num)


class Seats:
    """Who sits where. Says which run a slot begins next; knows nothing of devices and clocks."""

    def __init__(self, demand: Demand, ledger: Ledger) -> None:
        self.demand, self.ledger = demand, ledger
        self.waiting: deque[int] = deque()
        self.num_free = 0  # seats of open slots

    def finish_run(self, slot: Slot, now_us: float) -> None:
        """Books what the run that just ended gave, and lets those who are done go."""
        if slot.ahead:
            return
        if slot.is_decoding:
            slot.clock += 1
            slot.is_decoding = False
            for request in slot.silent:
                self._speak(request, now_us)
            slot.silent.clear()
        elif slot.joining:
            self._seat(slot, now_us)
        while slot.seats and slot.seats[0][0] <= slot.clock:
            self.ledger.done_us[heapq.heappop(slot.seats)[1]] = now_us
            self.num_free += 1

    def _seat(self, slot: Slot, now_us: float) -> None:
        """The head is over: the joiners have their first token, or their only one."""
        demand = self.demand
        for request in slot.joining:
            if demand.head_speaks or not demand.decodes[request]:
                self._speak(request, now_us)
            else:
                slot.silent.append(request)
            heapq.heappush(slot.seats, (slot.clock + demand.decodes[request], request))
        slot.joining.clear()

    def _speak(self, request: int, now_us: float) -> None:
        if self.ledger.first_us[request] < 0.0:  # a request begun again has spoken before
            self.ledger.first_us[request] = now_us

    def join(self, slot: Slot, num_elsewhere: int) -> None:
        """Waiting requests take free seats, but for those that have one elsewhere.

        A slot without decodes takes them only when it is empty.
        """
        demand = self.demand
        num = min(demand.rows - len(slot.seats), len(self.waiting) - num_elsewhere)
        if num <= 0 or (slot.seats and not slot.policy.has_body):
            return
        joiners = [self.waiting.popleft() for _ in range(num)]
        self.num_free -= len(joiners)
        slot.joining, slot.is_used = joiners, True
        if slot.lane.head:
            share = sum(demand.shares[request] for request in joiners)
            slot.ahead += slot.policy.head(slot.lane, share)[::-1]
        else:
            slot.joining = []
            slot.silent += joiners
            for request in joiners:
                heapq.heappush(slot.seats, (slot.clock + demand.decodes[request], request))

    def free_in(self, slot: Slot) -> int:
        """Seats of a slot that nobody has."""
        coming = sum(len(group.rows) for group in slot.coming) if slot.coming else 0
        return self.demand.rows - len(slot.seats) - len(slot.joining) - coming

    def send(self, slot: Slot, homes: Sequence[Slot]) -> bool:
        """All requests of a slot find seats in others, or none does; True if they do."""
        if sum(map(self.free_in, homes)) < len(slot.seats):
            return False
        for home in homes:
            here, slot.seats = slot.seats[: self.free_in(home)], slot.seats[self.free_in(home) :]
            if here:
                rows = tuple((stop - slot.clock, request) for stop, request in here)
                silent = tuple(request for _, request in rows if request in slot.silent)
                home.coming.append(Guests(slot.lane, rows, silent))
        slot.silent.clear()
        return True

    def welcome(self, slot: Slot) -> list[Guests]:
        """Those who were on their way sit down; says who, since their state has to be moved."""
        groups, slot.coming = slot.coming, []
        for group in groups:
            slot.silent += group.silent
            slot.is_used = True
            for left, request in group.rows:
                heapq.heappush(slot.seats, (slot.clock + left, request))
        return groups

    def leave(self, slot: Slot) -> None:
        """A slot is lost under its requests: they wait again, before all others, and start anew."""
        requests = sorted(slot.requests)
        self.waiting.extendleft(reversed(requests))
        self.ledger.num_restarted += len(requests)
        self.num_free -= self.demand.rows - len(requests)

    def next_work(self, slot: Slot) -> Work | None:
        """What a slot runs next; None if nobody sits there."""
        if slot.ahead:
            return slot.ahead.pop()
        if not slot.seats:
            return None
        slot.is_decoding = True
        return slot.policy.body(slot.lane)
