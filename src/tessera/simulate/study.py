"""compare and adapt: the same arrivals through several plans, each on its own, or with a monitor choosing.

Plans that are compared may be for different devices; each is timed by its own costs (with the same mispricing
of kernel types where there is noise). Plans that a monitor chooses among share devices, work and costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.adapt.capability import Capability
from tessera.adapt.monitor import Monitor, MonitorConfig
from tessera.errors import ArrivalsError, MismatchError
from tessera.ir import Arrivals, Plan, ServingReport, need_one_batch
from tessera.simulate.adaptive import AdaptiveServer, Replan
from tessera.simulate.capability import capabilities, capacity_per_s, check_limits
from tessera.simulate.metrics import LatencyLimit, report_of
from tessera.simulate.online import SimulatedRun, SimulatedServer
from tessera.simulate.rows import Demand, demand_of
from tessera.simulate.stepper import FAIR, Truth, Weather

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
