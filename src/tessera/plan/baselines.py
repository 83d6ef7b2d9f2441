"""Coarse policies that plans are compared with; each returns candidate mixes that fit memory.

    single                     every request on one device
    data-parallel              whole requests, shares by device speed
    prefill-decode             steps up to prefill on one device, decode steps on another
    prefill-decode-fractional  the best mix of all whole-phase assignments
    attention-ffn              attention scopes on one device, the rest on another
    layer-pipeline             contiguous ranges of layers, the same in every step

None: the policy does not apply. Served units have no phases. A node that a policy would split goes where most
of its work goes, and strict prefill-decode does not apply. Layer pipelines try every cut on two devices; on
more, the smallest bottleneck per device order.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import permutations

import numpy as np

from tessera.plan.arrays import Floats, Ints, Labels
from tessera.plan.constraints import attention_launches
from tessera.plan.pricing import throughput
from tessera.plan.pricing.throughput import Pool
from tessera.plan.problem import Column, Mix, Problem, by_speed, microbatch_counts


def single(pool: Pool) -> tuple[Mix, ...] | None:
    return _best(pool, _alone(pool.problem), pool.problem.num_devices)


def data_parallel(pool: Pool) -> tuple[Mix, ...] | None:
    columns = [c for c in _alone(pool.problem) if pool.able(c)]
    if not columns:
        return None
    mix = by_speed(columns)
    if pool.fits(columns, microbatch_counts(mix, pool.microbatches)):
        return (mix,)
    # Memory limits the requests in flight per device; one keeps it busy.
    rooms = [pool.problem.microbatches_that_fit(Mix((c,), (1.0,))) or 0 for c in columns]
    counts = [min(n, room) for n, room in zip(microbatch_counts(mix, pool.microbatches), rooms, strict=True)]
    return (replace(mix, microbatches=tuple(counts)),)


def prefill_decode(pool: Pool) -> tuple[Mix, ...] | None:
    columns = _phase_columns(pool.problem)
    if columns is None:
        return None
    split = [c for (a, b), c in columns.items() if a != b]
    return _best(pool, split, pool.config.num_coarse)


def prefill_decode_fractional(pool: Pool) -> tuple[Mix, ...] | None:
    columns = _phase_columns(pool.problem)
    if columns is None:
        return None
    mix = throughput.balanced(pool, columns.values())
    # With few microbatches a simpler mix may win.
    simpler = (*(data_parallel(pool) or ()), *(prefill_decode(pool) or ()))
    return None if mix is None else (mix, *simpler)


def attention_ffn(pool: Pool) -> tuple[Mix, ...] | None:
    prob = pool.problem
    marks = attention_launches(prob.unit)
    if marks is None or prob.num_devices < 2:
        return None
    side = prob.vote(tuple(m.astype(np.int64) for m in marks), 2)
    if side.min() == side.max():
        return None
    pairs = permutations(range(prob.num_devices), 2)
    return _best(pool, (prob.column(np.where(side == 1, a, b)) for a, b in pairs), pool.config.num_coarse)


def layer_pipeline(pool: Pool) -> tuple[Mix, ...] | None:
    prob = pool.problem
    layers = prob.layer_of_node
    if layers is None or prob.num_devices < 2:
        return None
    layer, num_layers = layers
    if prob.num_devices == 2:
        cuts = range(1, num_layers)
        ranges: Iterable[Labels | None] = (np.where(layer < c, a, 1 - a) for a in (0, 1) for c in cuts)
    else:
        most = pool.microbatches * prob.most_temporary_bytes
        spares = dict.fromkeys((most, 0.0) if pool.is_tight else (0.0,))
        ranges = (
            pipeline(pool, layer, num_layers, order, spare) for order in orders(pool) for spare in spares
        )
    columns = (prob.column(labels) for labels in ranges if labels is not None)
    return _best(pool, columns, pool.config.num_coarse)


def _alone(problem: Problem) -> list[Column]:
    return [problem.alone(device) for device in range(problem.num_devices)]


def _best(pool: Pool, columns: Iterable[Column], keep: int) -> tuple[Mix, ...] | None:
    fitting = [mix for c in columns if (mix := pool.held_by((c,))) is not None]
    fitting.sort(key=lambda m: -throughput.upper_bound_per_s(m, pool.microbatches))
    return tuple(fitting[:keep]) or None


def _phase_columns(problem: Problem) -> dict[tuple[int, int], Column] | None:
    """Keys: (device of prefill, device of decode). None without both phases."""
    kinds = [g.trace.step.kind for g in problem.unit.graphs]
    if "prefill" not in kinds or "decode" not in kinds or problem.num_devices < 2:
        return None
    is_decode = np.zeros(problem.num_nodes, dtype=np.bool_)
    is_other = np.zeros(problem.num_nodes, dtype=np.bool_)
    for kind, nodes in zip(kinds, problem.node_of, strict=True):
        (is_decode if kind == "decode" else is_other)[nodes] = True
    if (is_decode & is_other).any():
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
    """Adds the columns to the pool."""
    by_policy = {name: policy(pool) for name, policy in COARSE.items()}
    for mixes in by_policy.values():
        for mix in mixes or ():
            pool.add(*mix.columns)
    return by_policy


def orders(pool: Pool) -> list[tuple[int, ...]]:
    problem, devices = pool.problem, range(pool.problem.num_devices)
    if problem.num_devices <= pool.config.max_permuted:
        return list(permutations(devices))
    by_speed = tuple(sorted(devices, key=lambda d: float(problem.load_us[:, d].sum())))
    return [by_speed, by_speed[::-1]]


def pipeline(pool: Pool, layer: Ints, num_layers: int, order: tuple[int, ...], spare: float) -> Labels | None:
    """Smallest bottleneck for one device order, within memory less `spare`."""
    prob = pool.problem
    load = np.zeros((num_layers, prob.num_devices))
    np.add.at(load, layer, prob.load_us)
    held = _layer_bytes(pool, layer, num_layers)
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    starts: list[Ints] = []
    for device in order:
        stage = _ranges(load[:, device])
        stage[_ranges(held) > prob.memory_bytes[device] - spare] = np.inf
        options = np.maximum(best[:, None], stage)  # [first layer, one past the last]
        starts.append(options.argmin(axis=0))
        best = options.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    device_of = np.zeros(num_layers, dtype=np.int64)
    stop = num_layers
    for device, start in zip(reversed(order), reversed(starts), strict=True):
        device_of[int(start[stop]) : stop] = device
        stop = int(start[stop])
    return device_of[layer]


def _ranges(per_layer: Floats) -> Floats:
    """[start, stop]: sum over layers start <= x < stop; infinite where stop < start."""
    sums = np.concatenate([[0.0], np.cumsum(per_layer)])
    table = sums[None, :] - sums[:, None]
    table[np.tril_indices(len(sums), -1)] = np.inf
    return np.asarray(table)


def _layer_bytes(pool: Pool, layer: Ints, num_layers: int) -> Floats:
    """Shared buffers count in each layer."""
    total = np.zeros(num_layers)
    for held, copies in ((pool.problem.weights, 1), (pool.problem.states, pool.microbatches)):
        pairs = np.unique(np.stack([held.pin_item, layer[held.pin_node]], axis=1), axis=0)
        np.add.at(total, pairs[:, 1], copies * held.num_bytes[pairs[:, 0]])
    return total
