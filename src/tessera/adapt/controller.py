"""Controller: carries out the monitor's decisions and replaces plans that the devices cannot follow.

A device that fails for good is planned around while lanes that avoid it run on; when it returns, so do the
full plans. One planning job runs at a time, in the background; a lost device cancels another one. All plans
cover the whole cluster, so a change starts no worker.

`arrived` and `finished` are thread-safe; everything else belongs to the system's thread.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, Protocol, TypeVar

from tessera.adapt.capability import Capability
from tessera.adapt.drift import Factors
from tessera.adapt.history import LoadHistory
from tessera.adapt.monitor import Monitor, PlannedLane
from tessera.errors import TesseraError
from tessera.ir import Decision, DecisionKind, Load, Plan, ServicePlan

MAX_DECISIONS = 1000
LOGGED = (DecisionKind.LOSE, DecisionKind.RETURN, DecisionKind.ADOPT)

P = TypeVar("P", Plan, ServicePlan)
# Corrected costs, lengths that requests have, or lost devices.
Change = Factors | Load | frozenset[str]


class Replanned(NamedTuple, Generic[P]):
    plans: tuple[P, ...]
    capabilities: Sequence[Capability]


class Planner(Protocol[P]):
    def replan(self, plans: tuple[P, ...], change: Change) -> Replanned[P]:
        """Plans at corrected costs, for another load, or without devices. Called from background threads."""


class System(Protocol[P]):
    """A service in real time, or a simulation in virtual time."""

    @property
    def policy(self) -> str:
        """Name of the current one."""

    def now_s(self) -> float: ...

    def switch(self, policy: str) -> None:
        """For microbatches opened from now on; thread-safe."""

    def switch_s(self) -> float:
        """Seconds that requests wait for a switch. Thread-safe."""

    def load(self, plans: tuple[P, ...]) -> None:
        """Replaces the plans."""

    def submit(self, job: Callable[[], Replanned[P]]) -> Future[Replanned[P]]:
        """In the background, then `Controller.poll`."""


class Controller(Generic[P]):
    """plans    for all devices; the first is used unless a monitor chooses
    monitor  None: the policy is fixed
    planner  None: plans stay
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
        self.history = LoadHistory()
        self.plans: tuple[P, ...] = tuple(plans)
        self._capabilities = () if monitor is None else monitor.capabilities
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self.counts: Counter[DecisionKind] = Counter()
        # Lost devices that the current plans, or those of a running job, avoid.
        self._without: frozenset[str] = frozenset()
        self._planned: Load | None = None
        self._job: Future[Replanned[P]] | None = None
        self._subject = ""
        # Guards monitor, history, request count and decisions; not held while plans are loaded.
        self._lock = threading.RLock()
        self._num_requests = 0
        if monitor is not None:
            monitor.begin(system.now_s())
            system.switch(monitor.current)

    def arrived(self) -> None:
        with self._lock:
            self._num_requests += 1
            self.history.arrived(self._system.now_s())
            if self._monitor is not None:
                self._monitor.arrived(self._system.now_s())
                self._choose(self._monitor)

    def finished(self, lengths: tuple[int, int] | None = None) -> None:
        """`lengths`: tokens of prompt and complete answer."""
        with self._lock:
            self._num_requests -= 1
            if lengths is not None:
                self.history.answered(*lengths)
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
        self._load(Replanned(self.plans, self._capabilities), "plans for all devices are in force again")

    def poll(self) -> None:
        self._collect()
        if self._monitor is None:
            return
        with self._lock:
            self._choose(self._monitor)
            if self._planner is None or self._without or self._job is not None:
                return
            drift = self._monitor.drifted(self._system.now_s())
        if drift is not None:
            why = f"measured times differ from the plan's by {drift[1]:.0%}; planning beside the running plan"
            self._note(DecisionKind.REPLAN, why)
            self._submit(drift[0], "costs are corrected")
        else:
            self._learn()

    def _learn(self) -> None:
        planned = self._planned or load_of(self.plans[0])
        with self._lock:
            load = None if planned is None else self.history.changed(planned)
            if planned is None or load is None:
                return
            self.history.num_new = 0
        self._planned = load
        lengths = f"{load.prompt_tokens} tokens in and {load.output_tokens} out"
        before = f"{planned.prompt_tokens} and {planned.output_tokens}"
        why = f"requests have {lengths}, planned were {before}; planning beside the running plan"
        self._note(DecisionKind.REPLAN, why)
        self._submit(load, f"planned for {lengths}")

    def _choose(self, monitor: Monitor) -> None:
        switch_s = self._system.switch_s() if len(monitor.capabilities) > 1 else 0.0
        why = monitor.switch(self._system.now_s(), self._num_requests, switch_s)
        if why is not None:
            self._note(DecisionKind.SWITCH, why)
            self._system.switch(monitor.current)

    def _plan_without(self, devices: frozenset[str]) -> None:
        self._without = devices
        self._cancel()
        self._submit(devices, "")

    def _submit(self, change: Change, subject: str) -> None:
        planner, plans = self._planner, self.plans
        if planner is not None:
            self._job = self._system.submit(lambda: planner.replan(plans, change))
            self._subject = subject

    def _cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()
            self._job = self._planned = None

    def _collect(self) -> None:
        if self._job is None or not self._job.done():
            return
        job, self._job = self._job, None
        without = f" without {', '.join(sorted(self._without))}" if self._without else ""
        try:
            new = job.result()
        except TesseraError as error:  # the old plans run on
            self._adopted((), f"no {'new ' * (not without)}plans{without}: {error.message}")
            return
        if without:
            self._load(new, f"plans{without} are in force")
            return
        old = [_lanes(plan) for plan in self.plans]
        num = sum(_lanes(plan) not in old for plan in new.plans)
        if self._load(new, f"{self._subject}; {num} of {len(new.plans)} plans are new"):
            self.plans, self._capabilities = new.plans, tuple(new.capabilities)

    def _load(self, new: Replanned[P], why: str) -> bool:
        try:
            self._system.load(new.plans)
        except TesseraError as error:  # the old plans run on
            self._adopted((), f"plans cannot be loaded: {error}")
            return False
        self._adopted(new.capabilities, why)
        return True

    def _adopted(self, capabilities: Sequence[Capability], why: str) -> None:
        if self._monitor is not None:
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


def load_of(policy: Plan | ServicePlan) -> Load | None:
    return policy.load if isinstance(policy, ServicePlan) else None


def _lanes(policy: Plan | ServicePlan) -> list[object]:
    if isinstance(policy, Plan):
        return [policy.lanes]
    return [(g.role, g.sequences, g.microbatches, g.plan.lanes) for g in policy.groups]
