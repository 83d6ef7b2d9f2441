"""Server: requests that come over time, through one policy or several, on a virtual clock.

Devices, links and queues are those of the simulator's one loop; this module only says what each slot runs
next. A switch of policy drains nothing: a slot goes over between two decodes, its state moves where
the new lane wants it, and its requests go on where they were. A lost device takes down what runs on it:
those requests wait again and start anew on lanes that avoid it. Deterministic by seed.

Not handled: memory of rows at different lengths, and plans whose policies differ in batch.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from tessera.execute.schedule import LaneTable
from tessera.ir import Decision
from tessera.simulate.machine import Machine, Work
from tessera.simulate.patience import Patience
from tessera.simulate.policy import Lane, Policy, Workshop
from tessera.simulate.repeats import Repeats
from tessera.simulate.seats import Demand, Ledger, Seats, Slot
from tessera.simulate.watcher import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What happens beside the arrivals."""

    seed: int = 0
    # Each run takes exp(jitter * normal) times as long.
    jitter: float = 0.0
    # Requests that come while so many wait are turned away; None: none are.
    max_waiting: int | None = None
    # True: a slot goes over to another policy between two decodes, and its state moves. False: requests keep
    # the lane they were admitted to, as `execute.Engine` does, and a slot of the old policy takes no more.
    moves_state: bool = True
    # (device, second)
    losses: tuple[tuple[str, float], ...] = ()
    # (device, second, factor)
    slowdowns: tuple[tuple[str, float, float], ...] = ()


@dataclass
class Served:
    """The raw result of a simulation."""

    demand: Demand
    ledger: Ledger
    policy: str
    duration_us: float
    # Devices, then buses.
    busy_us: list[float]
    decisions: list[Decision] = field(default_factory=list)


class Server:
    """One simulation."""

    def __init__(
        self, policies: Iterable[Policy], demand: Demand, config: ServeConfig, watcher: Watcher | None = None
    ) -> None:
        self.policies = {policy.name: policy for policy in policies}
        first = next(iter(self.policies.values()))
        self.shop, self.current = first.shop, first
        self._config, self._watcher = config, watcher
        self.demand, self.ledger = demand, Ledger.of(len(demand))
        self.seats = Seats(demand, self.ledger)
        self._machine = Repeats(Machine(first.shop.truth.plan, first.shop.scripts.wires.num_buses))
        self._slots: dict[int, Slot] = {}
        self._unused: list[int] = []  # numbers of closed slots, smallest first
        self._patience = Patience()
        self._names = count()
        self._tables: dict[str, tuple[LaneTable, tuple[Lane, ...]] | None] = {}
        self._lost: frozenset[str] = frozenset()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._next = 0  # the next arrival
        self._random = np.random.default_rng([config.seed, 7])
        self.decisions: list[Decision] = []

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return self._machine.now_us * 1e-6

    @property
    def is_serving(self) -> bool:
        """True while requests are there or to come."""
        return self._next < len(self.demand) or bool(self._slots)

    @property
    def num_requests(self) -> int:
        """Waiting or being served."""
        seats = self.demand.rows * len(self._slots)
        return len(self.seats.waiting) + seats - self.seats.num_free

    def can_serve(self, name: str) -> bool:
        """True if some lane of a policy avoids all lost devices."""
        return self._table(self.policies[name]) is not None

    def at(self, second: float, action: Callable[[], None]) -> None:
        """Does something at a time to come."""
        heapq.heappush(self._agenda, (second * 1e6, next(self._order), action))

    def run(self) -> Served:
        """Until the last request has left."""
        for device, second in self._config.losses:
            self.at(second, lambda device=device: self._lose(device))  # type: ignore[misc]
        for device, second, factor in self._config.slowdowns:
            self.at(second, lambda d=device, f=factor: self.slow_down(d, f))  # type: ignore[misc]
        if self._watcher is not None:
            self._watcher.on_start(self)
        while self._is_alive():
            limit = self._limit_us()
            number = self._machine.run_until(limit)
            if number is not None:
                self._boundary(number)
            else:
                assert limit is not None, "something runs as long as requests are there"
                self._happen(limit)
        name = self.current.name if self._watcher is None else "adaptive"
        busy_us, now_us = self._machine.busy_us, self._machine.now_us
        return Served(self.demand, self.ledger, name, now_us, busy_us, self.decisions)

    def _is_alive(self) -> bool:
        if self.is_serving or (self.seats.waiting and self._agenda):  # what waits may yet find a lane
            return True
        self.ledger.num_failed += len(self.seats.waiting)
        return False

    def _limit_us(self) -> float | None:
        """When something happens from outside."""
        times = [self._agenda[0][0]] if self._agenda else []
        times += self.demand.times_us[self._next : self._next + 1]
        return min(times, default=None)

    def _happen(self, now_us: float) -> None:
        while self._agenda and self._agenda[0][0] <= now_us:
            heapq.heappop(self._agenda)[2]()
        while self._next < len(self.demand) and self.demand.times_us[self._next] <= now_us:
            self._arrive(self._next)
            self._next += 1
        self.open_slots()

    def _arrive(self, request: int) -> None:
        waiting, limit = self.seats.waiting, self._config.max_waiting
        if limit is not None and len(waiting) >= limit:
            self.ledger.num_refused += 1
            return
        waiting.append(request)
        self.ledger.max_waiting = max(self.ledger.max_waiting, len(waiting))
        if self._watcher is not None:
            self._watcher.on_arrival(self)

    def open_slots(self) -> None:
        """Opens slots for waiting requests that have no seat in an open one, where that pays."""
        usable = self._table(self.current)
        while usable and len(self._slots) < self.current.plan.slots and self._wants_slot():
            number = heapq.heappop(self._unused) if self._unused else next(self._names)
            self._slots[number] = self._occupy(*usable)
            self._go_on(number)

    def _wants_slot(self) -> bool:
        without = len(self.seats.waiting) - self._free_seats()
        if without <= 0:
            return False
        taking = [slot for slot in self._slots.values() if self._takes(slot)]
        seated = sum(len(slot.requests) for slot in taking)
        return self._patience.opens(self.current, len(taking), seated, without)

    def _takes(self, slot: Slot) -> bool:
        return slot.policy is self.current or self._config.moves_state

    def _free_seats(self, before: int | None = None) -> int:
        """Seats that waiting requests will find in open slots, or in those with smaller numbers."""
        if not self.current.has_body:
            return 0
        slots = [s for n, s in self._slots.items() if (before is None or n < before) and self._takes(s)]
        return sum(self.demand.rows - len(s.seats) - len(s.joining) for s in slots)

    def _occupy(self, table: LaneTable, lanes: tuple[Lane, ...]) -> Slot:
        self.seats.num_free += self.demand.rows
        taken = table.take()
        return Slot(self.current, lanes[taken], taken)

    def _table(self, policy: Policy) -> tuple[LaneTable, tuple[Lane, ...]] | None:
        if policy.name not in self._tables:
            self._tables[policy.name] = policy.table(self._lost)
        return self._tables[policy.name]

    def _boundary(self, number: int) -> None:
        """A slot has finished a run."""
        slot = self._slots[number]
        was_decode = slot.is_decoding
        self.seats.finish_run(slot, self._machine.now_us)
        if was_decode and self._watcher is not None:
            self._watcher.on_run(self, slot)
        self._go_on(number)
        self.open_slots()  # fewer are seated now, so those who wait may be enough

    def _go_on(self, number: int) -> None:
        """Begins what a slot runs next, or closes it."""
        slot = self._slots[number]
        if not slot.ahead:
            if not slot.seats and not self._renew(number, slot):
                self._close(number)
                return
            if slot.policy is not self.current and self._config.moves_state:
                self._go_over(slot)
            if not slot.ahead and self.seats.waiting and self._takes(slot):
                self.seats.join(slot, self._free_seats(number))
        work = self.seats.next_work(slot)
        assert work is not None, "a slot without requests is closed"
        self._machine.start(number, work if not self._config.jitter else self._jittered(work))

    def _jittered(self, work: Work) -> Work:
        factor = float(np.exp(self._config.jitter * self._random.standard_normal()))
        return replace(work, number=-1, scale=work.scale * factor)

    def _renew(self, number: int, slot: Slot) -> bool:
        """An empty slot that was used takes the next lane, if somebody waits for whom there is no seat."""
        if not slot.is_used:
            return True
        self._give_back(slot)
        slot.taken = -1
        usable = self._table(self.current)
        has_guests = len(self.seats.waiting) > self._free_seats(number)
        if not has_guests or usable is None or len(self._slots) > self.current.plan.slots:
            return False
        slot.policy, slot.taken, slot.is_used = self.current, usable[0].take(), False
        slot.lane = usable[1][slot.taken]
        return True

    def _give_back(self, slot: Slot) -> None:
        usable = self._tables.get(slot.policy.name)
        if usable is not None and slot.taken >= 0 and usable[1][slot.taken] is slot.lane:
            usable[0].give_back(slot.taken)

    def _go_over(self, slot: Slot) -> None:
        """To the policy in force: state moves, nothing is drained."""
        usable = self._table(self.current)
        if usable is None:
            return
        self._give_back(slot)
        taken = usable[0].take()
        lane = usable[1][taken]
        share = len(slot.seats) / self.demand.rows
        work = self.current.handover(slot.lane, lane, share) if self.current.has_body else None
        slot.policy, slot.lane, slot.taken = self.current, lane, taken
        if work is not None:
            slot.ahead.append(work)

    def _close(self, number: int) -> None:
        del self._slots[number]
        self.seats.num_free -= self.demand.rows
        heapq.heappush(self._unused, number)

    def _lose(self, device: str) -> None:
        """A device is gone: what needs it is dropped, and lanes that use it are closed."""
        self._lost |= {device}
        for number, slot in list(self._slots.items()):
            if device in slot.lane.devices:
                self._machine.drop(number)
                self.seats.leave(slot)
                del self._slots[number]
                heapq.heappush(self._unused, number)
        self._tables.clear()
        for slot in self._slots.values():
            slot.taken = -1  # of a table that is no more
        if self._watcher is not None:
            self._watcher.on_lost(self, device)

    def slow_down(self, device: str, factor: float) -> None:
        """Every launch takes longer there, from each slot's next run on."""
        truth = replace(self.shop.truth, slow=(*self.shop.truth.slow, (device, factor)))
        shop = Workshop(truth, self.shop.next_number)
        self.adopt([Policy(p.name, p.plan, shop) for p in self.policies.values()], self.current.name)

    def adopt(self, policies: Iterable[Policy], name: str) -> None:
        """Replaces policies by name, and puts one in force; slots go over one by one."""
        self.policies |= {policy.name: policy for policy in policies}
        self._tables.clear()
        for slot in self._slots.values():
            slot.taken = -1
        self.current = self.policies[name]
        self.shop = self.current.shop

    def switch(self, name: str) -> None:
        """Puts another policy in force; slots go over one by one, and its lanes are shared out anew."""
        self.current = self.policies[name]
        self._tables.pop(name, None)
        for slot in self._slots.values():
            if slot.policy is self.current:
                slot.taken = -1  # of a table that is no more
