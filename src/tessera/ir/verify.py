"""Rules of every artifact, as sentences, checked when made and when read."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, permutations
from operator import mul
from typing import Any

from tessera.errors import RuleBroken
from tessera.ir.cluster import Cluster, Cost, Costs
from tessera.ir.graph import Graph, WorkUnit
from tessera.ir.plan import Free, Plan, Program, Recv, Run, Send
from tessera.ir.service import Role, ServicePlan
from tessera.ir.timeline import Arrivals, Timeline
from tessera.ir.trace import Access, BufferKind, Trace, View, item_bytes

# Sentence -> whether a record keeps it.
Rules = dict[str, Callable[[Any], bool]]
MAX_BYTES, MAX_COUNT = 2**48, 2**32
NAMED = (BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE)


def _name(numbers: Iterable[int], items: Sequence[Any]) -> bool:
    return all(0 <= number < len(items) for number in numbers)


def _unique(items: Iterable[Any]) -> bool:
    listed = list(items)
    return len(listed) == len(set(listed))


def _views(t: Trace) -> list[View]:
    return [*(v for x in t.launches for v in x.views), *(v for _, v in t.outputs)]


def _accesses(t: Trace) -> list[Access]:
    return [a for x in t.launches for a in x.accesses]


def _bad_view(t: Trace) -> str:
    named = [(f"launch {n}", launch.views) for n, launch in enumerate(t.launches)]
    for place, views in [*named, *((f"output {name}", [view]) for name, view in t.outputs)]:
        for view in views:
            if _name((view.buffer,), t.buffers) and not _lies_inside(view, t.buffers[view.buffer].size_bytes):
                strides = f"shape {_short(view.shape)}, strides {_short(view.stride)}"
                sizes = f"offset {_short(view.offset)}, {strides}"
                return f" ({place}: {view.dtype}, {sizes} of buffer {t.buffers[view.buffer].name})"
    return ""


def _lies_inside(view: View, size_bytes: int) -> bool:
    num = math.prod(view.shape)
    if min(view.offset, *view.shape, *view.stride, 0) < 0 or num > MAX_BYTES:
        return False
    last = view.offset + sum(map(mul, view.shape, view.stride)) - sum(view.stride)
    return not num or (last + 1) * item_bytes(view.dtype) <= size_bytes


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:60]}..."


def _is_error(cost: Cost) -> bool:
    return 0 <= cost.rel_error < math.inf


def _bad_cost(costs: Costs) -> str:
    for launch, row in enumerate(costs.costs):
        for device, cost in zip(costs.devices, row, strict=False):
            if not (cost.is_sane and _is_error(cost)):
                return f" (launch {launch} on {device.name}: {cost.us:g} us, error {cost.rel_error:g})"
        if len(row) != len(costs.devices):
            return f" (launch {launch}: {len(row)} costs for {len(costs.devices)} devices)"
    return ""


def _ends(program: Program, kind: type[Send] | type[Recv]) -> list[tuple[int, int]]:
    columns = enumerate(program.instructions)
    return sorted((i.transfer, d) for d, column in columns for i in column if isinstance(i, kind))


def _is_whole(plan: ServicePlan) -> bool:
    roles = {group.role for group in plan.groups}
    return Role.MIXED in roles or roles == {Role.PROMPTS, Role.ANSWERS}


RULES: dict[type, Rules] = {
    Trace: {
        "every launch runs a kernel of the trace": lambda t: _name((x.kernel for x in t.launches), t.kernels),
        "every view and access names a buffer of the trace": lambda t: (
            _name((v.buffer for v in _views(t)), t.buffers)
            and _name((a.buffer for a in _accesses(t)), t.buffers)
        ),
        "every view has as many strides as dimensions": lambda t: all(
            len(v.shape) == len(v.stride) for v in _views(t)
        ),
        f"every buffer has 0 to {MAX_BYTES:,} bytes": lambda t: all(
            0 <= b.size_bytes <= MAX_BYTES for b in t.buffers
        ),
        "every view lies inside its buffer": lambda t: all(
            _lies_inside(v, t.buffers[v.buffer].size_bytes) for v in set(_views(t))
        ),
        "every region has a positive size, with positive counts and strides": lambda t: all(
            a.region.item_bytes > 0 and all(n > 0 and stride > 0 for n, stride in a.region.dims)
            for a in _accesses(t)
        ),
        "every access reads, writes or updates something": lambda t: all(
            a.read or a.write or a.atomic for a in _accesses(t)
        ),
        "every access lies inside its buffer": lambda t: all(
            0 <= a.region.start and a.region.stop <= t.buffers[a.buffer].size_bytes for a in _accesses(t)
        ),
        "weights are never written": lambda t: all(
            not (a.write and t.buffers[a.buffer].kind is BufferKind.WEIGHT) for a in _accesses(t)
        ),
        "weights, inputs and state have unique names": lambda t: _unique(
            b.name for b in t.buffers if b.kind in NAMED
        ),
        "every undeclared alias was seen at least once": lambda t: all(times > 0 for _, times in t.aliases),
        "batch and context of the step are positive, and its numbers are possible": lambda t: (
            0 < min(t.step.batch, t.step.context)
            and 0 <= t.step.reserve
            and max(t.step.batch, t.step.context, t.step.reserve) <= MAX_COUNT
        ),
        "grids and blocks have possible sizes": lambda t: all(
            0 <= n <= MAX_COUNT for x in t.launches for n in (*x.grid, *x.block)
        ),
    },
    Graph: {
        "every edge points forward in the trace": lambda g: all(
            0 <= e.src < e.dst < len(g.trace.launches) for e in g.edges
        ),
        "every value is made before it is read": lambda g: all(
            v.producer is None or all(v.producer < r for r in v.readers) for v in g.values
        ),
        "every value names a buffer of the trace": lambda g: _name(
            (v.buffer for v in g.values), g.trace.buffers
        ),
        "every value lies inside its buffer": lambda g: all(
            0 <= v.start <= v.stop <= g.trace.buffers[v.buffer].size_bytes for v in g.values
        ),
        "every value is read by launches of the trace": lambda g: all(
            _name(v.readers, g.trace.launches) for v in g.values
        ),
        "every group is of launches of the trace": lambda g: all(
            _name(group, g.trace.launches) for group in g.groups
        ),
        "no launch is in two groups": lambda g: _unique(x for group in g.groups for x in group),
    },
    Cluster: {
        "a cluster has a device": lambda c: len(c.devices) > 0,
        "device names are unique": lambda c: _unique(c.names),
        "every link joins two different devices of the cluster": lambda c: all(
            x.src != x.dst and {x.src, x.dst} <= set(c.names) for x in c.links
        ),
        "every link has a positive bandwidth and a latency that is not negative": lambda c: all(
            0 < x.gbps < math.inf
            and 0 <= min(x.latency_us, x.fetch_gbps)
            and max(x.latency_us, x.fetch_gbps) < math.inf
            and 1 <= x.fetch_slowdown < math.inf
            for x in c.links
        ),
        "every two devices are joined in both directions": lambda c: (
            {(x.src, x.dst) for x in c.links} >= set(permutations(c.names, 2))
        ),
    },
    Costs: {
        "every launch is priced on every device": lambda c: all(len(r) == len(c.devices) for r in c.costs),
        "every time is finite, not negative and at most a day": lambda c: all(
            x.is_sane for row in c.costs for x in row
        ),
        "every relative error is finite and not negative": lambda c: all(
            _is_error(x) for row in c.costs for x in row
        ),
    },
    WorkUnit: {
        "a work unit has a step": lambda u: len(u.graphs) > 0,
        "every step has a multiplicity of at least one, and a possible one": lambda u: (
            len(u.counts) == len(u.graphs) and all(1 <= n <= MAX_COUNT for n in u.counts)
        ),
    },
    Plan: {
        "a plan has a lane": lambda p: len(p.lanes) > 0,
        "every launch of every step is placed in every lane": lambda p: all(
            [len(step) for step in lane.placement.devices] == [len(g.trace.launches) for g in p.graphs]
            for lane in p.lanes
        ),
        "every launch is placed on a device of the cluster": lambda p: all(
            _name(step, p.cluster.devices) for x in p.lanes for step in x.placement.devices
        ),
        "every fetched weight is kept by a CPU of the cluster": lambda p: (
            {host for x in p.lanes for _, host in x.placement.fetched}
            <= {n for n, device in enumerate(p.cluster.devices) if device.is_cpu}
        ),
        "launches that share state share a device": lambda p: all(
            len({step[x] for x in group}) == 1
            for lane in p.lanes
            for step, g in zip(lane.placement.devices, p.graphs, strict=True)
            for group in g.groups
        ),
        "there is one price list per step, made for that step's trace": lambda p: (
            [c.trace_digest for c in p.costs] == [g.trace.digest for g in p.graphs]
        ),
        "the price lists are for the cluster's devices": lambda p: all(
            c.devices == p.cluster.devices for c in p.costs
        ),
        "every lane has a rate above zero": lambda p: all(0 < lane.rate_per_s < math.inf for lane in p.lanes),
        "the plan does not exceed its bound": lambda p: p.throughput_per_s <= p.bound_per_s * (1 + 1e-6),
        "at least one request is in flight, and not too many": lambda p: 1 <= p.microbatches <= 2**20,
        "the lane table names lanes of the plan, and every lane, or is empty": lambda p: (
            not p.lane_table or set(p.lane_table) == set(range(len(p.lanes)))
        ),
    },
    Program: {
        "every launch runs on exactly one device": lambda p: _unique(
            i.launch for column in p.instructions for i in column if isinstance(i, Run)
        ),
        "every transfer has one sender and one receiver, at its own ends": lambda p: (
            _ends(p, Send) == [(n, t.src) for n, t in enumerate(p.transfers)]
            and _ends(p, Recv) == [(n, t.dst) for n, t in enumerate(p.transfers)]
        ),
        "every transfer joins two different devices": lambda p: all(t.src != t.dst for t in p.transfers),
        "nothing is used after it is freed": lambda p: all(
            _unique(i.buffer for i in column if isinstance(i, Free)) for column in p.instructions
        ),
    },
    ServicePlan: {
        "a service plan has a group": lambda s: len(s.groups) > 0,
        "every group has sequences and microbatches": lambda s: all(
            g.sequences >= 1 <= g.microbatches for g in s.groups
        ),
        "every group has one lane": lambda s: all(len(g.plan.lanes) == 1 for g in s.groups),
        "every group's plan has a home": lambda s: all(g.plan.home for g in s.groups),
        "every group has a step of tokens": lambda s: all(g.sizes for g in s.groups),
        "all groups have the same devices and links": lambda s: all(
            g.plan.cluster == s.cluster for g in s.groups
        ),
        "prompts are read and answers are produced": _is_whole,
        "lengths and limits of the load are above zero": lambda s: (
            min(s.load.prompt_tokens, s.load.output_tokens, s.load.tpot_ms or 1, s.load.ttft_ms or 1) > 0
        ),
        "every observed length is above zero": lambda s: all(
            prompt >= 1 <= output for prompt, output in s.load.lengths
        ),
    },
    Timeline: {
        "no span ends before it starts": lambda t: all(s.stop_us >= s.start_us for s in t.spans),
        "spans are sorted by start": lambda t: all(a.start_us <= b.start_us for a, b in pairwise(t.spans)),
        "no request completes before it arrives": lambda t: all(a <= b for _, a, b in t.requests),
    },
    Arrivals: {
        "arrival times are ascending, finite and not negative": lambda a: (
            all(0.0 <= t < float("inf") for t in a.times_s) and all(x <= y for x, y in pairwise(a.times_s))
        ),
        "every request has a prompt and an answer length, or none has": lambda a: (
            len(a.prompts) == len(a.outputs) and len(a.prompts) in (0, len(a.times_s))
        ),
        "every length is at least one": lambda a: all(n >= 1 for n in (*a.prompts, *a.outputs)),
    },
}
# Nested records are verified first.
PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Graph: lambda g: (g.trace,),
    WorkUnit: lambda u: u.graphs,
    ServicePlan: lambda s: s.plans,
    Plan: lambda p: (p.cluster, p.unit, *p.costs),
}
PLACES: dict[type, Callable[[Any], str]] = {Costs: _bad_cost, Trace: _bad_view}
PASSED = "_has_passed"


def verify(record: Any) -> None:
    """Raises RuleBroken for the first. Records are frozen: one that passed is not read again."""
    passed: dict[str, Any] = getattr(record, "__dict__", {})
    if PASSED in passed:
        return
    for part in PARTS.get(type(record), lambda _: ())(record):
        verify(part)
    for sentence, holds in RULES[type(record)].items():
        if not holds(record):
            where = PLACES.get(type(record), lambda _: "")(record)
            raise RuleBroken(f"{type(record).__name__.lower()} breaks the rule: {sentence}{where}")
    passed[PASSED] = True
