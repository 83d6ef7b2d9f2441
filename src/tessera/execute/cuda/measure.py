"""measure: costs of the launches of a work unit on each device, timed in place inside the step.

A step runs once plain and once with a stamp before and after every launch: launch = max(stamped - b, FLOOR),
with b such that the launches add up to the plain step (`without_stamps`). Figures are medians; the error is
half the interquartile range, at least 1 %. Parts of one card are timed while the others do the same.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from tessera import ir
from tessera.execute.cuda.graphs import DeviceGraphs
from tessera.execute.cuda.pace import ENDED, STARTED, TimeScale, choose_scale
from tessera.execute.cuda.share import ShareGraph
from tessera.execute.lower import lower
from tessera.execute.memory import bytes_of
from tessera.execute.messages import Setup
from tessera.execute.offline import Request
from tessera.kernels.tensors import flat_bytes

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")
FLOOR_US = 0.5
REPEATS = 15
BESIDE = 9
PAUSE_US = 2000.0
# The GPU sleeps before a timed replay, so that the launch is queued when the clock starts.
SLEEP_CYCLES = 200_000


@dataclass(frozen=True)
class StepTimes:
    whole_us: float
    stamp_us: float
    # (microseconds, relative error)
    launches: tuple[tuple[float, float], ...]


def whole_plan(unit: ir.WorkUnit, cluster: ir.Cluster, device: int) -> ir.Plan:
    placement = ir.Placement(tuple((device,) * len(g.trace.launches) for g in unit.graphs))
    return ir.Plan(
        unit, cluster, (), ir.Objective.LATENCY, "single", (ir.Lane(placement, 1.0),), 1, 0.0, 0.0, 0.0, 0.0
    )


class UnitOnDevice:
    def __init__(
        self, unit: ir.WorkUnit, cluster: ir.Cluster, device: int, weights: Tensors, is_profiled: bool = False
    ) -> None:
        self.unit, self.device = unit, device
        setup = Setup(device, cluster, (), (), 1, is_profiled=is_profiled, weights=dict(weights))
        self._graphs = DeviceGraphs(setup)
        self._graphs.add_steps([g.trace for g in unit.graphs])
        self._numbers = self._graphs.add(lower(whole_plan(unit, cluster, device))[0], (0,))

    def __enter__(self) -> "UnitOnDevice":
        while self._graphs.capture_next():
            pass
        return self

    def __exit__(self, *exc: object) -> None:
        self._graphs.close()

    @property
    def ordinal(self) -> int:
        return self._graphs.device.ordinal

    @property
    def stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = self._graphs.buffers[0].origin
        return stream

    def graph(self, step: int) -> ShareGraph:
        graph = self._graphs.graph(0, self._numbers[step])
        assert graph is not None, "a step has launches, and all of them are here"
        return graph

    def run(self, request: Request) -> list[dict[str, torch.Tensor]]:
        room, outputs = self._graphs.buffers[0], list[dict[str, torch.Tensor]]()
        state = {name: storage for (_, name, _), storage in self._graphs.state.by_microbatch.items()}
        with torch.no_grad(), torch.cuda.stream(self.stream):
            for name, tensor in request.state().items():
                if name in state:
                    _put(state[name], tensor)
            for step, count in enumerate(self.unit.counts):
                for run in range(count):
                    inputs = request.inputs(step, run, outputs[-1] if outputs else {})
                    arena = room.arenas[step]
                    for name in arena.places.keys() & inputs.keys():
                        _put(arena.storage(name), inputs[name])
                    places = self.graph(step).replay()
                    outputs.append({name: tensor.clone() for name, tensor in places.items()})
            self.stream.synchronize()
        return outputs

    def state(self) -> dict[str, torch.Tensor]:
        held = self._graphs.state.by_microbatch
        return {name: bytes_of(s, 0, s.nbytes()).clone() for (_, name, _), s in held.items()}


def _put(storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
    bytes_of(storage, 0, storage.nbytes()).copy_(flat_bytes(tensor)[: storage.nbytes()])


def measure(
    unit: ir.WorkUnit, cluster: ir.Cluster, weights: Tensors, request: Request
) -> tuple[tuple[ir.Costs, ...], list[list[StepTimes]]]:
    """Costs of every step, and times[device][step]. Devices must not be dilated."""
    devices = range(len(cluster.devices))
    whole, samples = _timed(unit, cluster, weights, request)
    steps = range(len(unit.graphs))
    times = [[without_stamps(whole[d][step], samples[d][step]) for step in steps] for d in devices]
    costs = tuple(
        _costs(graph.trace.digest, cluster, [device_times[step] for device_times in times])
        for step, graph in enumerate(unit.graphs)
    )
    return costs, times


def scale_of(plan: ir.Plan, weights: Tensors, request: Request) -> TimeScale:
    """1 if no device is dilated."""
    devices = plan.cluster.devices
    if not any(d.is_dilated for d in devices):
        return TimeScale(1.0, 1.0)
    first = devices[0]
    card = ir.Cluster(
        (ir.Device(f"cuda:{first.ordinal}", ir.DeviceKind.CUDA, "", 0, ordinal=first.ordinal),), ()
    )
    card_costs, _ = measure(plan.unit, card, weights, request)
    sharing = max(sum(d.ordinal == o for d in devices) for o in {d.ordinal for d in devices})
    targets = [[c.us for c in row] for costs in plan.costs for row in costs.costs]
    return choose_scale(targets, [row[0].us for costs in card_costs for row in costs.costs], sharing)


def without_stamps(whole_us: float, samples: Sequence[Sequence[float]]) -> StepTimes:
    raw = [statistics.median(row) for row in samples]
    low, high = 0.0, max(raw, default=0.0)
    for _ in range(50):
        middle = (low + high) / 2
        if sum(max(us - middle, FLOOR_US) for us in raw) > whole_us:
            low = middle
        else:
            high = middle
    times_us = [max(us - low, FLOOR_US) for us in raw]
    factor = whole_us / sum(times_us) if times_us else 1.0
    errors = [_spread(row) / max(us, FLOOR_US) for row, us in zip(samples, times_us, strict=True)]
    launches = tuple((us * factor, max(0.01, error)) for us, error in zip(times_us, errors, strict=True))
    return StepTimes(whole_us, low, launches)


def _spread(row: Sequence[float]) -> float:
    if len(row) < 4:
        return 0.0
    low, _, high = statistics.quantiles(row, n=4)
    return (high - low) / 2


def _costs(digest: str, cluster: ir.Cluster, times: Sequence[StepTimes]) -> ir.Costs:
    rows = zip(*(t.launches for t in times), strict=True)
    priced = tuple(tuple(ir.Cost(us, ir.Source.MEASURED, error) for us, error in row) for row in rows)
    costs = ir.Costs(digest, cluster.devices, priced)
    ir.verify(costs)
    return costs


def _timed(
    unit: ir.WorkUnit, cluster: ir.Cluster, weights: Tensors, request: Request
) -> tuple[list[list[float]], list[list[list[list[float]]]]]:
    """(step, samples of launches), beside the other devices of the card, each [device][step]."""
    devices, steps = range(len(cluster.devices)), range(len(unit.graphs))

    @contextmanager
    def opened(is_profiled: bool) -> Iterator[list[UnitOnDevice]]:
        units = [UnitOnDevice(unit, cluster, d, weights, is_profiled) for d in devices]
        with ExitStack() as stack:
            for one in units:
                stack.enter_context(one).run(request)
            yield units

    with opened(is_profiled=False) as plain:
        alone = [[replay_us(plain[d], step, REPEATS) for step in steps] for d in devices]
        load = [CardLoad(plain, d, alone) for d in devices]
        whole = [
            [replay_us(plain[d], n, BESIDE, load[d]) if load[d].others else alone[d][n] for n in steps]
            for d in devices
        ]
    with opened(is_profiled=True) as stamped:
        load = [CardLoad(stamped, d, alone) for d in devices]
        samples = [[_samples(stamped[d], step, load[d]) for step in steps] for d in devices]
    return whole, samples


class CardLoad:
    def __init__(
        self, all_devices: Sequence[UnitOnDevice], device: int, alone_us: Sequence[Sequence[float]]
    ) -> None:
        self._alone_us, self._device = alone_us, device
        ordinal = all_devices[device].ordinal
        self.others = [one for one in all_devices if one.device != device and one.ordinal == ordinal]

    def keep_busy(self, step: int, repeats: int) -> None:
        """Queues 1.5 times as much work as the repeats of a step take."""
        wanted_us = 1.5 * repeats * (self._alone_us[self._device][step] + PAUSE_US)
        for other in self.others:
            counts = other.unit.counts
            unit_us = sum(self._alone_us[other.device][s] * count for s, count in enumerate(counts))
            with torch.cuda.stream(other.stream):
                for _ in range(math.ceil(wanted_us / max(unit_us, 1.0))):
                    for number, count in enumerate(counts):
                        for _ in range(count):
                            other.graph(number).replay()


def _replays(
    whole: UnitOnDevice, step: int, repeats: int, load: CardLoad | None, replay: Callable[[ShareGraph], T]
) -> list[T]:
    graph = whole.graph(step)
    if load is not None:
        load.keep_busy(step, repeats)
    with torch.cuda.stream(whole.stream):
        results = [replay(graph) for _ in range(repeats)]
    if load is not None:
        torch.cuda.synchronize()
    return results


def replay_us(whole: UnitOnDevice, step: int, repeats: int = REPEATS, load: CardLoad | None = None) -> float:
    def timed(graph: ShareGraph) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3

    return statistics.median(_replays(whole, step, repeats, load, timed))


def _samples(whole: UnitOnDevice, step: int, load: CardLoad) -> list[list[float]]:
    def stamps(graph: ShareGraph) -> list[float]:
        graph.replay()
        whole.stream.synchronize()
        rows = graph.records.cpu()[: len(graph.trace.launches)]
        return ((rows[:, ENDED] - rows[:, STARTED]).double() / 1e3).tolist()

    rows = _replays(whole, step, BESIDE if load.others else REPEATS, load, stamps)
    return [list(row) for row in zip(*rows, strict=True)]
