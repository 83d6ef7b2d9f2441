"""MemoMachine: the simulator's machine with memoised transitions, for hundreds of thousands of requests.

What happens until the next end of a run depends only on the state of devices and links and the runs begun, so
transitions are kept: a busy server repeats itself. Times between ends are rounded, so that equal states
compare equal.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tessera.execute.schedule import Job
from tessera.simulate.core import END, SAME_END_US, Flight, SimulatedDevice, VirtualMachine, Work

DECIMALS = 6
MAX_PLACES = 5000


class State(NamedTuple):
    """Between runs; times are relative, flights numbered by age."""

    # (unfinished devices, runs last first)
    flights: tuple[tuple[int, tuple[Work, ...]], ...]
    bus_free: tuple[float, ...]
    # (flight or -1, start, stop, since)
    devices: tuple[tuple[int, int, int, float], ...]
    # jobs[device]: (flight, position, arrived, spent)
    jobs: tuple[tuple[tuple[int, int, tuple[int, ...], float], ...], ...]
    # (time, device, flight, transfer or END)
    events: tuple[tuple[float, int, int, int], ...]


@dataclass(slots=True, eq=False)
class _Place:
    state: State
    edges: dict[tuple[tuple[Work, ...], ...], "_Edge"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Edge:
    """Flights are numbered as in the state, then those begun."""

    us: float
    ended: tuple[int, ...]
    # In the order of the next state.
    staying: tuple[int, ...]
    busy_us: tuple[float, ...]
    place: _Place


class _Loop(VirtualMachine):
    @property
    def ended(self) -> list[int]:
        return list(self._ended)

    @property
    def flying(self) -> tuple[int, ...]:
        return tuple([flight.number for flight in self._running.values()])

    def run(self, us: float) -> None:
        self.now_us += us
        while self._events and self._events[0][0] <= self.now_us:
            self.advance()

    def run_on(self) -> None:
        while not self.ended and self._events:
            now = self.advance()
            assert now is not None, "there was an event"
            self.now_us = now

    def state(self) -> State:
        now = self.now_us
        age = {ticket: number for number, ticket in enumerate(self._running)}
        events = [
            (round(t - now, DECIMALS), device, -1 if what == END else age[ticket], what)
            for t, _, device, ticket, what in sorted(self._events)
            if what != END or ticket == self.devices[device].epoch
        ]
        return State(
            tuple([(f.waiting, tuple(f.left)) for f in self._running.values()]),
            tuple([round(t - now, DECIMALS) if t > now else 0.0 for t in self._bus_free]),
            tuple([_device_state(device, age, now) for device in self.devices]),
            tuple(
                tuple(
                    [(age[j.ticket], j.position, tuple(sorted(j.arrived)), j.spent_us) for j in device.queue]
                )
                for device in self.devices
            ),
            tuple(events),
        )

    def go_on(self) -> None:
        self._ended, self.busy_us = deque(), [0.0] * len(self.busy_us)
        for age, flight in enumerate(self._running.values()):
            flight.number = age

    def restore(self, state: State) -> None:
        self.now_us, self._bus_free = 0.0, list(state.bus_free)
        self._running = {
            age: Flight(age, age, 0, list(left), waiting) for age, (waiting, left) in enumerate(state.flights)
        }
        for index, (now, jobs) in enumerate(zip(state.devices, state.jobs, strict=True)):
            device = self.devices[index] = SimulatedDevice()
            current, device.start, device.stop, device.since_us = now
            for age, position, arrived, spent_us in jobs:
                column = self._running[age].left[-1][0].columns[index]
                job = Job(age, age, column.items, position, set(arrived), column.until_wait_us, spent_us)
                device.queue.add(job)
                if age == current:
                    device.job = job
        self._events = [(t, n, d, max(age, 0), what) for n, (t, d, age, what) in enumerate(state.events)]
        self._order = len(state.flights) + len(state.events)


def _device_state(device: SimulatedDevice, age: dict[int, int], now: float) -> tuple[int, int, int, float]:
    if device.job is None:
        return -1, 0, 0, 0.0
    return age[device.job.ticket], device.start, device.stop, round(device.since_us - now, DECIMALS)


class MemoMachine(VirtualMachine):
    def __init__(self, num_devices: int, num_buses: int) -> None:
        super().__init__(num_devices, num_buses)
        self.num_followed = self.num_computed = 0
        self._loop = _Loop(num_devices, num_buses)
        self._places: dict[State, _Place] = {}
        self._place = self._place_of(self._loop.state())
        self._loop_place: _Place | None = self._place
        self._since_us = 0.0
        self._flying: list[int] = []
        self._begun: list[tuple[int, tuple[Work, ...]]] = []

    def start(self, microbatch: int, works: Sequence[Work]) -> None:
        if self.now_us > self._since_us:
            self._enter(self._catch_up())  # this moment is a place
        self._begun.append((microbatch, tuple(works)))

    def take(self, limit_us: float) -> int | None:
        """To the next end of a microbatch's last run, or to the limit (None)."""
        if not self._ended and (self._flying or self._begun):
            edge = self._place.edges.get(tuple([works for _, works in self._begun]))
            if edge is None:
                edge = self._compute()
            if self._since_us + edge.us <= limit_us + SAME_END_US:
                self._follow(edge)
        if self._ended:
            return self._ended.popleft()
        if limit_us < float("inf"):
            self.now_us = max(self.now_us, limit_us)
        return None

    def drop(self, microbatches: Collection[int]) -> None:
        self._ended = deque(number for number in self._ended if number not in microbatches)
        numbers = self._catch_up()
        self._loop.drop([n for n, m in enumerate(numbers) if m in microbatches])
        self._enter(numbers)

    def _compute(self) -> _Edge:
        self.num_computed += 1
        start_us = self._begin()
        loop = self._loop
        loop.run_on()
        place = self._loop_place = self._place_of(loop.state())
        us = loop.now_us - start_us
        edge = _Edge(us, tuple(loop.ended), loop.flying, tuple(loop.busy_us), place)
        self._place.edges[tuple([works for _, works in self._begun])] = edge
        return edge

    def _follow(self, edge: _Edge) -> None:
        self.num_followed += 1
        numbers = self._flying + [number for number, _ in self._begun]
        self._since_us = self.now_us = self._since_us + edge.us
        self._place, self._begun = edge.place, []
        self._flying = [numbers[flight] for flight in edge.staying]
        self._ended = deque(numbers[flight] for flight in edge.ended)
        busy_us = self.busy_us
        for index, us in enumerate(edge.busy_us):
            busy_us[index] += us

    def _begin(self) -> float:
        """Returns the time of the last place."""
        loop = self._loop
        if self._loop_place is not self._place:
            loop.restore(self._place.state)
        self._loop_place = None
        loop.go_on()
        for number, (_, works) in enumerate(self._begun, len(self._flying)):
            loop.begin(Flight(number, number, 0, list(reversed(works))), loop.now_us)
        return loop.now_us

    def _catch_up(self) -> list[int]:
        self._begin()
        self._loop.run(self.now_us - self._since_us)
        assert not self._loop.ended, "no run ends before the next place"
        return self._flying + [number for number, _ in self._begun]

    def _enter(self, numbers: Sequence[int]) -> None:
        state = self._loop.state()
        # Times set by the caller do not recur unless the machine is idle.
        self._place = _Place(state) if state.flights else self._place_of(state)
        self._since_us, self._begun = self.now_us, []
        self._flying = [numbers[flight] for flight in self._loop.flying]
        for index, us in enumerate(self._loop.busy_us):
            self.busy_us[index] += us

    def _place_of(self, state: State) -> _Place:
        if len(self._places) >= MAX_PLACES:
            self._places.clear()
        return self._places.setdefault(state, _Place(state))
