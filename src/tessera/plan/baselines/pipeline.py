"""Layer pipelines: one contiguous range of layers for each device.

Two devices: every split in either order, links included. More: for a given order of the devices the split of
the least bottleneck of device time, within memory.
"""

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from tessera.plan.pricing.throughput import Pool
from tessera.plan.problem import Floats, Ints, Labels, Problem

# Above this many devices, only the orders by speed are tried.
MAX_PERMUTED = 4


def two_stages(pool: Pool, layer: Ints, num_layers: int) -> Iterator[Labels]:
    """For either order of two devices, the split of the least bottleneck that fits, links included."""
    for first in (0, 1):
        for cut in np.argsort(split_periods(pool.problem, layer, num_layers, first), kind="stable").tolist():
            labels = np.where(layer < cut + 1, first, 1 - first)
            if pool.able(pool.problem.column(labels)):
                yield labels
                break


def split_periods(problem: Problem, layer: Ints, num_layers: int, first: int) -> Floats:
    """Busiest device or link when layers below 1, 2, ... go to device `first` and the rest to the other."""
    second = 1 - first
    load = np.zeros((num_layers, 2))
    np.add.at(load, layer, problem.load_us)
    below = np.cumsum(load, axis=0)[:-1]
    busy = [below[:, first], load[:, second].sum() - below[:, second]]
    if len(problem.values):
        starts = np.searchsorted(problem.values.pin_value, np.arange(len(problem.values)))
        readers = layer[problem.values.pin_node]
        made = layer[problem.values.producer]
        lowest, highest = np.minimum.reduceat(readers, starts), np.maximum.reduceat(readers, starts)
        # A value crosses forward at cuts made < c <= highest, and back at cuts lowest < c <= made.
        busy.append(_covered(made, highest, problem.wire_us[:, first, second], num_layers))
        busy.append(_covered(lowest, made, problem.wire_us[:, second, first], num_layers))
    return np.asarray(np.max(busy, axis=0), dtype=np.float64)


def _covered(after: Ints, upto: Ints, weight: Floats, num_layers: int) -> Floats:
    """For cuts c = 1 .. num_layers - 1: the weight of all intervals with after < c <= upto."""
    real = upto > after
    change = np.bincount(after[real] + 1, weights=weight[real], minlength=num_layers + 1)
    change -= np.bincount(upto[real] + 1, weights=weight[real], minlength=num_layers + 1)
    return np.asarray(np.cumsum(change)[1:num_layers], dtype=np.float64)


def orders(problem: Problem) -> list[tuple[int, ...]]:
    devices = range(problem.num_devices)
    if problem.num_devices <= MAX_PERMUTED:
        return list(permutations(devices))
    by_speed = tuple(sorted(devices, key=lambda d: float(problem.load_us[:, d].sum())))
    return [by_speed, by_speed[::-1]]


def pipeline(pool: Pool, layer: Ints, num_layers: int, order: tuple[int, ...], spare: float) -> Labels | None:
    """Ranges of layers for devices in a given order: least bottleneck of device time, within memory.

    `spare` bytes are left free on every device.
    """
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
    """Bytes that each layer needs resident; what two layers share is counted in both."""
    total = np.zeros(num_layers)
    for held, copies in ((pool.problem.weights, 1), (pool.problem.states, pool.microbatches)):
        pairs = np.unique(np.stack([held.pin_item, layer[held.pin_node]], axis=1), axis=0)
        np.add.at(total, pairs[:, 1], copies * held.num_bytes[pairs[:, 0]])
    return total
