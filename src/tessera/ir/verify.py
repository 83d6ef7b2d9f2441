"""The rules of every artifact, as sentences. Each is checked after the stage that makes the artifact."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from tessera.errors import RuleBroken
from tessera.ir.cluster import Cluster, Cost, Costs
from tessera.ir.graph import Graph, WorkUnit
from tessera.ir.plan import Free, Plan, Program, Recv, Run, Send
from tessera.ir.timeline import ARRIVALS_RULES, Arrivals, Timeline
from tessera.ir.trace import BufferKind, Trace, View, item_bytes


def _steps(unit: WorkUnit) -> tuple[Any, ...]:
    """What a unit's steps are, and how often a row runs each, whatever their batch."""
    steps = tuple(g.trace.step for g in unit.graphs)
    runs = tuple(n * step.batch / unit.batch for n, step in zip(unit.counts, steps, strict=True))
    return (runs, tuple(replace(step, batch=1) for step in steps))


def _one_size(plan: Plan) -> bool:
    sizes: dict[str, int] = {}
    return all(
        sizes.setdefault(buffer.name, buffer.size_bytes) == buffer.size_bytes
        for graph in plan.graphs
        for buffer in graph.trace.buffers
        if buffer.kind is BufferKind.WEIGHT and not buffer.constant_hex
    )


PLAN_RULES: list[tuple[str, Callable[[Any], bool]]] = [
    ("a plan has a lane", lambda p: len(p.lanes) > 0),
    (
        "every lane follows a variant of the plan",
        lambda p: all(0 <= lane.variant < len(p.every_variant) for lane in p.lanes),
    ),
    (
        "the variants are the same steps at different batches",
        lambda p: (
            len({(v.batch, v.unit.prefill_batch) for v in p.every_variant}) == len(p.every_variant)
            and len({_steps(variant.unit) for variant in p.every_variant}) == 1
        ),
    ),
    (
        "with several variants, each is followed by a lane",
        lambda p: not p.variants or {lane.variant for lane in p.lanes} == set(range(len(p.every_variant))),
    ),
    ("a weight has one size in all variants", lambda p: not p.variants or _one_size(p)),
    (
        "every launch of every step is placed in every lane",
        lambda p: all(
            [len(step) for step in lane.placement.devices]
            == [len(g.trace.launches) for g in p.unit_of(lane).graphs]
            for lane in p.lanes
        ),
    ),
    (
        "every launch is placed on a device of the cluster",
        lambda p: all(
            0 <= d < len(p.cluster.devices)
            for lane in p.lanes
            for step in lane.placement.devices
            for d in step
        ),
    ),
    (
        "launches that share state share a device",
        lambda p: all(
            len({lane.placement.devices[s][x] for x in group}) == 1
            for lane in p.lanes
            for s, g in enumerate(p.unit_of(lane).graphs)
            for group in g.groups
        ),
    ),
    (
        "there is one price list per step, made for that step's trace",
        lambda p: all(
            [c.trace_digest for c in v.costs] == [g.trace.digest for g in v.unit.graphs]
            for v in p.every_variant
        ),
    ),
    (
        "the price lists are for the cluster's devices",
        lambda p: all(c.devices == p.cluster.devices for c in p.prices),
    ),
    ("every lane has a rate above zero", lambda p: all(0 < lane.rate_per_s < math.inf for lane in p.lanes)),
    ("the plan does not exceed its bound", lambda p: p.throughput_per_s <= p.bound_per_s * (1 + 1e-6)),
    ("at least one request is in flight, and not too many", lambda p: 1 <= p.microbatches <= 2**20),
    (
        "the lane table names lanes of the plan, and every lane, or is empty",
        lambda p: not p.lane_table or set(p.lane_table) == set(range(len(p.lanes))),
    ),
]


# (sentence, what must hold)
Rule = tuple[str, Callable[[Any], bool]]
# Of one buffer, or of a view's elements; of anything that is counted.
MAX_BYTES, MAX_COUNT = 2**48, 2**32


def _all(items: Iterable[bool]) -> bool:
    return all(items)


def _bad_view(t: Trace) -> str:
    """The first view that does not lie inside its buffer."""
    named = [(f"launch {n}", view) for n, launch in enumerate(t.launches) for view in launch.views]
    for place, view in [*named, *((f"output {name}", view) for name, view in t.outputs)]:
        if 0 <= view.buffer < len(t.buffers) and not _lies_inside(view, t.buffers[view.buffer].size_bytes):
            sizes = f"offset {_short(view.offset)}, shape {_short(view.shape)}, strides {_short(view.stride)}"
            return f" ({place}: {view.dtype}, {sizes} of buffer {t.buffers[view.buffer].name})"
    return ""


def _lies_inside(view: View, size_bytes: int) -> bool:
    if min((view.offset, *view.shape, *view.stride)) < 0 or view.num_elements > MAX_BYTES:
        return False
    last = view.offset + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride, strict=False))
    return not view.num_elements or (last + 1) * item_bytes(view.dtype) <= size_bytes


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:60]}..."


def _accesses_fit(t: Trace) -> bool:
    return _all(
        0 <= a.region.start and a.region.stop <= t.buffers[a.buffer].size_bytes
        for launch in t.launches
        for a in launch.accesses
    )


TRACE_RULES: list[Rule] = [
    (
        "every launch runs a kernel of the trace",
        lambda t: _all(0 <= x.kernel < len(t.kernels) for x in t.launches),
    ),
    (
        "every view and access names a buffer of the trace",
        lambda t: (
            _all(0 <= v.buffer < len(t.buffers) for x in t.launches for v in x.views)
            and _all(0 <= a.buffer < len(t.buffers) for x in t.launches for a in x.accesses)
            and _all(0 <= v.buffer < len(t.buffers) for _, v in t.outputs)
        ),
    ),
    (
        "every view has as many strides as dimensions",
        lambda t: _all(
            len(v.shape) == len(v.stride)
            for v in (*(v for x in t.launches for v in x.views), *(v for _, v in t.outputs))
        ),
    ),
    (
        f"every buffer has 0 to {MAX_BYTES:,} bytes",
        lambda t: _all(0 <= b.size_bytes <= MAX_BYTES for b in t.buffers),
    ),
    ("every view lies inside its buffer", lambda t: not _bad_view(t)),
    (
        "every region has a positive size, with positive counts and strides",
        lambda t: _all(
            a.region.item_bytes > 0 and _all(n > 0 and stride > 0 for n, stride in a.region.dims)
            for x in t.launches
            for a in x.accesses
        ),
    ),
    (
        "every access reads, writes or updates something",
        lambda t: _all(a.read or a.write or a.atomic for x in t.launches for a in x.accesses),
    ),
    ("every access lies inside its buffer", _accesses_fit),
    (
        "weights are never written",
        lambda t: _all(
            not (a.write and t.buffers[a.buffer].kind is BufferKind.WEIGHT)
            for x in t.launches
            for a in x.accesses
        ),
    ),
    (
        "weights, inputs and state have unique names",
        lambda t: _unique(
            b.name for b in t.buffers if b.kind in (BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE)
        ),
    ),
    ("every undeclared alias was seen at least once", lambda t: _all(times > 0 for _, times in t.aliases)),
    (
        "batch and context of the step are positive, and its numbers are possible",
        lambda t: (
            0 < t.step.batch <= MAX_COUNT
            and 0 < t.step.context <= MAX_COUNT
            and 0 <= t.step.reserve <= MAX_COUNT
        ),
    ),
    (
        "grids and blocks have possible sizes",
        lambda t: _all(0 <= n <= MAX_COUNT for x in t.launches for n in (*x.grid, *x.block)),
    ),
]

GRAPH_RULES: list[Rule] = [
    (
        "every edge points forward in the trace",
        lambda g: _all(0 <= e.src < e.dst < len(g.trace.launches) for e in g.edges),
    ),
    (
        "every value is made before it is read",
        lambda g: _all(v.producer is None or _all(v.producer < r for r in v.readers) for v in g.values),
    ),
    (
        "every value names a buffer of the trace",
        lambda g: _all(0 <= v.buffer < len(g.trace.buffers) for v in g.values),
    ),
    (
        "every value lies inside its buffer",
        lambda g: _all(0 <= v.start <= v.stop <= g.trace.buffers[v.buffer].size_bytes for v in g.values),
    ),
    (
        "every value is read by launches of the trace",
        lambda g: _all(0 <= r < len(g.trace.launches) for v in g.values for r in v.readers),
    ),
    (
        "every group is of launches of the trace",
        lambda g: _all(0 <= x < len(g.trace.launches) for group in g.groups for x in group),
    ),
    ("no launch is in two groups", lambda g: _unique(x for group in g.groups for x in group)),
]

CLUSTER_RULES: list[Rule] = [
    ("a cluster has a device", lambda c: len(c.devices) > 0),
    ("device names are unique", lambda c: _unique(c.names)),
    (
        "every link joins two different devices of the cluster",
        lambda c: _all(x.src != x.dst and x.src in c.names and x.dst in c.names for x in c.links),
    ),
    (
        "every link has a positive bandwidth and a latency that is not negative",
        lambda c: _all(
            x.gbps > 0 and x.latency_us >= 0 and math.isfinite(x.gbps + x.latency_us) for x in c.links
        ),
    ),
    (
        "every two devices are joined in both directions",
        lambda c: _all(
            a == b or any((x.src, x.dst) == (a, b) for x in c.links) for a in c.names for b in c.names
        ),
    ),
]

COSTS_RULES: list[Rule] = [
    ("every launch is priced on every device", lambda c: _all(len(r) == len(c.devices) for r in c.costs)),
    (
        "every time is finite, not negative and at most a day",
        lambda c: _all(x.is_sane for row in c.costs for x in row),
    ),
    (
        "every relative error is finite and not negative",
        lambda c: _all(_is_error(x) for row in c.costs for x in row),
    ),
]


def _is_error(cost: Cost) -> bool:
    return math.isfinite(cost.rel_error) and cost.rel_error >= 0


def _bad_cost(costs: Costs) -> str:
    """The first launch and device whose figures break a rule."""
    for launch, row in enumerate(costs.costs):
        for device, cost in zip(costs.devices, row, strict=False):
            if not (cost.is_sane and _is_error(cost)):
                return f" (launch {launch} on {device.name}: {cost.us:g} us, error {cost.rel_error:g})"
        if len(row) != len(costs.devices):
            return f" (launch {launch}: {len(row)} costs for {len(costs.devices)} devices)"
    return ""


UNIT_RULES: list[Rule] = [
    ("a work unit has a step", lambda u: len(u.graphs) > 0),
    (
        "every step has a multiplicity of at least one, and a possible one",
        lambda u: len(u.counts) == len(u.graphs) and _all(1 <= n <= MAX_COUNT for n in u.counts),
    ),
]


def _ends_meet(program: Program) -> bool:
    """Each transfer has one send, on its source, and one receive, on its destination."""
    sent: list[tuple[int, int]] = []
    received: list[tuple[int, int]] = []
    for device, column in enumerate(program.instructions):
        for i in column:
            if isinstance(i, Send):
                sent.append((i.transfer, device))
            elif isinstance(i, Recv):
                received.append((i.transfer, device))
    named = list(enumerate(program.transfers))
    return sorted(sent) == [(n, t.src) for n, t in named] and sorted(received) == [
        (n, t.dst) for n, t in named
    ]


PROGRAM_RULES: list[Rule] = [
    (
        "every launch runs on exactly one device",
        lambda p: _unique(i.launch for i in _flat(p) if isinstance(i, Run)),
    ),
    (
        "every transfer has one sender and one receiver, at its own ends",
        _ends_meet,
    ),
    ("every transfer joins two different devices", lambda p: _all(t.src != t.dst for t in p.transfers)),
    (
        "nothing is used after it is freed",
        lambda p: _all(_unique(i.buffer for i in column if isinstance(i, Free)) for column in p.instructions),
    ),
]

TIMELINE_RULES: list[Rule] = [
    ("no span ends before it starts", lambda t: _all(s.stop_us >= s.start_us for s in t.spans)),
    (
        "spans are sorted by start",
        lambda t: _all(a.start_us <= b.start_us for a, b in zip(t.spans, t.spans[1:], strict=False)),
    ),
    ("no request completes before it arrives", lambda t: _all(a <= b for _, a, b in t.requests)),
    (
        "every request has a weight above zero, or none has one",
        lambda t: not t.weights or (len(t.weights) == len(t.requests) and min(t.weights) > 0),
    ),
]

RULES: dict[type, list[Rule]] = {
    Trace: TRACE_RULES,
    Graph: GRAPH_RULES,
    Cluster: CLUSTER_RULES,
    Costs: COSTS_RULES,
    WorkUnit: UNIT_RULES,
    Plan: PLAN_RULES,
    Program: PROGRAM_RULES,
    Timeline: TIMELINE_RULES,
    Arrivals: ARRIVALS_RULES,
}
# Records inside a record are verified before it.
PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Graph: lambda g: (g.trace,),
    WorkUnit: lambda u: u.graphs,
    Plan: lambda p: (p.cluster, *(part for v in p.every_variant for part in (v.unit, *v.costs))),
}
# Where in a record a rule is broken; none: the rule says enough.
PLACES: dict[type, Callable[[Any], str]] = {Costs: _bad_cost, Trace: _bad_view}


def verify(record: Any) -> None:
    """Raises RuleBroken with the first rule that the record breaks."""
    for part in PARTS.get(type(record), lambda _: ())(record):
        verify(part)
    for sentence, holds in RULES[type(record)]:
        if not holds(record):
            where = PLACES.get(type(record), lambda _: "")(record)
            raise RuleBroken(f"{type(record).__name__.lower()} breaks the rule: {sentence}{where}")


def _flat(program: Program) -> Iterator[Any]:
    for column in program.instructions:
        yield from column


def _unique(items: Iterable[Any]) -> bool:
    listed = list(items)
    return len(listed) == len(set(listed))
