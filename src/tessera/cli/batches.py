"""Batch as a decision: the same steps recorded at several batches, planned each, compared by rows a second.

One plan has one batch. Lanes of unlike batches are possible where lanes share no device: each device by
itself, at the batch that suits its memory and speed. That is compared too, and said where it is better; it
takes one plan a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.cli.output import console
from tessera.errors import MismatchError, PlanInfeasible
from tessera.ir import Cluster, Costs, Objective, Plan, Trace, WorkUnit


@dataclass(frozen=True)
class Tried:
    """One batch: its prices, and its plan or why it has none."""

    batch: int
    unit: WorkUnit
    cluster: Cluster
    costs: tuple[Costs, ...]
    made: Plan | PlanInfeasible

    def figure(self, goal: Objective) -> float:
        """By the objective and per row of the batch; more is better, and no plan is worst."""
        made = self.made
        if isinstance(made, PlanInfeasible):
            return -1.0
        if goal is Objective.LATENCY:
            return 1.0 / made.latency_us
        if goal is Objective.COST and made.usd_per_1k_units:
            return self.batch / made.usd_per_1k_units
        if goal is Objective.ENERGY and made.joules_per_unit:
            return self.batch / made.joules_per_unit
        return self.batch * made.simulated_per_s

    def line(self) -> dict[str, Any]:
        """For machines."""
        if isinstance(self.made, PlanInfeasible):
            return {"batch": self.batch, "rows_per_s": None, "why": str(self.made)}
        rows = self.batch * self.made.simulated_per_s
        return {"batch": self.batch, "rows_per_s": rows, "latency_us": self.made.latency_us}


@dataclass(frozen=True, slots=True)
class Apart:
    """One device by itself at its best batch."""

    device: str
    batch: int
    rows_per_s: float


def by_batch(traces: Sequence[Trace]) -> list[list[Trace]]:
    """The traces of each batch, in the order given; every batch must have the same steps."""
    found: dict[int, list[Trace]] = {}
    for trace in traces:
        found.setdefault(trace.step.batch, []).append(trace)
    steps = {batch: [t.step.kind for t in group] for batch, group in found.items()}
    (first, kinds), *others = steps.items()
    for batch, other in others:
        if other != kinds:
            message = f"batch {first} has {', '.join(kinds)}; batch {batch} has {', '.join(other)}"
            raise MismatchError(message, "Capture the same steps at every batch.", "--batch-choices")
    return list(found.values())


def best(tried: Sequence[Tried], goal: Objective) -> Plan:
    """The plan of the best batch; PlanInfeasible if none has one."""
    made = max(tried, key=lambda t: t.figure(goal)).made
    if isinstance(made, PlanInfeasible):
        smallest = min(tried, key=lambda t: t.batch)
        raise PlanInfeasible(f"no batch fits; at batch {smallest.batch}: {smallest.made}")
    return made


def apart(tried: Sequence[Tried], slots: int) -> tuple[Apart, ...]:
    """Every device that can serve alone, at its best batch, with its part of the slots."""
    names = tried[0].cluster.names
    each = -(-slots // len(names))
    found = []
    for index in range(len(names)):
        rated = [alone for one in tried if (alone := _alone(one, index, each)) is not None]
        if rated:
            found.append(max(rated, key=lambda x: x.rows_per_s))
    return tuple(found)


def _alone(one: Tried, index: int, slots: int) -> Apart | None:
    from tessera.flow import make_plan

    device = one.cluster.devices[index]
    costs = [Costs(c.trace_digest, (device,), tuple((row[index],) for row in c.costs)) for c in one.costs]
    try:
        made = make_plan(one.unit, costs, Cluster((device,), ()), Objective.THROUGHPUT, slots, "single")
    except PlanInfeasible:
        return None
    return Apart(device.name, one.batch, one.batch * made.simulated_per_s)


def document(tried: Sequence[Tried], alone: Sequence[Apart]) -> dict[str, Any]:
    """For machines."""
    devices = [{"device": x.device, "batch": x.batch, "rows_per_s": x.rows_per_s} for x in alone]
    total = sum(x.rows_per_s for x in alone)
    return {"by_batch": [t.line() for t in tried], "apart": {"rows_per_s": total, "devices": devices}}


def show(tried: Sequence[Tried], alone: Sequence[Apart], goal: Objective) -> None:
    """For people."""
    out = console()
    for one in tried:
        rows = one.line()["rows_per_s"]
        text = str(one.made) if rows is None else f"{rows:.4g} rows/s (simulated)"
        out.print(f"batch {one.batch}: {text}", markup=False)
    total = sum(x.rows_per_s for x in alone)
    together = max(t.figure(Objective.THROUGHPUT) for t in tried)
    if goal is Objective.THROUGHPUT and total > together:
        listed = ", ".join(f"{x.device} at batch {x.batch}" for x in alone)
        text = (
            f"{total:.4g} rows/s (simulated) with the devices apart: {listed}. Plan each by itself for that."
        )
        out.print(text, markup=False)
