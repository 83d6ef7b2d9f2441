"""What cannot be planned, refused in one sentence with its place and remedy."""

import math

import numpy as np
import numpy.typing as npt

from tessera import ir
from tessera.errors import MismatchError, PlanInfeasible, RuleBroken


def check(unit: ir.WorkUnit, costs: tuple[ir.Costs, ...], cluster: ir.Cluster) -> None:
    """Refuses what cannot be planned, with the place and the remedy."""
    _check_links(cluster)
    ir.verify(cluster)
    ir.verify(unit)
    if unit.num_launches == 0:
        raise PlanInfeasible("the work unit has no launches", "Capture a step that launches a kernel.")
    if len(costs) != len(unit.graphs):
        raise MismatchError(f"{len(unit.graphs)} steps but {len(costs)} price lists", "Give one per step.")
    for step, (graph, listed) in enumerate(zip(unit.graphs, costs, strict=True)):
        _check_costs(f"costs of step {step} ({graph.trace.step.kind})", graph.trace, listed, cluster)


def _check_links(cluster: ir.Cluster) -> None:
    """The rules of links, with the name of the one that breaks them."""
    for link in cluster.links:
        if not (math.isfinite(link.gbps) and link.gbps > 0):
            message = f"the link from {link.src} to {link.dst} carries {link.gbps} GB/s"
            raise RuleBroken(message, "A link has a positive bandwidth; name one with --link.")
        if not (math.isfinite(link.latency_us) and link.latency_us >= 0):
            message = f"the link from {link.src} to {link.dst} has a latency of {link.latency_us} us"
            raise RuleBroken(message, "A latency is finite and not negative; name a link with --link.")
    joined = {(link.src, link.dst) for link in cluster.links}
    for src in cluster.names:
        for dst in cluster.names:
            if src != dst and (src, dst) not in joined:
                message = f"no link leads from {src} to {dst}"
                raise RuleBroken(message, "Every two devices are joined in both directions.")


def _check_costs(place: str, trace: ir.Trace, costs: ir.Costs, cluster: ir.Cluster) -> None:
    remedy = "Make them again with `tessera profile`."
    if costs.devices != cluster.devices:
        theirs, ours = ", ".join(d.name for d in costs.devices), ", ".join(cluster.names)
        raise MismatchError(f"priced for devices {theirs}; the cluster has {ours}", remedy, place)
    if costs.trace_digest != trace.digest:
        raise MismatchError("these are the costs of another trace", remedy, place)
    if len(costs.costs) != len(trace.launches):
        message = f"{len(costs.costs)} launches are priced; the trace has {len(trace.launches)}"
        raise MismatchError(message, remedy, place)
    for launch, row in enumerate(costs.costs):
        if len(row) != len(costs.devices):
            raise MismatchError(f"launch {launch} is not priced on every device", remedy, place)
        for device, cost in zip(cluster.names, row, strict=True):
            if not cost.is_sane:
                name = trace.kernel_of(launch).name
                message = f"launch {launch} ({name}) costs {cost.us} us on {device}"
                limits = "A cost is finite, not negative and at most a day."
                raise RuleBroken(message, f"{limits} {remedy}", place)


def check_load(load: npt.NDArray[np.float64], cluster: ir.Cluster) -> None:
    """load[node, device]: some work must cost something wherever it runs."""
    if load.min(axis=1).sum() == 0:
        message = f"every launch costs nothing on {' or '.join(cluster.names)}, so no rate is too high"
        raise PlanInfeasible(message, "Price the traces again.")
