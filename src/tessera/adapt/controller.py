"""Controller: carries out the monitor's decisions and replaces plans that the devices cannot follow.

It steers a service in real time and a simulation in virtual time; both are a `System`. A device that fails
for good is planned around while lanes that avoid it run on; when it returns, so do the full plans. Drifted
costs are corrected by new plans. One planning job runs at a time, in the background; a lost device cancels a
correction. All plans cover the whole cluster, so a change starts no worker.

`arrived` and `finished` are thread-safe; everything else belongs to the system's thread.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from tessera.adapt.capability import Capability
from tessera.adapt.drift import Factors
from tessera.adapt.monitor import Monitor, PlannedLane
from tessera.errors import TesseraError
from tessera.ir import Decision, DecisionKind, Plan, ServicePlan

# Maximum kept decisions.
MAX_DECISIONS = 1000
# Logged decisions.
LOGGED = (DecisionKind.LOSE, DecisionKind.RETURN, DecisionKind.ADOPT)

# A policy of a simulation or of a service.
P = TypeVar("P", Plan, ServicePlan)


class Planner(Protocol[P]):
    """Replaces the plans of a running system (`adapt.replan.Replanner`). Called from background threads."""

    def corrected(self, plans: tuple[P, ...], factors: Factors) -> tuple[P, ...]:
        """tuple[P, ...] at costs corrected by these factors."""

    def without(self, plans: tuple[P, ...], lost: frozenset[str]) -> tuple[P, ...]:
        """tuple[P, ...] that leave devices unused."""


class System(Protocol[P]):
    """A service or a simulation."""

    @property
    def policy(self) -> str:
        """The current policy."""

    def now_s(self) -> float: ...

    def switch(self, policy: str) -> None:
        """Use a policy for microbatches opened from now on; thread-safe."""

    def load(self, plans: tuple[P, ...]) -> None:
        """Replace the plans."""

    def submit(self, job: Callable[[], tuple[P, ...]]) -> Future[tuple[P, ...]]:
        """Run a job in the background, then `Controller.poll`."""

    def rate(self, plans: tuple[P, ...]) -> Sequence[Capability]: ...


class Controller(Generic[P]):
    """plans    for all devices; the first is used unless a monitor chooses
    monitor  None: the policy is fixed
    planner  None: plans stay
    log      gets one line per loss, return and change of plans
    """

    def __init__(
        self,
        system: System[P],
        plans: Sequence[P],
        monitor: Monitor | None = None,
        planner: Planner[P] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._system: System[P] = system
        self._planner: Planner[P] | None = planner
        self._monitor, self._log = monitor, log
        self.plans: tuple[P, ...] = tuple(plans)
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self.counts: Counter[DecisionKind] = Counter()
        # Devices planned around, by current plans or a running job.
        self._without: frozenset[str] = frozenset()
        self._job: Future[tuple[P, ...]] | None = None
        # Guards monitor, request count and decisions; not held while plans are loaded.
        self._lock = threading.RLock()
        self._num_requests = 0
        if monitor is not None:
            monitor.begin(system.now_s())
            system.switch(monitor.current)

    def arrived(self) -> None:
        with self._lock:
            self._num_requests += 1
            if self._monitor is not None:
                self._monitor.arrived(self._system.now_s())
                self._choose(self._monitor)

    def finished(self) -> None:
        with self._lock:
            self._num_requests -= 1
            if self._monitor is not None:
                self._choose(self._monitor)

    def stepped(self, lane: PlannedLane, step: int, busy_s: Mapping[str, float]) -> None:
        if self._monitor is not None and self._planner is not None and busy_s:
            with self._lock:
                self._monitor.stepped(lane, step, busy_s)

    def lost(self, device: str, why: str, is_lasting: bool) -> None:
        self._note(DecisionKind.LOSE, why)
        if is_lasting and device not in self._without:
            self._plan_without(self._without | {device})

    def back(self, device: str) -> None:
        self._note(DecisionKind.RETURN, f"device {device} is back")
        if device not in self._without:
            return
        left = self._without - {device}
        if left:
            self._plan_without(left)
            return
        self._cancel()
        self._without = left
        self._load(self.plans, "plans for all devices are in force again")

    def poll(self) -> None:
        """Adopt finished plans, and judge load and costs."""
        self._collect()
        if self._monitor is None:
            return
        with self._lock:
            self._choose(self._monitor)
            if self._planner is None or self._without:
                return
            drift = self._monitor.drifted(self._system.now_s())
        if drift is not None:
            planner, plans, factors = self._planner, self.plans, drift[0]
            why = f"measured times differ from the plan's by {drift[1]:.0%}; planning beside the running plan"
            self._note(DecisionKind.REPLAN, why)
            self._job = self._system.submit(lambda: planner.corrected(plans, factors))

    def _choose(self, monitor: Monitor) -> None:
        why = monitor.switch(self._system.now_s(), self._num_requests)
        if why is not None:
            self._note(DecisionKind.SWITCH, why)
            self._system.switch(monitor.current)

    def _plan_without(self, devices: frozenset[str]) -> None:
        self._without = devices
        self._cancel()
        if self._planner is not None:
            planner, plans = self._planner, self.plans
            self._job = self._system.submit(lambda: planner.without(plans, devices))

    def _cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()
            self._job = None

    def _collect(self) -> None:
        if self._job is None or not self._job.done():
            return
        job, self._job = self._job, None
        without = f" without {', '.join(sorted(self._without))}" if self._without else ""
        try:
            plans = job.result()
        except TesseraError as error:  # the old plans run on
            self._adopted((), f"no {'new ' * (not without)}plans{without}: {error.message}")
            return
        if without:
            self._load(plans, f"plans{without} are in force")
            return
        num = sum(_lanes(new) != _lanes(old) for new, old in zip(plans, self.plans, strict=True))
        self.plans = plans
        self._load(plans, f"costs are corrected; {num} of {len(plans)} plans are new")

    def _load(self, plans: tuple[P, ...], why: str) -> None:
        try:
            self._system.load(plans)
        except TesseraError as error:  # the old plans run on
            self._adopted((), f"plans cannot be loaded: {error}")
        else:
            self._adopted(plans, why)

    def _adopted(self, plans: tuple[P, ...], why: str) -> None:
        if self._monitor is not None:
            capabilities = self._system.rate(plans) if plans else ()
            with self._lock:
                self._monitor.adopt(self._system.now_s(), capabilities)
            self._system.switch(self._monitor.current)
        self._note(DecisionKind.ADOPT, why)

    def _note(self, kind: DecisionKind, why: str) -> None:
        policy = self._system.policy if self._monitor is None else self._monitor.current
        with self._lock:
            self.decisions.append(Decision(self._system.now_s(), kind, policy, why))
            self.counts[kind] += 1
        if kind in LOGGED:
            self._log(why)


def _lanes(policy: Plan | ServicePlan) -> list[object]:
    return [plan.lanes for plan in (policy.plans if isinstance(policy, ServicePlan) else (policy,))]
