"""compare and adapt: the same arrivals through several plans, each on its own, or with a monitor choosing.

Plans that are compared may be for different devices; each is timed by its own costs (with the same mispricing
of kernel types where there is noise). Plans that a monitor chooses among share devices, work and costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.adapt import Capability, Monitor, MonitorConfig
from tessera.errors import ArrivalsError, MismatchError
from tessera.ir import Arrivals, Plan, ServingReport, need_one_batch
from tessera.simulate.adaptive import Adaptive, Replan
from tessera.simulate.capability import capabilities, capacity_per_s, check_limits
from tessera.simulate.metrics import Limit, report_of
from tessera.simulate.online import ServeConfig, Served, Server
from tessera.simulate.policy import Policy, Truth, Workshop
from tessera.simulate.seats import Demand, demand_of

NOTHING_ELSE, USUAL = ServeConfig(), MonitorConfig()


@dataclass(frozen=True)
class Setting:
    """Everything but the plans."""

    arrivals: Arrivals
    config: ServeConfig = NOTHING_ELSE
    limits: tuple[Limit, ...] = ()
    # Requests that share a slot; None: the captured batch.
    rows: int | None = None
    # Every kernel type is mispriced on every device by exp(noise * normal).
    noise: float = 0.0

    def demand(self, plan: Plan) -> Demand:
        """What the arrivals ask of a plan."""
        return demand_of(plan.unit, self.arrivals, self.rows)

    def check(self, plan: Plan) -> None:
        """Devices that are lost or slow are devices of the plan, at a time that comes; all is one batch."""
        need_one_batch(plan, "a simulation of arrivals")
        for device, second in (*self.config.losses, *((d, s) for d, s, _ in self.config.slowdowns)):
            if device not in plan.cluster.names:
                known = ", ".join(plan.cluster.names)
                raise ArrivalsError(f"the plan has no device '{device}'", f"Its devices: {known}.")
            if not 0.0 <= second < float("inf"):
                raise ArrivalsError(f"{device} cannot change at {second:g} s", "Give a time from zero on.")


def compare(plans: Sequence[tuple[str, Plan]], setting: Setting) -> tuple[ServingReport, ...]:
    """One report a plan."""
    return tuple(_alone(name, plan, setting) for name, plan in plans)


def _alone(name: str, plan: Plan, setting: Setting) -> ServingReport:
    setting.check(plan)
    policy = Policy(name, plan, Workshop(Truth(plan, setting.noise, setting.config.seed)))
    demand = setting.demand(plan)
    check_limits([policy], demand, setting.limits)
    served = Server([policy], demand, setting.config).run()
    notes = _failures(served.ledger.num_failed, "; a monitor would replan")
    capacity = capacity_per_s(policy, demand)
    return report_of(served, [policy], setting.arrivals, capacity, setting.limits, notes)


def _failures(num: int, remedy: str = "") -> tuple[str, ...]:
    return (
        (f"{num} requests were never served: every lane uses a device that is lost{remedy}",) if num else ()
    )


def policies_of(plans: Sequence[tuple[str, Plan]], setting: Setting) -> list[Policy]:
    """Plans for one machine; they must be for the same work, devices and costs."""
    first_name, first = plans[0]
    setting.check(first)
    shop = Workshop(Truth(first, setting.noise, setting.config.seed))
    for name, plan in plans[1:]:
        for what, same in (("devices", plan.cluster == first.cluster), ("costs", plan.costs == first.costs)):
            if not same:
                message = f"the plans '{first_name}' and '{name}' were made with different {what}"
                raise MismatchError(message, "Make both from the same traces, costs and devices.")
    return [Policy(name, plan, shop) for name, plan in plans]


def known_of(plans: Sequence[tuple[str, Plan]], setting: Setting) -> tuple[Capability, ...]:
    """What a monitor knows of plans beforehand: by their own costs, whatever the truth will be."""
    planned = policies_of(plans, Setting(setting.arrivals))
    return capabilities(planned, setting.demand(plans[0][1]), setting.config.seed)


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
    policies = policies_of(plans, setting)
    served = _watched(policies, setting, Adaptive(Monitor(known, watch), replan, replan_s))
    best = max(x.capacity_per_s for x in known)
    notes = _failures(served.ledger.num_failed)
    return report_of(served, policies, setting.arrivals, best, setting.limits, notes), known


def watched(
    plans: Sequence[tuple[str, Plan]],
    setting: Setting,
    known: Sequence[Capability],
    watch: MonitorConfig = USUAL,
) -> Served:
    """What happened to every request with a monitor choosing among plans."""
    return _watched(policies_of(plans, setting), setting, Adaptive(Monitor(tuple(known), watch)))


def _watched(policies: Sequence[Policy], setting: Setting, adaptive: Adaptive) -> Served:
    demand = setting.demand(policies[0].plan)
    check_limits(policies, demand, setting.limits)
    return Server(policies, demand, setting.config, adaptive).run()
