"""The rules of a plan, as sentences; `verify` checks them after those of its parts."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tessera.ir.graph import WorkUnit
from tessera.ir.plan import Plan
from tessera.ir.trace import BufferKind


def _steps(unit: WorkUnit) -> tuple[Any, ...]:
    """What a unit's steps are, whatever their batch."""
    return (unit.counts, tuple(replace(g.trace.step, batch=1) for g in unit.graphs))


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
        "the variants are the same steps at unlike batches",
        lambda p: (
            len({variant.batch for variant in p.every_variant}) == len(p.every_variant)
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
    ("at least one request is in flight, and not too many", lambda p: 1 <= p.slots <= 2**20),
    (
        "the lane table names lanes of the plan, and every lane, or is empty",
        lambda p: not p.lane_table or set(p.lane_table) == set(range(len(p.lanes))),
    ),
]
