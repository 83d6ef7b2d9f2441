"""Server: requests that come over time, through the real scheduler over a virtual stepper.

What requests, policies, losses and switches go through here is what a service's go through, by the same code;
only time is virtual, and rows are modelled (`rows`). This module lets requests come, and things happen at
their times.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from tessera.errors import ServiceBusy
from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import Scheduler, SchedulerConfig, Watcher
from tessera.execute.stepper import DeviceLost
from tessera.execute.turns import PATIENCE
from tessera.ir import Decision, Plan
from tessera.simulate.rows import Demand, ModelledRows, RequestLedger
from tessera.simulate.stepper import FAIR, Truth, VirtualStepper, Weather

# Two moments closer than this are one, in microseconds: seconds are not exact to more.
SAME_US = 1e-3


@dataclass
class SimulatedRun:
    demand: Demand
    ledger: RequestLedger
    policy: str
    duration_us: float
    # Devices, then buses.
    busy_us: list[float]
    decisions: list[Decision] = field(default_factory=list)


class SimulatedServer(Watcher[int]):
    """One simulation; the first of the plans is in force until somebody switches."""

    def __init__(
        self,
        plans: Sequence[Plan],
        demand: Demand,
        truth: Truth | None = None,
        weather: Weather = FAIR,
        max_waiting: int | None = None,
    ) -> None:
        self.demand, self.ledger = demand, RequestLedger.of(len(demand))
        self.decisions: list[Decision] = []
        self.stepper = VirtualStepper(plans, truth, weather)
        # Where a microbatch is one request its steps end, so that nobody needs a turn.
        config = SchedulerConfig(
            max_waiting=max_waiting, rows=demand.rows, patience=PATIENCE if demand.rows > 1 else inf
        )
        self.scheduler: Scheduler[int] = Scheduler(self.stepper, self._rows, config, self)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._next = 0  # the next arrival
        self._next_us = 0.0  # when something happens from outside

    def _rows(self, number: int, lane: LoadedLane) -> ModelledRows:
        machine = self.stepper.machine
        return ModelledRows(number, lane, self.demand, self.ledger, lambda: machine.now_us)

    @property
    def now_s(self) -> float:
        return self.stepper.now_s()

    @property
    def plans(self) -> dict[str, Plan]:
        return {plan.policy: plan for plan in self.stepper.plans}

    @property
    def is_serving(self) -> bool:
        """True while requests are being served or to come."""
        return self._next < len(self.demand) or bool(self.scheduler.microbatches)

    def can_serve(self, name: str) -> bool:
        """True if some lane of a policy avoids all lost devices."""
        return bool(self.stepper.lanes.open(list(self.plans).index(name)))

    def switch(self, name: str) -> None:
        self.scheduler.switch(list(self.plans).index(name))

    def adopt(self, plans: Sequence[Plan], name: str) -> None:
        """Replaces plans by name, and puts one in force."""
        found = self.plans | {plan.policy: plan for plan in plans}
        self.scheduler.load(tuple(found.values()))
        self.switch(name)

    def at(self, second: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (second * 1e6, next(self._order), action))
        self._next_us = min(self._next_us, second * 1e6)

    def run(self) -> SimulatedRun:
        scheduler, machine = self.scheduler, self.stepper.machine
        self._happen()
        while self._next_us < inf or not scheduler.is_idle:
            left_us = self._next_us - machine.now_us
            event = scheduler.round(max(0.0, left_us * 1e-6) if left_us < inf else None)
            if machine.now_us >= self._next_us - SAME_US:
                self._happen()
            elif event is None and left_us == inf:
                break  # nobody will come for those who wait
        self.ledger.num_failed += len(scheduler.queue)
        name, busy_us = scheduler.plan.policy, self.stepper.busy_us
        return SimulatedRun(self.demand, self.ledger, name, machine.now_us, busy_us, self.decisions)

    def _happen(self) -> None:
        now_us, times = self.stepper.machine.now_us + SAME_US, self.demand.times_us
        while self._agenda and self._agenda[0][0] <= now_us:
            heapq.heappop(self._agenda)[2]()
        while self._next < len(times) and times[self._next] <= now_us:
            self._next += 1
            self._arrive(self._next - 1)
        self._next_us = times[self._next] if self._next < len(times) else inf
        if self._agenda:
            self._next_us = min(self._next_us, self._agenda[0][0])

    def _arrive(self, request: int) -> bool:
        """False if it is turned away."""
        try:
            self.scheduler.push(request)
        except ServiceBusy:
            self.ledger.num_refused += 1
            return False
        self.ledger.max_waiting = max(self.ledger.max_waiting, len(self.scheduler.queue))
        return True

    # What the scheduler tells.

    def failed(self, request: int, message: str) -> None:
        self.ledger.num_failed += 1

    def retried(self, request: int, lost: DeviceLost) -> None:
        self.ledger.num_restarted += 1
