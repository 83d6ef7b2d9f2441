"""Placements of one step, launch by launch, as a front of schedules of which none is later in everything.

A row of the front is a schedule so far, told by its columns (see `latency_layout`): if one row is no later
than another in every column, nothing that follows can make it end later, and the other is dropped. So is a
row that provably ends no sooner than a known placement. While the front stays narrow this is exact.

A front that grows wider than its limit is narrowed in one of two ways. `search` keeps the most promising
rows: what remains is a placement, not always the best. `bound_us` merges rows that are alike, each column
taking its earliest time: the merged row is no later than any of them, so what remains is a lower bound.

Tolls (`latency_moves`) are part of all times from the launch that pays them on, and never negative.
"""

from dataclasses import dataclass

import numpy as np

from tessera.plan.arrays import Floats, Ints
from tessera.plan.latency_layout import NEVER_US, Layout, Move

# Weights of devices in the bound by remaining work: each alone, and mixtures.
MIXTURES = 9
# Times that differ by less than this share are the same; bounds are lowered by what that may add up to.
SAME = 1e-13
ROUNDING = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What the launches from each place on add to any weighted sum of the devices' times."""

    # [mixture, device]; every row sums to one.
    weights: Floats
    # [launch, mixture]
    rest_us: Floats


def work_of(layout: Layout) -> Work:
    """By mixtures of the devices."""
    cost = np.array([m.cost_us for m in layout.moves])
    num = cost.shape[1]
    mixed = np.random.default_rng(0).dirichlet(np.ones(num), size=MIXTURES)
    if num == 2:
        share = np.linspace(0.1, 0.9, MIXTURES)
        mixed = np.stack([share, 1.0 - share], axis=1)
    weights = np.concatenate([np.eye(num), mixed])
    least = (cost[:, None, :] * weights[None]).min(axis=2)
    rest = np.concatenate([least[::-1].cumsum(axis=0)[::-1], np.zeros((1, len(weights)))])
    return Work(weights, rest)


def search(layout: Layout, width: int, known_us: float) -> tuple[Ints, float] | None:
    """Devices of the launches of a placement faster than a known one, and when it ends."""
    work = work_of(layout)
    rows = _first(layout)
    trail: list[tuple[Ints, Ints]] = []
    for launch, move in enumerate(layout.moves[:-1]):
        rows, parent, device = advance(layout, move, rows)
        ends = _ends(layout, work, launch, rows)
        keep = _unbeaten(rows, ends, known_us)
        keep = keep[np.argsort(ends[keep], kind="stable")][:width]
        rows = rows[keep]
        trail.append((parent[keep], device[keep]))
        if not len(keep):
            return None
    last = _last(layout, rows)
    at = int(last.argmin())
    found_us = float(last[at])
    devices: list[int] = []
    for parent, device in reversed(trail):
        devices.append(int(device[at]))
        at = int(parent[at])
    return np.array(devices[::-1], dtype=np.int64), found_us


def bound_us(layout: Layout, width: int, known_us: float) -> float:
    """No placement of the step ends before this; `known_us` is when some placement does."""
    work = work_of(layout)
    rows = _first(layout)
    proved = 0.0
    for launch, move in enumerate(layout.moves[:-1]):
        rows, _, _ = advance(layout, move, rows)
        ends = _ends(layout, work, launch, rows)
        keep = _unbeaten(rows, ends, known_us)
        if not len(keep):
            return known_us * (1.0 - ROUNDING)
        rows, ends = rows[keep], ends[keep]
        proved = max(proved, float(ends.min()))
        if len(rows) > width:
            rows = _merged(rows, ends, width)
    proved = max(proved, float(_last(layout, rows).min()))
    return min(known_us, proved) * (1.0 - ROUNDING)


def _first(layout: Layout) -> Floats:
    return np.zeros((1, 1, len(layout.least_wait_us)))


def _last(layout: Layout, rows: Floats) -> Floats:
    """When all that the step's end waits for has ended."""
    return np.asarray(rows[:, list(layout.moves[-1].reads)].max(axis=1).min(axis=1))


def advance(layout: Layout, move: Move, rows: Floats) -> tuple[Floats, Ints, Ints]:
    """Every row with the launch on every device it may run on: (rows, which row before, device)."""
    num = rows.shape[2]
    start = rows[:, [0, *move.reads]].max(axis=1)
    end = start + move.cost_us
    parent, device = np.nonzero(end < NEVER_US)
    stop = end[parent, device]
    before = rows[parent]
    after = np.empty((len(parent), len(move.folds), num))
    after[:, 0] = before[:, 0]
    after[np.arange(len(parent)), 0, device] = stop
    waits = stop[:, None, None] + move.makes.transpose(1, 0, 2)[device]
    for column in range(1, len(move.folds)):
        old, new = move.folds[column], move.made[column]
        if old:
            after[:, column] = before[:, old[0]] if len(old) == 1 else before[:, list(old)].max(axis=1)
            if new:
                np.maximum(after[:, column], waits[:, list(new)].max(axis=1), out=after[:, column])
        else:
            after[:, column] = waits[:, new[0]] if len(new) == 1 else waits[:, list(new)].max(axis=1)
    if move.raises:
        floor = stop[:, None] + layout.least_wait_us[device]
        raised = list(move.raises)
        after[:, raised] = np.maximum(after[:, raised], floor[:, None])
    # A clock that is ahead by the toll in every column ends ahead by the toll.
    after += move.toll_us[device][:, None, None]
    return after, parent, device


def _ends(layout: Layout, work: Work, launch: int, rows: Floats) -> Floats:
    """No way to go on from a row ends before this."""
    column, reader = np.array(layout.moves[launch].pairs).T
    paths = (rows[:, column] + layout.tail_us[reader]).min(axis=2).max(axis=1)
    # A device that will not be used again counts only up to a time that the step surely lasts.
    free = np.minimum(rows[:, 0], paths[:, None])
    spread = (free @ work.weights.T + work.rest_us[launch + 1]).max(axis=1)
    return np.asarray(np.maximum(paths, spread))


def _unbeaten(rows: Floats, ends: Floats, known_us: float) -> Ints:
    """Rows that may end before the known placement and are not as late as another row in everything."""
    keep = np.flatnonzero(ends < known_us * (1.0 - ROUNDING / 2))
    if len(keep) < 2:
        return keep
    flat = rows[keep].reshape(len(keep), -1)
    order = np.argsort(flat.sum(axis=1), kind="stable")
    keep, flat = keep[order], flat[order]
    # Only a row with a smaller sum, or an equal earlier one, can be no later in everything.
    no_later = np.asarray(flat[:, None] <= (flat * (1.0 + SAME))[None]).all(axis=2)
    return keep[~np.triu(no_later, 1).any(axis=0)]


def _merged(rows: Floats, ends: Floats, width: int) -> Floats:
    """At most `width` rows, each no later than those it stands for."""
    flat = np.minimum(rows.reshape(len(rows), -1), NEVER_US)
    centre = int(ends.argmin())
    apart = np.abs(flat - flat[centre]).max(axis=1)
    owner = np.zeros(len(rows), dtype=np.int64)
    for index in range(1, width):
        centre = int(apart.argmax())
        away = np.abs(flat - flat[centre]).max(axis=1)
        nearer = away < apart
        owner[nearer] = index
        apart = np.minimum(apart, away)
    merged = np.full((width, *rows.shape[1:]), np.inf)
    np.minimum.at(merged, owner, rows)
    return merged[np.unique(owner)]
