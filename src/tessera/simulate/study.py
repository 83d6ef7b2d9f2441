"""compare and adapt: the same arrivals through several plans, each on its own, or with a monitor choosing.

Plans that are compared may be for different devices; each is timed by its own costs (with the same mispricing
of kernel types where there is noise). Plans that a monitor chooses among share devices, work and costs.

`AdaptiveServer` carries out what a monitor decides, on a virtual clock. The monitor sees what a service would
show it: arrivals, the queue, times of steps. New plans come from a function that is handed in; they take
effect `replan_s` after they were asked for (modelled), and the old plan runs on until then. New plans are
adopted only where a simulation at the corrected costs says that they are better, each by what it is for: a
latency plan by one request alone, any other by what it can sustain. A linear program over busy time alone
misleads where few requests are in flight. After a loss the new plans are taken as they are, and when all
devices are back the plans from before are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tessera.adapt.capability import Capability
from tessera.adapt.drift import LEAST_GAIN, Factors
from tessera.adapt.monitor import (
    Action,
    Adopted,
    Arrived,
    Event,
    Lost,
    Monitor,
    MonitorConfig,
    Returned,
    Ticked,
)
from tessera.errors import ArrivalsError, MismatchError, TesseraError
from tessera.execute.scheduler import Microbatch
from tessera.execute.stepper import DeviceBack, DeviceLost, StepDone
from tessera.ir import Arrivals, Costs, DecisionKind, Objective, Plan, ServingReport, need_one_batch
from tessera.simulate.metrics import (
    LatencyLimit,
    alone,
    capabilities,
    capacity_per_s,
    check_limits,
    report_of,
)
from tessera.simulate.online import Demand, SimulatedRun, SimulatedServer, demand_of
from tessera.simulate.stepper import FAIR, Truth, Weather

# (how wrong the costs were, devices that are gone) -> plans, by the names of the policies they replace
Replan = Callable[[Factors, frozenset[str]], Sequence[tuple[str, Plan]]]

# Looks at the costs in a window.
TICKS_PER_WINDOW = 4


class AdaptiveServer(SimulatedServer):
    """A server whose plans a monitor chooses.

    replan_s  modelled time from asking for plans to having them
    """

    def __init__(
        self,
        monitor: Monitor,
        plans: Sequence[Plan],
        demand: Demand,
        truth: Truth | None = None,
        weather: Weather = FAIR,
        max_waiting: int | None = None,
        replan: Replan | None = None,
        replan_s: float = 10.0,
    ) -> None:
        super().__init__(plans, demand, truth, weather, max_waiting)
        self.monitor, self._replan, self._replan_s = monitor, replan, replan_s
        # The plans in force when all devices were there.
        self._whole = self.stepper.plans

    def run(self) -> SimulatedRun:
        """From the policy of an idle system on."""
        self.switch(self.monitor.current)
        self._arm()
        return replace(super().run(), policy="adaptive")

    def _arm(self) -> None:
        self.at(self.now_s + self.monitor.window_s / TICKS_PER_WINDOW, self._tick)

    def _tick(self) -> None:
        self._tell(Ticked(self.scheduler.num_requests))
        if self.is_serving:
            self._arm()

    def _arrive(self, request: int) -> bool:
        is_taken = super()._arrive(request)
        if is_taken:
            self._tell(Arrived(self.scheduler.num_requests))
        return is_taken

    def stepped(self, microbatch: Microbatch[int], done: StepDone) -> None:
        """Decodes are all alike; of a plan that was replaced, what it planned with is corrected already."""
        plan = microbatch.lane.plan
        is_decode = plan.graphs[done.step].trace.step.kind == "decode"
        if is_decode and any(plan is x for x in self.stepper.plans):
            self.monitor.stepped(microbatch.lane, done.step, done.busy_s)

    def lost(self, lost: DeviceLost) -> None:
        """Once its requests wait again; so it is told in the next moment."""
        self.at(self.now_s, lambda: self._lose(lost.device))

    def _lose(self, device: str) -> None:
        """Lanes that are left take over at once; new plans follow."""
        self._tell(Lost(device))
        if not self.can_serve(self.monitor.current):
            others = [name for name in self.plans if self.can_serve(name)]
            if others:
                self.switch(others[0])

    def back(self, back: DeviceBack) -> None:
        self.at(self.now_s, lambda: self._return(back.device))

    def _return(self, device: str) -> None:
        """With all devices there again, the plans from before the loss are."""
        self._tell(Returned(device))
        if not self.stepper.lanes.lost:
            figures = capabilities(self._whole, self.demand)
            self._tell(Adopted(figures, f"{device} is back, and so are the plans that use it"))
            self.adopt(self._whole, self.monitor.current)

    def _tell(self, event: Event) -> None:
        for action in self.monitor.observe(self.now_s, event):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        kind = action.decision.kind
        if kind is DecisionKind.SWITCH and self.can_serve(action.decision.policy):
            self.switch(action.decision.policy)
        elif kind is DecisionKind.REPLAN and self._replan is not None:
            self.at(self.now_s + self._replan_s, lambda: self._plan_anew(action))
        self.decisions.append(action.decision)

    def _plan_anew(self, action: Action) -> None:
        assert self._replan is not None, "only a replan is adopted"
        assert action.factors is not None, "a replan comes with factors"
        if action.without - self.stepper.lanes.lost:
            return  # what was lost came back meanwhile
        try:
            made = [replace(plan, policy=name) for name, plan in self._replan(action.factors, action.without)]
        except TesseraError as error:  # the old plans run on: a failed replan is told, and loses nothing
            self._tell(Adopted((), f"no new plans: {error.message}"))
            return
        old = self.plans
        if not action.without:
            made = [_better(old[new.policy], new, action.factors, self.demand) for new in made]
        num = sum(new.lanes != old[new.policy].lanes for new in made)
        why = f"{num} of {len(made)} plans are new; the others stay as they are"
        self._tell(Adopted(capabilities(made, self.demand), why))
        self.adopt(made, self.monitor.current)

    def adopt(self, plans: Sequence[Plan], name: str) -> None:
        super().adopt(plans, name)
        if not self.stepper.lanes.lost:
            self._whole = self.stepper.plans


def _better(old: Plan, new: Plan, factors: Factors, demand: Demand) -> Plan:
    """The new plan, or the old one with costs that are right."""
    is_better = gain_of(old, new, factors.apply(old.unit, old.costs), demand) >= LEAST_GAIN
    return new if is_better else replace(old, costs=new.costs)


def gain_of(old: Plan, new: Plan, costs: tuple[Costs, ...], demand: Demand) -> float:
    """How many times as good a new plan is, simulated at the same costs."""
    truth = Truth(replace(old, costs=costs))
    if old.objective is Objective.LATENCY:
        return alone(old, demand, truth)["latency"] / alone(new, demand, truth)["latency"]
    return capacity_per_s(new, demand, truth) / capacity_per_s(old, demand, truth)


USUAL = MonitorConfig()


@dataclass(frozen=True)
class Setting:
    arrivals: Arrivals
    weather: Weather = FAIR
    limits: tuple[LatencyLimit, ...] = ()
    # Requests that share a microbatch; None: the captured batch.
    rows: int | None = None
    # Every kernel type is mispriced on every device by exp(noise * normal).
    noise: float = 0.0
    # Requests that come while so many wait are turned away; None: none are.
    max_waiting: int | None = None

    def demand(self, plan: Plan) -> Demand:
        return demand_of(plan.unit, self.arrivals, self.rows)

    def truth(self, plan: Plan) -> Truth:
        """What launches really take, where the plan's costs are the best guess."""
        return Truth(plan, self.noise, self.weather.seed)

    def check(self, plan: Plan) -> None:
        """Devices that are lost or slow are devices of the plan, at a time that comes; all is one batch."""
        need_one_batch(plan, "a simulation of arrivals")
        lost = ((loss.device, loss.at_s) for loss in self.weather.losses)
        for device, second in (*lost, *((d, s) for d, s, _ in self.weather.slowdowns)):
            if device not in plan.cluster.names:
                known = ", ".join(plan.cluster.names)
                raise ArrivalsError(f"the plan has no device '{device}'", f"Its devices: {known}.")
            if not 0.0 <= second < float("inf"):
                raise ArrivalsError(f"{device} cannot change at {second:g} s", "Give a time from zero on.")


def compare(plans: Sequence[tuple[str, Plan]], setting: Setting) -> tuple[ServingReport, ...]:
    return tuple(_alone(replace(plan, policy=name), setting) for name, plan in plans)


def _alone(plan: Plan, setting: Setting) -> ServingReport:
    setting.check(plan)
    demand, truth = setting.demand(plan), setting.truth(plan)
    check_limits([plan], demand, setting.limits, truth)
    served = SimulatedServer([plan], demand, truth, setting.weather, setting.max_waiting).run()
    notes = _failures(served.ledger.num_failed, "; a monitor would replan")
    capacity = capacity_per_s(plan, demand, truth)
    return report_of(served, [plan], setting.arrivals, capacity, setting.limits, notes)


def _failures(num: int, remedy: str = "") -> tuple[str, ...]:
    return (
        (f"{num} requests were never served: every lane uses a device that is lost{remedy}",) if num else ()
    )


def checked(plans: Sequence[tuple[str, Plan]], setting: Setting) -> list[Plan]:
    """Plans to choose among, under the names given; they must be for the same work, devices and costs."""
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


def known_of(plans: Sequence[tuple[str, Plan]], setting: Setting) -> tuple[Capability, ...]:
    """What a monitor knows of plans beforehand: by their own costs, whatever the truth will be."""
    made = checked(plans, Setting(setting.arrivals))
    return capabilities(made, setting.demand(made[0]), setting.weather.seed)


def adapt(
    plans: Sequence[tuple[str, Plan]],
    setting: Setting,
    watch: MonitorConfig = USUAL,
    replan: Replan | None = None,
    replan_s: float = 10.0,
    known: Sequence[Capability] = (),
) -> tuple[ServingReport, tuple[Capability, ...]]:
    """A report with a monitor choosing among plans, and what it knew of them.

    New plans take `replan_s` (modelled). What is known beforehand may be given, for several loads.
    """
    known = tuple(known) or known_of(plans, setting)
    served = watched(plans, setting, known, watch, replan, replan_s)
    best = max(x.capacity_per_s for x in known)
    notes = _failures(served.ledger.num_failed)
    made = [plan for _, plan in plans]
    return report_of(served, made, setting.arrivals, best, setting.limits, notes), known


def watched(
    plans: Sequence[tuple[str, Plan]],
    setting: Setting,
    known: Sequence[Capability],
    watch: MonitorConfig = USUAL,
    replan: Replan | None = None,
    replan_s: float = 10.0,
) -> SimulatedRun:
    """What happened to every request with a monitor choosing among plans."""
    made = checked(plans, setting)
    demand, truth = setting.demand(made[0]), setting.truth(made[0])
    check_limits(made, demand, setting.limits, truth)
    weather = replace(setting.weather, is_mended=replan is not None)
    monitor, most = Monitor(tuple(known), watch), setting.max_waiting
    return AdaptiveServer(monitor, made, demand, truth, weather, most, replan, replan_s).run()
