"""Teams: placements, and how many of the slots follow each.

A slot keeps to one placement: when its request ends, the next one follows the same. So the devices stay in
balance at any moment and not on average only, and a slot whose placement never leaves its device always has
work for it there. By the queue's rule such a request, which has most to do until it waits, goes last: it
fills what the divided ones leave free. Which shares of the requests follow from that is seen in a simulation;
here teams are proposed by rough figures:

  pairs       two placements whose mix keeps the busiest device or link least busy
  filled      a divided placement, with slots that stay on one device
  neighbours  of a good team: one slot follows another placement
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tessera.plan import throughput
from tessera.plan.lanes import slot_counts
from tessera.plan.policies import Task
from tessera.plan.problem import Column, Floats, Ints, Mix

# Placements that are paired, the most: the last ones found.
MAX_COLUMNS, MAX_ENTRIES = 120, 2_000_000
# Teams that one placement takes part in.
MAX_USES = 2
# Shares that are compared.
SHARES = np.arange(1, 8) / 8
# A placement of a team has at least this share; see `team`.
LEAST_SHARE = 1 / 64
# A depth is kept this nearly.
DEPTH_SLACK = 1.03
# How busy the busiest device is with divided requests, where others fill the rest.
DIVIDED = 0.9


def team(task: Task, columns: Sequence[Column], counts: Sequence[int]) -> Mix:
    """With the shares that balance its placements by busy time, none of them left out."""
    rates = throughput.master(task.pool, list(columns)).rates
    shares = np.maximum(rates / rates.sum(), LEAST_SHARE)
    return Mix(tuple(columns), tuple((shares / shares.sum()).tolist()), tuple(counts))


def pairs(task: Task, depth: float, num: int) -> Iterator[Mix]:
    """The best so many, best first, among those whose path time is within a depth."""
    columns = _columns(task)
    busy, path = _loads(columns)
    if task.slots < 2:
        return
    least = np.full((len(columns), len(columns)), np.inf)
    share_of = np.zeros_like(least)
    for share in SHARES.tolist():
        period = (share * busy[:, None, :] + (1 - share) * busy[None, :, :]).max(axis=2)
        waits = share * path[:, None] + (1 - share) * path[None, :]
        period[waits > depth * DEPTH_SLACK * period] = np.inf
        is_better = period < least
        least[is_better], share_of[is_better] = period[is_better], share
    least[np.tril_indices(len(columns))] = np.inf
    uses = [0] * len(columns)
    for flat in np.argsort(least, axis=None, kind="stable").tolist():
        one, other = divmod(flat, len(columns))
        if num == 0 or not np.isfinite(least[one, other]):
            return
        pair = columns[one], columns[other]
        share = float(share_of[one, other])
        counts = slot_counts(Mix(pair, (share, 1 - share)), task.slots)
        if max(uses[one], uses[other]) < MAX_USES and task.pool.fits(pair, counts):
            uses[one], uses[other], num = uses[one] + 1, uses[other] + 1, num - 1
            yield team(task, pair, counts)


def filled(task: Task, num: int) -> Iterator[Mix]:
    """The best so many teams of a divided placement and slots that stay on one device, best first."""
    devices = task.problem.num_devices
    columns = _columns(task)
    busy, path = _loads(columns)
    alone = [task.problem.column(np.full(task.problem.num_nodes, d, dtype=np.int64)) for d in range(devices)]
    whole = np.array([c.busy_us.max() for c in alone])
    is_divided = (busy[:, :devices] > 0.0).sum(axis=1) > 1
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for staying in _stayings(task):
        # By Little's law, and by the busiest device or link, which is never quite free of waiting.
        rate = np.minimum((task.slots - len(staying)) / path, 1.0 / busy.max(axis=1)) * DIVIDED
        # What the divided requests leave free on these devices is filled.
        total = rate + sum((1.0 - rate * busy[:, d]) / whole[d] for d in staying)
        found += [(-x, n, staying) for n, x in enumerate(total.tolist()) if is_divided[n]]
    uses = [0] * len(columns)
    for _, index, staying in sorted(found):
        if num == 0:
            return
        placements = (columns[index], *(alone[d] for d in staying))
        counts = (task.slots - len(staying), *(1,) * len(staying))
        if uses[index] < MAX_USES and task.pool.fits(placements, counts):
            uses[index], num = uses[index] + 1, num - 1
            yield team(task, placements, counts)


def _stayings(task: Task) -> list[tuple[int, ...]]:
    """Devices on which a slot each stays: one of them, or all."""
    devices, slots = task.problem.num_devices, task.slots
    one: list[tuple[int, ...]] = [(d,) for d in range(devices)] if slots > 1 else []
    return [*one, tuple(range(devices))] if slots > devices > 1 else one


def is_filled(task: Task, mix: Mix) -> bool:
    """Do some slots stay on one device in a step that others divide? They get what those leave, no more."""

    def stays(column: Column, nodes: Ints) -> bool:
        here = column.labels[nodes]
        return bool((here == here[0]).all())

    return any(len({stays(c, nodes) for c in mix.columns}) > 1 for nodes in task.problem.node_of)


def neighbours(task: Task, mix: Mix, depth: float, num: int) -> Iterator[Mix]:
    """The best so many teams in which one slot follows another placement, best first."""
    if task.slots < 2:
        return
    counts = slot_counts(mix, task.slots)
    columns = _columns(task)
    busy, path = _loads(columns)
    found: list[tuple[float, int, int]] = []
    for lane, column in enumerate(mix.columns):
        rest = [s * (n - (i == lane)) / n for i, (s, n) in enumerate(zip(mix.shares, counts, strict=True))]
        if sum(rest) <= 0.0:
            continue
        kept = Mix(mix.columns, tuple(s / sum(rest) for s in rest))
        kept_path = sum(s * c.path_us for s, c in zip(kept.shares, kept.columns, strict=True))
        period = np.full(len(columns), np.inf)
        for share in SHARES[:4].tolist():
            tried = ((1 - share) * kept.busy_us + share * busy).max(axis=1)
            waits = (1 - share) * kept_path + share * path
            tried[waits > depth * DEPTH_SLACK * tried] = np.inf
            period = np.minimum(period, tried)
        found += [
            (us, lane, n)
            for n, us in enumerate(period.tolist())
            if np.isfinite(us) and columns[n].key != column.key
        ]
    for _, lane, other in sorted(found):
        if num == 0:
            return
        changed = _with_one(mix, counts, lane, columns[other])
        if task.pool.fits(changed, tuple(changed.values())):
            num -= 1
            yield team(task, tuple(changed), tuple(changed.values()))


def _with_one(mix: Mix, counts: Sequence[int], lane: int, column: Column) -> dict[Column, int]:
    """One slot of a lane follows another placement: placement -> slots."""
    slots = dict(zip(mix.columns, counts, strict=True))
    slots[mix.columns[lane]] -= 1
    same = next((c for c in slots if c.key == column.key), column)
    slots[same] = slots.get(same, 0) + 1
    return {c: n for c, n in slots.items() if n}


def _columns(task: Task) -> list[Column]:
    rows = len(task.pool.columns[0].busy_us)
    most = min(MAX_COLUMNS, max(2, int((MAX_ENTRIES / rows) ** 0.5)))
    return task.pool.columns[-most:]


def _loads(columns: list[Column]) -> tuple[Floats, Floats]:
    return np.array([c.busy_us for c in columns]), np.array([c.path_us for c in columns])
