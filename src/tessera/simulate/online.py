"""Server: requests that come over time, through one policy or several, on a virtual clock.

Devices, links and queues are those of the simulator's one loop; this module only says what each slot runs
next. A switch of policy drains nothing: a slot goes over between two decodes, or its requests take seats in
slots that do; state moves where the new lane wants it, and requests go on where they were. A lost device
takes down what runs on it: those requests wait again and start anew on lanes that avoid it. Deterministic by
seed.

Not handled: memory of rows at different lengths, and plans whose policies differ in batch.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count

import numpy as np

from tessera.ir import Decision
from tessera.simulate.machine import Machine, Work
from tessera.simulate.patience import Patience
from tessera.simulate.places import Places
from tessera.simulate.policy import Policy, Workshop
from tessera.simulate.repeats import Repeats
from tessera.simulate.seats import Demand, Ledger, Seats, Slot
from tessera.simulate.served import ServeConfig, Served
from tessera.simulate.turns import Turns
from tessera.simulate.watcher import Watcher

__all__ = ["ServeConfig", "Served", "Server"]


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
        self._patience, self._turns = Patience(), Turns()
        self._places = Places(is_shared=demand.rows > 1)
        self._names = count()
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
        return self._places.can_serve(self.policies[name])

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
        can_serve = self._places.can_serve(self.current)
        while can_serve and len(self._slots) < self.current.plan.slots and self._wants_slot():
            number = heapq.heappop(self._unused) if self._unused else next(self._names)
            self._slots[number] = self._places.open(self.current)
            self.seats.num_free += self.demand.rows
            self._go_on(number)

    def _wants_slot(self) -> bool:
        without = len(self.seats.waiting) - self._free_seats()
        if without <= 0:
            return False
        taking = [slot for slot in self._slots.values() if self._takes(slot)]
        seated = sum(len(slot.requests) for slot in taking)
        return self._patience.opens(self.current, len(taking), seated, without)

    def _takes(self, slot: Slot) -> bool:
        return slot.policy is self.current or slot.target >= 0

    def _free_seats(self, before: int | None = None) -> int:
        """Seats that waiting requests will find in open slots, or in those with smaller numbers."""
        if not self.current.has_body:
            return 0
        slots = [s for n, s in self._slots.items() if (before is None or n < before) and self._takes(s)]
        return sum(map(self.seats.free_in, slots))

    def _boundary(self, number: int) -> None:
        """A slot has finished a run."""
        slot = self._slots[number]
        was_decode = slot.is_decoding
        self.seats.finish_run(slot, self._machine.now_us)
        if was_decode and self._watcher is not None:
            self._watcher.on_run(self, slot)
        for other in (number, *self._turns.end(number)):
            self._go_on(other)
        self.open_slots()  # fewer are seated now, so those who wait may be enough

    def _go_on(self, number: int) -> None:
        """Begins what a slot runs next, or closes it."""
        slot = self._slots[number]
        if not slot.ahead:
            if self._is_left(slot) or not (slot.seats or slot.coming or self._renew(number, slot)):
                self._close(number)
                return
            if slot.target >= 0 or slot.coming:
                self._move(slot)
            if not slot.ahead and self.seats.waiting and self._takes(slot):
                self.seats.join(slot, self._free_seats(number))
        now_us = self._machine.now_us
        if slot.seats and not slot.ahead and self._turns.holds(number, slot, now_us):
            return  # until a head is done that has waited for long enough
        work = self.seats.next_work(slot)
        assert work is not None, "a slot without requests is closed"
        if not slot.is_decoding and self.demand.rows > 1:
            self._turns.begin(number, work, now_us)
        self._machine.start(number, work if not self._config.jitter else self._jittered(work))

    def _jittered(self, work: Work) -> Work:
        factor = float(np.exp(self._config.jitter * self._random.standard_normal()))
        return replace(work, number=-1, scale=work.scale * factor)

    def _renew(self, number: int, slot: Slot) -> bool:
        """An empty slot that was used takes the next lane, if somebody waits for whom there is no seat."""
        if not slot.is_used:
            return True
        has_guests = len(self.seats.waiting) > self._free_seats(number)
        is_one_too_many = len(self._slots) > self.current.plan.slots
        if not has_guests or is_one_too_many or not self._places.can_serve(self.current):
            self._places.give_back(slot, self.current)
            return False
        self._places.go_over(slot, self.current)
        slot.is_used = False
        return True

    def _is_left(self, slot: Slot) -> bool:
        """Has everybody gone from a slot of another policy to seats of the one in force?"""
        if self._takes(slot) or not (slot.seats and self._config.moves_state and slot.policy.has_body):
            return False
        homes = [other for other in self._slots.values() if self._takes(other)]
        if slot.coming or not self.seats.send(slot, homes):
            return False
        self._places.give_back(slot, self.current)
        return True

    def _move(self, slot: Slot) -> None:
        """To the policy in force, with those who come from elsewhere: state moves, nothing is drained."""
        moves = [(slot.lane, len(slot.seats))] if slot.target >= 0 else []
        if slot.target >= 0:
            self._places.go_over(slot, self.current)
        moves += [(group.lane, len(group.rows)) for group in self.seats.welcome(slot)]
        for old, num in moves if slot.policy.has_body else ():
            work = slot.policy.handover(old, slot.lane, num / self.demand.rows)
            if work is not None:
                slot.ahead.append(work)

    def _close(self, number: int) -> None:
        del self._slots[number]
        self.seats.num_free -= self.demand.rows
        heapq.heappush(self._unused, number)

    def _lose(self, device: str) -> None:
        """A device is gone: what needs it is dropped, and lanes that use it are closed."""
        free: list[int] = []
        for number, slot in list(self._slots.items()):
            if device in slot.lane.devices:
                self._machine.drop(number)
                free += self._turns.end(number)
                self.seats.leave(slot)
                del self._slots[number]
                heapq.heappush(self._unused, number)
        self._places.lost |= {device}
        self._places.forget()
        self._share_out(len(self._slots))
        for number in free:
            if number in self._slots:
                self._go_on(number)
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
        self._places.forget()
        self.current = self.policies[name]
        self.shop = self.current.shop
        self._share_out(len(self._slots))

    def switch(self, name: str) -> None:
        """Puts another policy in force; slots go over one by one, as many as the requests need."""
        self.current = self.policies[name]
        seated = sum(len(slot.requests) for slot in self._slots.values())
        self._share_out(-(-seated // self.demand.rows))

    def _share_out(self, num: int) -> None:
        slots = list(self._slots.values())
        self._places.share_out(self.current, slots, num if self._config.moves_state else 0)
