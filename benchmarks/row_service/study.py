"""compare and adapt: the same arrivals through several plans, separately or with a monitor choosing.

Compared plans may have different devices; each is timed by its own costs (with the same noise by kernel
type). Plans that a monitor chooses among share devices, work and costs.

`AdaptiveServer` is a `System` of `adapt.controller` on a virtual clock; the controller sees what a service
would show. New plans take effect after `replan_s` (modelled) and are compared by simulation at the corrected
costs: latency plans by one request alone, others by capacity.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from benchmarks.row_service.metrics import (
    LatencyLimit,
    ServingReport,
    alone,
    capabilities,
    capacity_per_s,
    check_limits,
    report_of,
)
from benchmarks.row_service.replan import MakePlan, Replanner
from benchmarks.row_service.server import RequestLoad, SimulatedRun, SimulatedServer, load_of, move_s

from tessera.adapt.capability import Capability
from tessera.adapt.controller import Controller, Planner, Replanned
from tessera.adapt.monitor import DEFAULT, Monitor, MonitorConfig
from tessera.errors import ArrivalsError, MismatchError, TesseraError
from tessera.execute.scheduler import Microbatch
from tessera.execute.stepper import DeviceBack, DeviceLost, StepDone
from tessera.ir import Arrivals, Objective, Plan
from tessera.simulate.stepper import NO_FAULTS, Faults, Truth

# Controller polls per window.
TICKS_PER_WINDOW = 4


class AdaptiveServer(SimulatedServer):
    """A server whose plans a monitor chooses.

    planner   None: plans stay
    replan_s  modelled duration of planning
    """

    def __init__(
        self,
        monitor: Monitor,
        plans: Sequence[Plan],
        requests: RequestLoad,
        truth: Truth | None = None,
        faults: Faults = NO_FAULTS,
        max_waiting: int | None = None,
        planner: Planner[Plan] | None = None,
        replan_s: float = 10.0,
    ) -> None:
        super().__init__(plans, requests, truth, faults, max_waiting)
        self._tick_s, self._replan_s = monitor.window_s / TICKS_PER_WINDOW, replan_s
        # When requests were moved, which of them sit in each microbatch, and how long they stood still.
        self._moved_s: dict[int, float] = {}
        self._seated: dict[int, list[int]] = {}
        self._stops_s: list[float] = []
        self.controller = Controller(self, plans, monitor, planner)

    def run(self) -> SimulatedRun:
        self.at(self._tick_s, self._tick)
        run = super().run()
        decisions = list(self.controller.decisions)
        return replace(run, policy="adaptive", decisions=decisions, stops_s=self._stops_s)

    def _tick(self) -> None:
        self.controller.poll()
        if self.is_serving:
            self.at(self.now_s() + self._tick_s, self._tick)

    # Interface of the controller.

    @property
    def policy(self) -> str:
        return self.scheduler.plan.policy

    def load(self, plans: tuple[Plan, ...]) -> None:
        self.scheduler.load(plans)

    def switch_s(self) -> float:
        """Until the state of all seated requests has moved, one after the other."""
        seated = sum(microbatch.content.num_used for microbatch in self.scheduler.microbatches.values())
        return seated * move_s(self.scheduler.plan)

    def submit(self, job: Callable[[], Replanned[Plan]]) -> Future[Replanned[Plan]]:
        future: Future[Replanned[Plan]] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except TesseraError as error:
                    future.set_exception(error)
                self.controller.poll()

        self.at(self.now_s() + self._replan_s, run)
        return future

    # Scheduler callbacks.

    def _arrive(self, request: int) -> bool:
        self.controller.arrived()
        is_taken = super()._arrive(request)
        if not is_taken:
            self.controller.finished()
        return is_taken

    def finished(self, request: int) -> None:
        self.controller.finished()

    def failed(self, request: int, message: str) -> None:
        super().failed(request, message)
        self.controller.finished()

    def moved(self, request: int) -> None:
        self._moved_s.setdefault(request, self.now_s())

    def seated(self, request: int, microbatch: Microbatch[int]) -> None:
        if request in self._moved_s:
            self._seated.setdefault(microbatch.number, []).append(request)

    def stepped(self, microbatch: Microbatch[int], done: StepDone) -> None:
        """Decodes are all alike; steps of replaced plans are ignored, their costs are already corrected."""
        plan = microbatch.lane.plan
        is_decode = plan.graphs[done.step].trace.step.kind == "decode"
        if is_decode:
            for request in self._seated.pop(microbatch.number, ()):
                if request in self._moved_s:
                    self._stops_s.append(self.now_s() - self._moved_s.pop(request))
        if is_decode and any(plan is x for x in self.stepper.plans):
            self.controller.stepped(microbatch.lane, done.step, done.busy_s)

    def lost(self, lost: DeviceLost) -> None:
        """Reported in the next event, once its requests wait again."""
        why = f"{lost.device} does not answer; lanes that use it are closed"
        self.at(self.now_s(), lambda: self.controller.lost(lost.device, why, True))

    def back(self, back: DeviceBack) -> None:
        self.at(self.now_s(), lambda: self.controller.back(back.device))


def gain_of(old: Plan, new: Plan, requests: RequestLoad) -> float:
    """Ratio of the new plan to the old, simulated at the old plan's costs."""
    truth = Truth(old)
    if old.objective is Objective.LATENCY:
        return alone(old, requests, truth)["latency"] / alone(new, requests, truth)["latency"]
    return capacity_per_s(new, requests, truth) / capacity_per_s(old, requests, truth)


def replanner(make: MakePlan, requests: RequestLoad) -> Replanner:
    """Judges plans by simulation of these requests."""
    return Replanner(
        make, lambda old, new: gain_of(old, new, requests), lambda plans: capabilities(plans, requests)
    )


@dataclass(frozen=True)
class Scenario:
    arrivals: Arrivals
    faults: Faults = NO_FAULTS
    limits: tuple[LatencyLimit, ...] = ()
    # Requests per microbatch; None: the captured batch.
    rows: int | None = None
    # Kernel types are mispriced per device by exp(noise * normal).
    noise: float = 0.0
    seed: int = 0
    # Requests are refused while this many wait; None: never.
    max_waiting: int | None = None

    def requests(self, plan: Plan) -> RequestLoad:
        return load_of(plan.unit, self.arrivals, self.rows)

    def truth(self, plan: Plan) -> Truth:
        return Truth(plan, self.noise, self.seed)

    def check(self, plan: Plan) -> None:
        lost = ((loss.device, loss.at_s) for loss in self.faults.losses)
        for device, second in (*lost, *((d, s) for d, s, _ in self.faults.slowdowns)):
            if device not in plan.cluster.names:
                known = ", ".join(plan.cluster.names)
                raise ArrivalsError(f"the plan has no device '{device}'", f"Its devices: {known}.")
            if not 0.0 <= second < float("inf"):
                raise ArrivalsError(f"{device} cannot change at {second:g} s", "Give a time from zero on.")


def compare(plans: Sequence[tuple[str, Plan]], setting: Scenario) -> tuple[ServingReport, ...]:
    return tuple(_alone(replace(plan, policy=name), setting) for name, plan in plans)


def _alone(plan: Plan, setting: Scenario) -> ServingReport:
    setting.check(plan)
    requests, truth = setting.requests(plan), setting.truth(plan)
    check_limits([plan], requests, setting.limits, truth)
    served = SimulatedServer([plan], requests, truth, setting.faults, setting.max_waiting).run()
    notes = _failures(served.ledger.num_failed, "; a monitor would replan")
    capacity = capacity_per_s(plan, requests, truth)
    return report_of(served, [plan], setting.arrivals, capacity, setting.limits, notes)


def _failures(num: int, remedy: str = "") -> tuple[str, ...]:
    return (
        (f"{num} requests were never served: every lane uses a device that is lost{remedy}",) if num else ()
    )


def checked(plans: Sequence[tuple[str, Plan]], setting: Scenario) -> list[Plan]:
    """Plans to choose among, renamed; they must share work, devices and costs."""
    first_name, first = plans[0]
    setting.check(first)
    for name, plan in plans[1:]:
        alike = {
            "work": plan.unit == first.unit,
            "devices": plan.cluster == first.cluster,
            "costs": plan.costs == first.costs,
        }
        for what, is_same in alike.items():
            if not is_same:
                message = f"the plans '{first_name}' and '{name}' were made with different {what}"
                raise MismatchError(message, "Make both from the same traces, costs and devices.")
    return [replace(plan, policy=name) for name, plan in plans]


def known_of(plans: Sequence[tuple[str, Plan]], setting: Scenario) -> tuple[Capability, ...]:
    named = checked(plans, Scenario(setting.arrivals))
    return capabilities(named, setting.requests(named[0]), setting.seed)


def adapt(
    plans: Sequence[tuple[str, Plan]],
    setting: Scenario,
    watch: MonitorConfig = DEFAULT,
    make: MakePlan | None = None,
    replan_s: float = 10.0,
    known: Sequence[Capability] = (),
) -> tuple[ServingReport, tuple[Capability, ...]]:
    """A report with a monitor choosing among plans, and their capabilities (simulated unless `known`).

    `make` makes new plans in `replan_s` (modelled); None: plans stay.
    """
    known = tuple(known) or known_of(plans, setting)
    served = watched(plans, setting, known, watch, make, replan_s)
    best = max(x.capacity_per_s for x in known)
    notes = _failures(served.ledger.num_failed)
    return report_of(served, [p for _, p in plans], setting.arrivals, best, setting.limits, notes), known


def watched(
    plans: Sequence[tuple[str, Plan]],
    setting: Scenario,
    known: Sequence[Capability],
    watch: MonitorConfig = DEFAULT,
    make: MakePlan | None = None,
    replan_s: float = 10.0,
) -> SimulatedRun:
    named = checked(plans, setting)
    requests, truth = setting.requests(named[0]), setting.truth(named[0])
    check_limits(named, requests, setting.limits, truth)
    faults = replace(setting.faults, is_mended=make is not None)
    planner = make and replanner(make, requests)
    monitor, most = Monitor(tuple(known), watch), setting.max_waiting
    return AdaptiveServer(monitor, named, requests, truth, faults, most, planner, replan_s).run()
