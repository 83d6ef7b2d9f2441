"""Machine: the simulator's loop, stopped whenever a slot has finished a run.

`Core` runs requests of known length. Serving decides between two runs what a slot does next: who joins, who
has left, which policy is in force. So here a flight is one run; its end stops the loop, and whoever drives
the machine begins the slot's next run before the loop goes on. Times are in microseconds since the last such
stop, so that they stay small and exact, and `State` is all that decides what happens next.
"""

import heapq
from dataclasses import dataclass

from tessera.execute.schedule import Job
from tessera.ir import Plan
from tessera.simulate.columns import Script, Stretch, Wire
from tessera.simulate.core import END, Core, Device, Flight

# Two states whose times differ by less than this are one, in decimals of a microsecond.
DECIMALS = 6

Key = tuple[object, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """One run: a script and the factor on its times."""

    # Its name in states: equal numbers, equal work.
    number: int
    script: Script
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class State:
    """A machine between two runs, times relative to that moment, slots by age."""

    # Devices to look at before anything else happens.
    resume: tuple[int, ...]
    works: tuple[Work, ...]
    waiting: tuple[int, ...]
    bus_free: tuple[float, ...]
    # (age of the job's slot or -1, start, stop, since)
    devices: tuple[tuple[int, int, int, float], ...]
    # jobs[device]: (age, position, arrived, spent)
    jobs: tuple[tuple[tuple[int, int, tuple[int, ...], float], ...], ...]
    # (time, device, age, transfer or END)
    events: tuple[tuple[float, int, int, int], ...]

    def key(self) -> Key:
        """Equal for states that are the same but for rounding."""
        return (
            self.resume,
            tuple([w.number for w in self.works]),
            self.waiting,
            tuple([round(t, DECIMALS) for t in self.bus_free]),
            tuple([(a, b, c, round(t, DECIMALS)) for a, b, c, t in self.devices]),
            self.jobs,
            tuple([(round(t, DECIMALS), d, a, x) for t, d, a, x in self.events]),
        )


class _Stop(Exception):
    """A slot has finished its run; never leaves this module."""


class _NoTable:
    """Flights here have no lane to give back: a run is not a request."""

    def take(self) -> int:
        return 0

    def give_back(self, lane: int) -> None:
        pass


class Machine(Core):
    """Devices and links; `busy_us` counts every device, then every bus."""

    def __init__(self, plan: Plan, num_buses: int) -> None:
        super().__init__(plan, num_buses)
        self.table = _NoTable()  # type: ignore[assignment]  # all that the loop asks of it
        # Since the last finished run.
        self.now_us = 0.0
        self.busy_us = [0.0] * (len(self.devices) + num_buses)
        self._works: dict[int, Work] = {}  # ticket -> work, oldest first
        self._finished = -1
        self._resume: list[int] = []

    @property
    def slots(self) -> list[int]:
        """Slots with a run, oldest first."""
        return [self._running[ticket][0].slot for ticket in self._works]

    def start(self, slot: int, work: Work) -> None:
        """Begins a run now."""
        ticket = self._order + 1  # what `begin` will call it
        self._works[ticket] = work
        self.begin(Flight(0, slot, 0, [(work.script, work.scale)]), self.now_us)

    def run_until(self, limit_us: float | None) -> int | None:
        """The slot whose run has finished, now; None if the limit comes first or nothing runs."""
        try:
            while self._resume:
                self._look(self._resume.pop(0), self.now_us)
            while self._events and (limit_us is None or self._events[0][0] <= limit_us):
                self.now_us = self._events[0][0]
                self.advance()
        except _Stop:
            return self._finished
        if limit_us is not None:
            self.now_us = max(self.now_us, limit_us)
        return None

    def drop(self, slot: int) -> None:
        """Forgets a slot's run wherever it is; what occupies a bus still does."""
        for ticket in [t for t in self._works if self._running[t][0].slot == slot]:
            del self._works[ticket], self._running[ticket]
            for state in self.devices:
                if any(job.ticket == ticket for job in jobs_of(state)):
                    state.queue.drop(ticket)
                if state.job is not None and state.job.ticket == ticket:
                    state.job, state.epoch = None, state.epoch + 1
            self._events = [e for e in self._events if e[4] == END or e[3] != ticket]
        heapq.heapify(self._events)
        self._resume = list(range(len(self.devices)))

    def on_request_end(self, flight: Flight, now: float) -> None:
        """Stops the loop; what is left of the event is a look at the device it happened on."""
        self._finished = flight.slot
        raise _Stop

    def on_stretch(
        self, device: int, flight: Flight, script: Script, stretch: Stretch, stop_us: float
    ) -> None:
        """Counts busy time."""
        self.busy_us[device] += stop_us - self.devices[device].since_us

    def on_send(self, flight: Flight, wire: Wire, start_us: float, stop_us: float) -> None:
        """Counts busy time."""
        self.busy_us[len(self.devices) + wire.bus] += stop_us - start_us

    def _consider(self, device: int, job: Job, now: float) -> None:
        """An idle device that is yet to be looked at waits for that: no run may end while another begins."""
        if self.devices[device].job is not None or device not in self._resume:
            super()._consider(device, job, now)

    def _end_job(self, device: int, job: Job, now: float) -> None:
        self._resume.insert(0, device)
        super()._end_job(device, job, now)
        self._resume.pop(0)

    def _end_run(self, ticket: int, now: float) -> None:
        del self._works[ticket]
        super()._end_run(ticket, now)

    def rebase(self) -> None:
        """From here on time counts from now."""
        now, self.now_us = self.now_us, 0.0
        self._events = [(t - now, *rest) for t, *rest in self._events]  # type: ignore[misc]
        self._bus_free = [t - now for t in self._bus_free]
        for device in self.devices:
            device.since_us -= now

    def state(self) -> State:
        """Where the machine stands, after a stop."""
        now = self.now_us
        age = {ticket: index for index, ticket in enumerate(self._works)}
        pending = sorted(e for e in self._events if e[4] != END or e[3] == self.devices[e[2]].epoch)
        return State(
            tuple(self._resume) if age else (),
            tuple(self._works.values()),
            tuple([self._running[ticket][0].waiting for ticket in age]),
            tuple([t - now if t > now else 0.0 for t in self._bus_free]),
            tuple([_device_state(x, age, now) for x in self.devices]),
            tuple(
                [
                    tuple(
                        [
                            (age[j.ticket], j.position, tuple(sorted(j.arrived)), j.spent_us)
                            for j in jobs_of(x)
                        ]
                    )
                    for x in self.devices
                ]
            ),
            tuple([(t - now, d, -1 if x == END else age[n], x) for t, _, d, n, x in pending]),
        )

    def restore(self, state: State, slots: list[int]) -> None:
        """Takes up a state; from here on time counts from it."""
        self.now_us, self._resume = 0.0, list(state.resume)
        self._bus_free = list(state.bus_free)
        self._running.clear()
        self._works.clear()
        for age, (slot, work, waiting) in enumerate(zip(slots, state.works, state.waiting, strict=True)):
            self._works[age] = work
            self._running[age] = (Flight(0, slot, 0, [], waiting), work.script, work.scale)
        for device, (now, jobs) in enumerate(zip(state.devices, state.jobs, strict=True)):
            self.devices[device] = _device(device, now, jobs, slots, state.works)
        self._events = [(t, n, d, a if x != END else 0, x) for n, (t, d, a, x) in enumerate(state.events)]
        self._order = max(len(slots), len(state.events)) + 1


def jobs_of(device: Device) -> list[Job]:
    """The jobs of a device in the order in which its queue keeps them."""
    return list(device.queue)


def _device_state(device: Device, age: dict[int, int], now: float) -> tuple[int, int, int, float]:
    if device.job is None:
        return -1, 0, 0, 0.0
    return age[device.job.ticket], device.start, device.stop, device.since_us - now


def _device(
    index: int,
    now: tuple[int, int, int, float],
    jobs: tuple[tuple[int, int, tuple[int, ...], float], ...],
    slots: list[int],
    works: tuple[Work, ...],
) -> Device:
    device = Device()
    current, device.start, device.stop, device.since_us = now
    for age, position, arrived, spent_us in jobs:
        column = works[age].script.columns[index]
        job = Job(slots[age], age, column.items, position, set(arrived), column.until_wait_us, spent_us)
        device.queue.add(job)
        if age == current:
            device.job = job
    return device
