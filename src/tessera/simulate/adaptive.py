"""Adaptive: carries out what a monitor decides, on a simulated server.

The monitor sees what an engine would show it: arrivals, the queue, times of kernels. New plans come from a
function that is handed in; they take effect `replan_s` after they were asked for (modelled), and the old plan
runs on until then. New shares and new plans are adopted only where a simulation at the corrected costs says
that they are better, unless a device is lost.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tessera.adapt import Action, Adopted, Arrived, Event, Factors, Lost, Measured, Monitor, Ticked
from tessera.errors import TesseraError
from tessera.ir import DecisionKind, Plan
from tessera.simulate.capability import capabilities
from tessera.simulate.judged import LEAST_GAIN, corrected_costs, gain_of
from tessera.simulate.online import Server
from tessera.simulate.policy import Lane, Policy
from tessera.simulate.seats import Slot

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
    _runs: Counter[tuple[Policy, Lane]] = field(default_factory=Counter)

    def on_start(self, server: Server) -> None:
        """The policy of an idle system, and a clock."""
        server.switch(self.monitor.current)
        self._arm(server)

    def _arm(self, server: Server) -> None:
        server.at(server.now_s + self.monitor.window_s / TICKS_PER_WINDOW, lambda: self._tick(server))

    def _tick(self, server: Server) -> None:
        for (policy, lane), num in self._runs.items():
            if server.policies.get(policy.name) is not policy:
                continue  # what it planned with is corrected already
            planned, true = policy.busy_us(lane), policy.true_us(lane)
            for device, kernels in planned.items():
                for kernel, us in kernels.items():
                    event = Measured(device, ((kernel, us),), true[device][kernel], num)
                    self._tell(server, event)
        self._runs.clear()
        self._tell(server, Ticked(server.num_requests))
        if server.is_serving:
            self._arm(server)

    def on_arrival(self, server: Server) -> None:
        """The monitor counts it."""
        self._tell(server, Arrived(server.num_requests))

    def on_run(self, server: Server, slot: Slot) -> None:
        """One run more whose times are known."""
        self._runs[slot.policy, slot.lane] += 1

    def on_lost(self, server: Server, device: str) -> None:
        """Lanes that are left take over at once; new plans follow."""
        self._tell(server, Lost(device))
        if not server.can_serve(self.monitor.current):
            others = [name for name in server.policies if server.can_serve(name)]
            if others:
                server.switch(others[0])

    def _tell(self, server: Server, event: Event) -> None:
        for action in self.monitor.observe(server.now_s, event):
            self._carry_out(server, action)

    def _carry_out(self, server: Server, action: Action) -> None:
        kind = action.decision.kind
        if kind is DecisionKind.SWITCH and server.can_serve(action.decision.policy):
            server.switch(action.decision.policy)
        elif kind is DecisionKind.REBALANCE:
            self._rebalance(server, action)
        elif kind is DecisionKind.REPLAN and self.replan is not None:
            server.at(server.now_s + self.replan_s, lambda: self._adopt(server, action))
        server.decisions.append(action.decision)

    def _rebalance(self, server: Server, action: Action) -> None:
        assert action.factors is not None, "a rebalance comes with factors"
        policy, rates = server.current, action.rates_per_s
        lanes = tuple(
            replace(lane, rate_per_s=rate) for lane, rate in zip(policy.plan.lanes, rates, strict=True)
        )
        plan = replace(policy.plan, lanes=lanes, lane_table=())
        if self._is_better(server, policy.plan, plan, action.factors):
            server.adopt([Policy(policy.name, plan, server.shop)], policy.name)

    def _is_better(self, server: Server, old: Plan, new: Plan, factors: Factors) -> bool:
        return gain_of(old, new, corrected_costs(old, factors), server.demand) >= LEAST_GAIN

    def _adopt(self, server: Server, action: Action) -> None:
        assert self.replan is not None, "only a replan is adopted"
        assert action.factors is not None, "a replan comes with factors"
        try:
            plans = self.replan(action.factors, action.without)
        except TesseraError as error:  # the old plans run on: a failed replan is told, and loses nothing
            self._tell(server, Adopted((), f"no new plans: {error.message}"))
            return
        if not action.without:
            plans = [self._better(server, name, plan, action.factors) for name, plan in plans]
        made = [Policy(name, plan, server.shop) for name, plan in plans]
        figures = capabilities(made, server.demand)
        num = sum(policy.plan.lanes != server.policies[policy.name].plan.lanes for policy in made)
        self._tell(
            server, Adopted(figures, f"{num} of {len(made)} plans are new; the others stay as they are")
        )
        server.adopt(made, self.monitor.current)
        server.open_slots()

    def _better(self, server: Server, name: str, new: Plan, factors: Factors) -> tuple[str, Plan]:
        """The new plan, or the old one with costs that are right."""
        old = server.policies[name].plan
        if self._is_better(server, old, new, factors):
            return name, new
        return name, replace(old, costs=new.costs)
