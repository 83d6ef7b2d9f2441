"""The coarse policies that plans are compared with, each the candidate mixes of its kind.

single                     every request on one device
data-parallel              every request wholly on one device, shares in proportion to speed
prefill-decode             steps up to prefill on one device, decode steps on another
prefill-decode-fractional  the best mix of all whole-phase assignments
attention-ffn              attention scopes on one device, the rest on another
layer-pipeline             contiguous ranges of layers, the same in every step

A policy proposes several candidates where there are (both orientations of a split, say), or None where its
kind does not apply to the work. A mix that does not fit the devices' memory is never proposed.

A served unit has no phases: its steps read prompts and answers together, over pages that do not move.

A node that a coarse policy would tear apart (launches that share state, immovable launches) goes where
most of its work would go; strict prefill-decode does not apply then.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import permutations

import numpy as np

from tessera.plan.baselines.pipeline import orders, pipeline, two_stages
from tessera.plan.pricing import throughput
from tessera.plan.pricing.throughput import Pool
from tessera.plan.problem import Column, Labels, Mix, Problem, microbatch_counts, scopes

# Candidates of one kind that are worth judging.
KEEP = 2


def single(pool: Pool) -> tuple[Mix, ...] | None:
    """Everything on one device."""
    return _best(pool, _alone(pool.problem), pool.problem.num_devices)


def data_parallel(pool: Pool) -> tuple[Mix, ...] | None:
    """A replica on every device that can hold one."""
    columns = [c for c in _alone(pool.problem) if pool.able(c)]
    if not columns:
        return None
    speeds = [1.0 / float(c.busy_us.max()) for c in columns]
    mix = Mix(tuple(columns), tuple(s / sum(speeds) for s in speeds))
    if pool.fits(columns, microbatch_counts(mix, pool.microbatches)):
        return (mix,)
    # Where memory is short, a device has as many requests in flight as it can hold; one keeps it busy.
    rooms = [pool.problem.microbatches_that_fit(c) or 0 for c in columns]
    counts = [min(n, room) for n, room in zip(microbatch_counts(mix, pool.microbatches), rooms, strict=True)]
    return (replace(mix, microbatches=tuple(counts)),)


def prefill_decode(pool: Pool) -> tuple[Mix, ...] | None:
    """Strictly one device for each phase."""
    columns = _phase_columns(pool.problem)
    if columns is None:
        return None
    split = [c for (a, b), c in columns.items() if a != b]
    return _best(pool, split, KEEP)


def prefill_decode_fractional(pool: Pool) -> tuple[Mix, ...] | None:
    """Requests differ in which device does which of their phases."""
    columns = _phase_columns(pool.problem)
    if columns is None:
        return None
    mix = throughput.balanced(pool, columns.values())
    # By busy time it is the best; with few microbatches, which are whole numbers, simpler mixes of its kind
    # may be.
    simpler = (*(data_parallel(pool) or ()), *(prefill_decode(pool) or ()))
    return None if mix is None else (mix, *simpler)


def attention_ffn(pool: Pool) -> tuple[Mix, ...] | None:
    """Attention here, the rest there."""
    prob = pool.problem
    marks = scopes.attention(prob.unit)
    if marks is None or prob.num_devices < 2:
        return None
    side = prob.vote(tuple(m.astype(np.int64) for m in marks), 2)
    if side.min() == side.max():
        return None
    pairs = permutations(range(prob.num_devices), 2)
    return _best(pool, (prob.column(np.where(side == 1, a, b)) for a, b in pairs), KEEP)


def layer_pipeline(pool: Pool) -> tuple[Mix, ...] | None:
    """The best split of the layers into one contiguous range per device."""
    prob = pool.problem
    found = prob.layer_of_node
    if found is None or prob.num_devices < 2:
        return None
    layer, num_layers = found
    ranges: Iterable[Labels | None]
    if prob.num_devices == 2:
        ranges = two_stages(pool, layer, num_layers)
    else:
        # With room for temporaries at their most, which a range of layers may not reach; else without.
        most = pool.microbatches * prob.most_temporary_bytes
        spares = dict.fromkeys((most, 0.0) if pool.is_tight else (0.0,))
        ranges = (
            pipeline(pool, layer, num_layers, order, spare) for order in orders(prob) for spare in spares
        )
    return _best(pool, (prob.column(labels) for labels in ranges if labels is not None), KEEP)


def _alone(problem: Problem) -> list[Column]:
    devices = range(problem.num_devices)
    return [problem.column(np.full(problem.num_nodes, d, dtype=np.int64)) for d in devices]


def _best(pool: Pool, columns: Iterable[Column], keep: int) -> tuple[Mix, ...] | None:
    """The columns of the shortest period that fit, each alone."""
    fitting = [mix for c in columns if (mix := pool.held_by((c,))) is not None]
    fitting.sort(key=lambda m: -throughput.upper_bound_per_s(m, pool.microbatches))
    return tuple(fitting[:keep]) or None


def _phase_columns(problem: Problem) -> dict[tuple[int, int], Column] | None:
    """(device of prefill, device of decode) -> column; None without both phases."""
    kinds = [g.trace.step.kind for g in problem.unit.graphs]
    if "prefill" not in kinds or "decode" not in kinds or problem.num_devices < 2:
        return None
    is_decode = np.zeros(problem.num_nodes, dtype=np.bool_)
    is_other = np.zeros(problem.num_nodes, dtype=np.bool_)
    for kind, nodes in zip(kinds, problem.node_of, strict=True):
        (is_decode if kind == "decode" else is_other)[nodes] = True
    if (is_decode & is_other).any():  # nodes of both phases cannot be parted
        return None
    pairs = [(a, b) for a in range(problem.num_devices) for b in range(problem.num_devices)]
    return {(a, b): problem.column(np.where(is_decode, b, a)) for a, b in pairs}


COARSE: dict[str, Callable[[Pool], tuple[Mix, ...] | None]] = {
    "single": single,
    "data-parallel": data_parallel,
    "prefill-decode": prefill_decode,
    "prefill-decode-fractional": prefill_decode_fractional,
    "attention-ffn": attention_ffn,
    "layer-pipeline": layer_pipeline,
}


def coarse_mixes(pool: Pool) -> dict[str, tuple[Mix, ...] | None]:
    """The candidates of every coarse policy; their columns are in the pool."""
    found = {name: policy(pool) for name, policy in COARSE.items()}
    for mixes in found.values():
        for mix in mixes or ():
            for column in mix.columns:
                pool.add(column)
    return found
