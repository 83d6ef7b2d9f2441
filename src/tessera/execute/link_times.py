"""Transfer times between two devices over a transport, from plans run on their workers.

A chain of launches runs on one device and alternating between both; the difference over the crossings is the
time of a transfer. Two chains at once load both directions.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

import torch

from tessera import ir
from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.stepper import StepCall, StepDone
from tessera.execute.timing import threads
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir.host import cache_bytes

# Lanes of the microbatches: two run the chain on one device, two alternate.
WHOLE_OR_NOT = (0, 0, 1, 1)
LAUNCHES = 16
FETCHED_BYTES = 64 << 20
# Sources of copies, and copies in a queue at most.
NUM_FETCHED, MAX_FETCHES = 16, 100
# Least and most weights of products; their size over that of the cache.
WEIGHT, NUM_WEIGHTS, CACHES = (4096, 4096), (16, 64), 8
REPEATS, PRODUCTS_S = 3, 0.03
CROSSINGS = LAUNCHES - 1
WARMUPS = 2
BYTES_PER_SIZE, MIN_REPEATS, MAX_REPEATS = 512 << 20, 5, 25
TIMEOUT_S = 60.0
LEAST_US = 0.1


@dataclass(frozen=True, slots=True)
class TransferTimes:
    alone: tuple[tuple[int, float], ...]
    both: tuple[tuple[int, float], ...]


def time_transfers(
    a: ir.Device,
    b: ir.Device,
    transport: str,
    sizes: Sequence[int],
    build_graph: Callable[[ir.Trace], ir.Graph],
) -> TransferTimes:
    a, b = (replace(device, is_dilated=False) for device in (a, b))  # the real link is measured
    graphs = tuple(build_graph(chain(size)) for size in sizes)
    turns = tuple(n % 2 for n in range(LAUNCHES))
    lanes = [ir.Lane(ir.Placement((place,) * len(sizes)), 1.0) for place in ((0,) * LAUNCHES, turns)]
    links = tuple(ir.Link(x.name, y.name, "measured", 1.0, 1.0) for x, y in ((a, b), (b, a)))
    unit, cluster = ir.WorkUnit(graphs, (1,) * len(sizes)), ir.Cluster((a, b), links)
    work = (unit, cluster, (), ir.Objective.LATENCY, "links", tuple(lanes))
    plan = ir.Plan(*work, len(WHOLE_OR_NOT), 0.0, 0.0, 0.0, 0.0, lane_table=WHOLE_OR_NOT)
    alone, both = list[tuple[int, float]](), list[tuple[int, float]]()
    workers = WorkerStepper([plan], {}, transport=transport, timeout_s=TIMEOUT_S)
    with workers as stepper:
        for microbatch, lane in enumerate(WHOLE_OR_NOT):
            stepper.open(microbatch, lane)
        for step, size in enumerate(sizes):
            repeats = min(MAX_REPEATS, max(MIN_REPEATS, BYTES_PER_SIZE // size // CROSSINGS))
            alone.append((size, _crossing_us(stepper, step, repeats, 1)))
            both.append((size, max(_crossing_us(stepper, step, repeats, 2), alone[-1][1])))
    return TransferTimes(tuple(alone), tuple(both))


def time_fetches(ordinal: int, num_threads: int) -> tuple[float, float]:
    """GB/s of weights fetched from page-locked memory beside the CPU's products, and their slowdown."""
    sources = driver.pinned((NUM_FETCHED, FETCHED_BYTES))
    place = torch.empty_like(sources[0], device=driver.card(ordinal))
    one = torch.full(WEIGHT, 0.01, dtype=torch.bfloat16)
    least, most = NUM_WEIGHTS
    weights = [one.clone() for _ in range(min(most, max(least, CACHES * cache_bytes() // one.nbytes)))]
    x = torch.ones(1, WEIGHT[1], dtype=torch.bfloat16)

    def fetch_s(num: int) -> float:
        with torch.cuda.device(ordinal):
            stream = torch.cuda.current_stream()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for number in range(num):
                source = sources[number % NUM_FETCHED]
                driver.fetch(stream, place.data_ptr(), source.data_ptr(), FETCHED_BYTES)
            stop.record()
            stop.synchronize()
        return max(1e-9, 1e-3 * float(start.elapsed_time(stop)) / num)

    def product_s() -> float:
        num, began_s = 0, time.perf_counter()
        while not num or time.perf_counter() - began_s < PRODUCTS_S:
            torch.nn.functional.linear(x, weights[num % len(weights)])
            num += 1
        return (time.perf_counter() - began_s) / num

    with threads(num_threads), ThreadPoolExecutor(1) as beside:
        alone_s = median(product_s() for _ in range(REPEATS))
        num = min(MAX_FETCHES, 1 + int(REPEATS * PRODUCTS_S / fetch_s(NUM_FETCHED)))
        fetched = beside.submit(fetch_s, num)
        beside_s = median(product_s() for _ in range(REPEATS))
    return FETCHED_BYTES / fetched.result() / 1e9, max(1.0, beside_s / alone_s)


def _crossing_us(stepper: WorkerStepper, step: int, repeats: int, num: int) -> float:
    """Whole and split chains alternate to cancel drift."""
    whole, divided = WHOLE_OR_NOT.index(0), WHOLE_OR_NOT.index(1)
    pairs = [
        [_step_s(stepper, step, first, num) for first in (whole, divided)] for _ in range(WARMUPS + repeats)
    ]
    longer_s = median(divided_s - whole_s for whole_s, divided_s in pairs[WARMUPS:])
    return max(LEAST_US, longer_s * 1e6 / CROSSINGS)


def _step_s(stepper: WorkerStepper, step: int, first: int, num: int) -> float:
    began_s = stepper.now_s()
    for microbatch in range(first, first + num):
        stepper.start(StepCall(microbatch, step, {"x": torch.ones(1)}, skips=("y",)))
    for _ in range(num):
        event = stepper.take(2 * TIMEOUT_S)
        if not isinstance(event, StepDone):
            raise WorkerError(f"a worker that measures a link was lost: {event}", "Try again.")
    return stepper.now_s() - began_s


def chain(num_bytes: int) -> ir.Trace:
    """x -> -x -> x ..., each from the previous; the first repeats one number."""
    kinds = [ir.BufferKind.INPUT, *[ir.BufferKind.TEMPORARY] * (LAUNCHES - 1), ir.BufferKind.OUTPUT]
    names = ["x", *(f"t{n}" for n in range(1, LAUNCHES)), "y"]
    sizes = [4, *[num_bytes] * LAUNCHES]
    buffers = tuple(ir.Buffer(*each) for each in zip(names, kinds, sizes, strict=True))
    views = [ir.View(n, "float32", (num_bytes // 4,), (min(n, 1),)) for n in range(LAUNCHES + 1)]
    regions = [ir.Region(0, size) for size in sizes]
    touched = [
        (ir.Access(n, regions[n], read=True), ir.Access(n + 1, regions[n + 1], write=True))
        for n in range(LAUNCHES)
    ]
    launches = tuple(ir.Launch(0, (views[n],), (), (views[n + 1],), touched[n]) for n in range(LAUNCHES))
    kernel = ir.Kernel("aten.neg.default", ir.Origin.ATEN, "aten::neg(Tensor self) -> Tensor")
    return ir.Trace(
        ir.Step("chain", f"{num_bytes} bytes", 1, 1), (kernel,), buffers, launches, (("y", views[-1]),)
    )
