"""Adaptive: carries out what a monitor decides, on a simulated server.

The monitor sees what a service would show it: arrivals, the queue, times of steps. New plans come from a
function that is handed in; they take effect `replan_s` after they were asked for (modelled), and the old plan
runs on until then. New shares and new plans are adopted only where a simulation at the corrected costs says
that they are better, each by what it is for: a latency plan by one request alone, any other by what it can
sustain. A linear program over busy time alone misleads where few requests are in flight. After a loss the new
plans are taken as they are, and when all devices are back the plans from before are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tessera.adapt import (
    LEAST_GAIN,
    Action,
    Adopted,
    Arrived,
    Event,
    Factors,
    Lost,
    MeasuredSteps,
    Monitor,
    Returned,
    Ticked,
    reshared,
)
from tessera.errors import TesseraError
from tessera.execute.lanes import LoadedLane
from tessera.execute.stepper import StepDone
from tessera.ir import Costs, DecisionKind, Objective, Plan
from tessera.simulate.capability import alone, capabilities, capacity_per_s
from tessera.simulate.online import SimulatedServer
from tessera.simulate.rows import Demand
from tessera.simulate.stepper import Truth

# (how wrong the costs were, devices that are gone) -> plans, by the names of the policies they replace
Replan = Callable[[Factors, frozenset[str]], Sequence[tuple[str, Plan]]]

# Looks at the costs in a window.
TICKS_PER_WINDOW = 4


@dataclass
class Adaptive:
    """Joins a monitor and a server."""

    monitor: Monitor
    replan: Replan | None = None
    # Modelled time from asking for plans to having them.
    replan_s: float = 10.0
    _times: MeasuredSteps = field(default_factory=MeasuredSteps)
    # The plans in force when all devices were there.
    _whole: tuple[Plan, ...] = ()

    def on_start(self, server: SimulatedServer) -> None:
        """The policy of an idle system, and a clock."""
        self._whole = server.stepper.plans
        server.switch(self.monitor.current)
        self._arm(server)

    def _arm(self, server: SimulatedServer) -> None:
        server.at(server.now_s + self.monitor.window_s / TICKS_PER_WINDOW, lambda: self._tick(server))

    def _tick(self, server: SimulatedServer) -> None:
        for event in self._times.events():
            self._tell(server, event)
        self._tell(server, Ticked(server.scheduler.num_requests))
        if server.is_serving:
            self._arm(server)

    def on_arrival(self, server: SimulatedServer) -> None:
        self._tell(server, Arrived(server.scheduler.num_requests))

    def on_step(self, server: SimulatedServer, lane: LoadedLane, done: StepDone) -> None:
        """Decodes are all alike; of a plan that was replaced, what it planned with is corrected already."""
        plan = lane.plan
        if plan.graphs[done.step].trace.step.kind == "decode" and any(
            plan is x for x in server.stepper.plans
        ):
            self._times.add(lane, done.step, done.busy_s)

    def on_lost(self, server: SimulatedServer, device: str) -> None:
        """Lanes that are left take over at once; new plans follow."""
        self._tell(server, Lost(device))
        if not server.can_serve(self.monitor.current):
            others = [name for name in server.plans if server.can_serve(name)]
            if others:
                server.switch(others[0])

    def on_back(self, server: SimulatedServer, device: str) -> None:
        """With all devices there again, the plans from before the loss are."""
        self._tell(server, Returned(device))
        if not server.stepper.lanes.lost:
            figures = capabilities(self._whole, server.demand)
            self._tell(server, Adopted(figures, f"{device} is back, and so are the plans that use it"))
            server.adopt(self._whole, self.monitor.current)
            self._keep(server)

    def _tell(self, server: SimulatedServer, event: Event) -> None:
        for action in self.monitor.observe(server.now_s, event):
            self._carry_out(server, action)

    def _carry_out(self, server: SimulatedServer, action: Action) -> None:
        kind = action.decision.kind
        if kind is DecisionKind.SWITCH and server.can_serve(action.decision.policy):
            server.switch(action.decision.policy)
        elif kind is DecisionKind.REBALANCE:
            self._rebalance(server, action)
        elif kind is DecisionKind.REPLAN and self.replan is not None:
            server.at(server.now_s + self.replan_s, lambda: self._adopt(server, action))
        server.decisions.append(action.decision)

    def _rebalance(self, server: SimulatedServer, action: Action) -> None:
        assert action.factors is not None, "a rebalance comes with factors"
        old = server.scheduler.plan
        new = reshared(old, action.rates_per_s)
        if _is_better(old, new, action.factors, server.demand):
            server.adopt([new], old.policy)
            self._keep(server)

    def _adopt(self, server: SimulatedServer, action: Action) -> None:
        assert self.replan is not None, "only a replan is adopted"
        assert action.factors is not None, "a replan comes with factors"
        if action.without - server.stepper.lanes.lost:
            return  # what was lost came back meanwhile
        try:
            made = [replace(plan, policy=name) for name, plan in self.replan(action.factors, action.without)]
        except TesseraError as error:  # the old plans run on: a failed replan is told, and loses nothing
            self._tell(server, Adopted((), f"no new plans: {error.message}"))
            return
        old = server.plans
        if not action.without:
            made = [_better(old[new.policy], new, action.factors, server.demand) for new in made]
        num = sum(new.lanes != old[new.policy].lanes for new in made)
        why = f"{num} of {len(made)} plans are new; the others stay as they are"
        self._tell(server, Adopted(capabilities(made, server.demand), why))
        server.adopt(made, self.monitor.current)
        self._keep(server)

    def _keep(self, server: SimulatedServer) -> None:
        """Other plans are in force: what was measured of those before is corrected already."""
        self._times = MeasuredSteps()
        if not server.stepper.lanes.lost:
            self._whole = server.stepper.plans


def _better(old: Plan, new: Plan, factors: Factors, demand: Demand) -> Plan:
    """The new plan, or the old one with costs that are right."""
    return new if _is_better(old, new, factors, demand) else replace(old, costs=new.costs)


def _is_better(old: Plan, new: Plan, factors: Factors, demand: Demand) -> bool:
    return gain_of(old, new, factors.apply(old.unit, old.costs), demand) >= LEAST_GAIN


def gain_of(old: Plan, new: Plan, costs: tuple[Costs, ...], demand: Demand) -> float:
    """How many times as good a new plan is, simulated at the same costs."""
    truth = Truth(replace(old, costs=costs))
    if old.objective is Objective.LATENCY:
        return alone(old, demand, truth)["latency"] / alone(new, demand, truth)["latency"]
    return capacity_per_s(new, demand, truth) / capacity_per_s(old, demand, truth)
