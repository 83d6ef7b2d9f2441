"""measure: what each launch of a work unit costs on each device, timed where it stands in the step.

A step is run whole on one device, once plain and once with a stamp before and after every launch. The stamps
cost the same everywhere, so what they add is found by asking that the launches together take as long as the
plain step: launch = max(stamped - b, FLOOR), with b such that the sum is right. Caches are as warm or cold as
in the real step. Numbers are medians; the error is half the distance between the quartiles, at least 1 %.

Parts of one card share its bandwidth and caches. So a part is timed while the others do the same work over
and over, which is how it is used when a plan keeps every device busy; what a launch costs beside other work
than that is not in these numbers.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.execute.cuda.captured import Captured, Kernels
from tessera.execute.cuda.engine import CudaEngine
from tessera.execute.cuda.spans import ENDED, STARTED
from tessera.execute.engine import Request
from tessera.ir import (
    Cluster,
    Cost,
    Costs,
    Lane,
    Objective,
    Placement,
    Plan,
    Program,
    Source,
    WorkUnit,
    verify,
)

Tensors = Mapping[str, torch.Tensor]
# No launch takes less, in microseconds.
FLOOR_US = 0.5
REPEATS = 15
# Fewer where others run beside.
BESIDE = 9
# Between two timed replays: the sleep, and what the CPU does.
PAUSE_US = 2000.0
# The GPU sleeps this long before a timed replay, so that the launch is queued when the clock starts.
SLEEP_CYCLES = 200_000


@dataclass(frozen=True)
class StepTimes:
    """One step on one device."""

    whole_us: float
    # What a stamped launch shows beyond its own time.
    stamp_us: float
    # Per launch: microseconds, and their relative error.
    launches: tuple[tuple[float, float], ...]
    # The step with the rest of the card idle; the same as `whole_us` where nobody shares the card.
    alone_us: float = 0.0


def whole_plan(unit: WorkUnit, cluster: Cluster, device: int) -> Plan:
    """Everything on one device, one request at a time."""
    placement = Placement(tuple((device,) * len(g.trace.launches) for g in unit.graphs))
    return Plan(
        unit, cluster, (), Objective.LATENCY, "single", (Lane(placement, 1.0),), 1, 0.0, 0.0, 0.0, 0.0
    )


def measure(
    unit: WorkUnit,
    cluster: Cluster,
    weights: Tensors,
    request: Request,
    kernels: Kernels | None = None,
) -> tuple[tuple[Costs, ...], list[list[StepTimes]]]:
    """Costs of every step, and the times behind them: times[device][step]. Devices must not be stretched."""
    num = len(cluster.devices)
    plans = [replace(whole_plan(unit, cluster, device), slots=num) for device in range(num)]
    alone, whole, samples = _timed(plans, weights, request, kernels)
    times = [
        [
            replace(reconcile(whole[d][step], samples[d][step]), alone_us=alone[d][step])
            for step in range(len(unit.graphs))
        ]
        for d in range(num)
    ]
    costs = tuple(
        _costs(graph.trace.digest, cluster, [device_times[step] for device_times in times])
        for step, graph in enumerate(unit.graphs)
    )
    return costs, times


def reconcile(whole_us: float, samples: Sequence[Sequence[float]]) -> StepTimes:
    """Times of launches out of stamped samples[launch], so that their sum is the whole step's."""
    raw = [statistics.median(row) for row in samples]
    low, high = 0.0, max(raw, default=0.0)
    for _ in range(50):
        middle = (low + high) / 2
        if sum(max(us - middle, FLOOR_US) for us in raw) > whole_us:
            low = middle
        else:
            high = middle
    own = [max(us - low, FLOOR_US) for us in raw]
    factor = whole_us / sum(own) if own else 1.0
    errors = [_spread(row) / max(us, FLOOR_US) for row, us in zip(samples, own, strict=True)]
    launches = tuple((us * factor, max(0.01, error)) for us, error in zip(own, errors, strict=True))
    return StepTimes(whole_us, low, launches)


def _spread(row: Sequence[float]) -> float:
    if len(row) < 4:
        return 0.0
    low, _, high = statistics.quantiles(row, n=4)
    return (high - low) / 2


def _costs(digest: str, cluster: Cluster, times: Sequence[StepTimes]) -> Costs:
    rows = zip(*(t.launches for t in times), strict=True)
    priced = tuple(tuple(Cost(us, Source.MEASURED, error) for us, error in row) for row in rows)
    costs = Costs(digest, cluster.devices, priced)
    verify(costs)
    return costs


def _timed(
    plans: Sequence[Plan], weights: Tensors, request: Request, kernels: Kernels | None
) -> tuple[list[list[float]], list[list[float]], list[list[list[list[float]]]]]:
    """(step alone, step beside the others, samples of launches beside the others), each [device][step]."""
    devices = range(len(plans))
    with Captured(plans, weights, kernels) as captured:
        _visit(captured, request)
        programs = [captured.programs[d][0] for d in devices]
        alone = [[replay_us(captured, 0, p, REPEATS) for p in programs[d]] for d in devices]
        around = [Around(captured, d, alone) for d in devices]
        whole = [
            [replay_us(captured, 0, p, BESIDE, around[d]) if around[d].others else alone[d][p.step]
             for p in programs[d]]
            for d in devices
        ]  # fmt: skip
    with Captured(plans, weights, kernels, is_profiled=True) as captured:
        _visit(captured, request)
        around = [Around(captured, d, alone) for d in devices]
        samples = [[_samples(captured, p, around[d]) for p in captured.programs[d][0]] for d in devices]
    return alone, whole, samples


def _visit(captured: Captured, request: Request) -> None:
    """Every plan runs a request in every slot, so that memory holds what it will hold."""
    num = captured.num_slots
    for plan in range(len(captured.plans)):
        CudaEngine(captured, keeps_results=False).run([request] * num, always(plan))


def always(plan: int) -> Callable[[int], int]:
    """Every request by the same plan."""
    return lambda number: plan


class Around:
    """Work for the other devices of a device's card: their own whole requests, one after the other."""

    def __init__(self, captured: Captured, device: int, alone_us: Sequence[Sequence[float]]) -> None:
        devices = captured.plans[0].cluster.devices
        self._captured, self._alone_us, self._device = captured, alone_us, device
        self.others = [
            d for d, o in enumerate(devices) if d != device and o.ordinal == devices[device].ordinal
        ]

    def keep_busy(self, step: int, repeats: int) -> None:
        """Queues as much as the repeats of a step take, and half as much again; returns at once."""
        wanted_us = 1.5 * repeats * (self._alone_us[self._device][step] + PAUSE_US)
        for slot, other in enumerate(self.others, 1):
            programs = self._captured.programs[other][0]
            unit_us = sum(self._alone_us[other][p.step] * p.count for p in programs)
            with torch.cuda.stream(self._captured.slots[slot].origin):
                for _ in range(math.ceil(wanted_us / max(unit_us, 1.0))):
                    for program in programs:
                        for _ in range(program.count):
                            self._captured.graph(slot, program).replay()


def replay_us(
    captured: Captured, slot: int, program: Program, repeats: int = REPEATS, around: Around | None = None
) -> float:
    """Median time of one program's graph in a slot, alone or beside other work."""
    graph, stream = captured.graph(slot, program), captured.slots[slot].origin
    times: list[float] = []
    if around is not None:
        around.keep_busy(program.step, repeats)
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
    if around is not None:
        torch.cuda.synchronize()
    return statistics.median(times)


def _samples(captured: Captured, program: Program, around: Around) -> list[list[float]]:
    """samples[launch] out of stamped replays."""
    graph, stream = captured.graph(0, program), captured.slots[0].origin
    samples: list[list[float]] = [[] for _ in graph.trace.launches]
    repeats = BESIDE if around.others else REPEATS
    around.keep_busy(program.step, repeats)
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            graph.replay()
            stream.synchronize()
            (records,) = graph.records.values()
            rows = records.cpu()
            for launch, row in enumerate(samples):
                row.append(int(rows[launch][ENDED] - rows[launch][STARTED]) / 1e3)
    torch.cuda.synchronize()
    return samples
