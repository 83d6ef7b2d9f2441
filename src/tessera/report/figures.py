"""Figures that tables and pages share, all derived from a plan and so all modelled.

A mix of lanes is averaged by rate: "launches on a device" are those of an average work unit.
"""

from collections import Counter, defaultdict

from tessera.ir import Baseline, BufferKind, Lane, Objective, Plan, Step
from tessera.report.kernels import kernel_class


def shares(plan: Plan) -> tuple[float, ...]:
    """Fraction of the work units that follow each lane."""
    total = sum(lane.rate_per_s for lane in plan.lanes)
    return tuple(lane.rate_per_s / total for lane in plan.lanes)


def main_lane(plan: Plan) -> int:
    """The lane that most work follows."""
    return max(range(len(plan.lanes)), key=lambda n: plan.lanes[n].rate_per_s)


def step_title(step: Step) -> str:
    """One step in words."""
    return f"{step.kind}, batch {step.batch}, context {step.context}"


def step_us(plan: Plan, lane: Lane, step: int) -> tuple[float, ...]:
    """Busy time of each device in one run of one step along a lane."""
    busy = [0.0] * len(plan.cluster.devices)
    for launch, device in enumerate(lane.placement.devices[step]):
        busy[device] += plan.costs[step].us(launch, device)
    return tuple(busy)


def launches_on(plan: Plan) -> tuple[float, ...]:
    """Launches of an average work unit that each device runs."""
    placed = [0.0] * len(plan.cluster.devices)
    for share, lane in zip(shares(plan), plan.lanes, strict=True):
        for count, devices in zip(plan.unit.counts, lane.placement.devices, strict=True):
            for device, num in Counter(devices).items():
                placed[device] += share * count * num
    return tuple(placed)


def modelled_utilisation(plan: Plan) -> tuple[float, ...]:
    """Fraction of the time each device is busy when every lane runs at its rate."""
    busy = [0.0] * len(plan.cluster.devices)
    for lane in plan.lanes:
        for step, count in enumerate(plan.unit.counts):
            for device, us in enumerate(step_us(plan, lane, step)):
                busy[device] += lane.rate_per_s * count * us / 1e6
    return tuple(busy)


def weight_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of weights that each device reads in any lane; steps share weights of the same name."""
    held: list[dict[str, int]] = [{} for _ in plan.cluster.devices]
    for lane in plan.lanes:
        for graph, devices in zip(plan.unit.graphs, lane.placement.devices, strict=True):
            for launch, device in zip(graph.trace.launches, devices, strict=True):
                for access in launch.accesses:
                    buffer = graph.trace.buffers[access.buffer]
                    if buffer.kind is BufferKind.WEIGHT:
                        held[device][buffer.name] = buffer.size_bytes
    return tuple(sum(names.values()) for names in held)


def best_baseline(plan: Plan) -> Baseline | None:
    """The baseline that is best at what the plan was made for."""
    if plan.objective is Objective.LATENCY:
        quick = [b for b in plan.baselines if b.latency_us is not None and b.latency_us > 0]
        return min(quick, key=lambda b: b.latency_us or 0.0, default=None)
    many = [b for b in plan.baselines if b.throughput_per_s is not None and b.throughput_per_s > 0]
    return max(many, key=lambda b: b.throughput_per_s or 0.0, default=None)


def gain(plan: Plan, throughput_per_s: float | None, latency_us: float | None) -> float | None:
    """How many times as good as the best baseline, by the plan's objective; above 1 is better."""
    best = best_baseline(plan)
    if best is None:
        return None
    if plan.objective is Objective.LATENCY:
        return best.latency_us / latency_us if best.latency_us and latency_us else None
    return throughput_per_s / best.throughput_per_s if best.throughput_per_s and throughput_per_s else None


def class_times(plan: Plan) -> dict[str, tuple[float, tuple[float, ...], tuple[float, ...]]]:
    """Class -> launches, time placed on each device, time if all of it ran on each; per work unit."""
    num = len(plan.cluster.devices)
    launches: dict[str, float] = defaultdict(float)
    placed: dict[str, list[float]] = defaultdict(lambda: [0.0] * num)
    alone: dict[str, list[float]] = defaultdict(lambda: [0.0] * num)
    for step, graph in enumerate(plan.unit.graphs):
        count, costs = plan.unit.counts[step], plan.costs[step]
        for index, launch in enumerate(graph.trace.launches):
            name = kernel_class(graph.trace.kernels[launch.kernel], launch.scope)
            launches[name] += count
            for device in range(num):
                alone[name][device] += count * costs.us(index, device)
            for share, lane in zip(shares(plan), plan.lanes, strict=True):
                device = lane.placement.devices[step][index]
                placed[name][device] += share * count * costs.us(index, device)
    order = sorted(launches, key=lambda name: -sum(placed[name]))
    return {name: (launches[name], tuple(placed[name]), tuple(alone[name])) for name in order}
