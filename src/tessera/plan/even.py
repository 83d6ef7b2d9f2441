"""Even mixes: placements in shares that the slots can keep at any moment.

With four slots, lanes in shares of 0.58 and 0.42 are now two and two, now three and one, and the devices are
in balance on average only. Shares of whole slots stay as they are: a slot that ends takes its lane again. Of
all pairs of known placements, those are proposed whose busiest device or link is least busy, among the mixes
whose path time is within a depth; and of a good mix its neighbours, in which one slot follows another
placement.
"""

from collections.abc import Iterator

import numpy as np

from tessera.plan.policies import Task
from tessera.plan.problem import Column, Floats, Mix

# Placements that are paired, the most: the last ones found.
MAX_COLUMNS, MAX_ENTRIES = 120, 2_000_000
# Mixes that one placement takes part in.
MAX_USES = 2
# Slots that are told apart; with more, shares of these many parts.
MAX_PARTS = 8
# A depth is kept this nearly.
DEPTH_SLACK = 1.03


def even_mixes(task: Task, depth: float, num: int) -> Iterator[Mix]:
    """The best so many pairs, best first."""
    columns = _columns(task)
    busy, path = _loads(columns)
    parts = _parts(task)
    if parts < 2:
        return
    tables = []
    for part in range(1, parts // 2 + 1):
        share = part / parts
        period = (share * busy[:, None, :] + (1 - share) * busy[None, :, :]).max(axis=2)
        waits = share * path[:, None] + (1 - share) * path[None, :]
        period[waits > depth * DEPTH_SLACK * period] = np.inf
        np.fill_diagonal(period, np.inf)
        if 2 * part == parts:
            period[np.tril_indices(len(columns))] = np.inf
        tables.append(period)
    uses = [0] * len(columns)
    stacked = np.array(tables)
    for flat in np.argsort(stacked, axis=None, kind="stable").tolist():
        part, one, other = (int(x) for x in np.unravel_index(flat, stacked.shape))
        if num == 0 or not np.isfinite(stacked[part, one, other]):
            return
        pair = columns[one], columns[other]
        if max(uses[one], uses[other]) < MAX_USES and task.pool.fits(pair):
            uses[one], uses[other], num = uses[one] + 1, uses[other] + 1, num - 1
            yield Mix(pair, ((part + 1) / parts, 1 - (part + 1) / parts))


def neighbours(task: Task, mix: Mix, depth: float, num: int) -> Iterator[Mix]:
    """The best so many mixes in which one slot of an even mix follows another placement, best first."""
    parts = _parts(task)
    counts = [round(share * parts) for share in mix.shares]
    if parts < 2 or any(abs(n / parts - s) > 1e-9 for n, s in zip(counts, mix.shares, strict=True)):
        return
    columns = _columns(task)
    busy, path = _loads(columns)
    found: list[tuple[float, int, int]] = []
    for lane, column in enumerate(mix.columns):
        period = (mix.busy_us + (busy - column.busy_us) / parts).max(axis=1)
        whole = sum(s * c.path_us for s, c in zip(mix.shares, mix.columns, strict=True))
        waits = whole + (path - column.path_us) / parts
        known = {c.key for c in mix.columns} if counts[lane] == 1 else {column.key}
        allowed = (waits <= depth * DEPTH_SLACK * period).tolist()
        found += [
            (us, lane, n)
            for n, us in enumerate(period.tolist())
            if allowed[n] and columns[n].key not in known
        ]
    for _, lane, other in sorted(found):
        if num == 0:
            return
        changed = _with_one(mix, counts, lane, columns[other], parts)
        if task.pool.fits(changed.columns):
            num -= 1
            yield changed


def _with_one(mix: Mix, counts: list[int], lane: int, column: Column, parts: int) -> Mix:
    """One slot of a lane follows another placement."""
    slots = {c.key: n for c, n in zip(mix.columns, counts, strict=True)}
    slots[mix.columns[lane].key] -= 1
    slots[column.key] = slots.get(column.key, 0) + 1
    listed = {c.key: c for c in (*mix.columns, column)}
    kept = [(listed[key], n) for key, n in slots.items() if n]
    return Mix(tuple(c for c, _ in kept), tuple(n / parts for _, n in kept))


def _columns(task: Task) -> list[Column]:
    rows = len(task.pool.columns[0].busy_us)
    most = min(MAX_COLUMNS, max(2, int((MAX_ENTRIES / rows) ** 0.5)))
    return task.pool.columns[-most:]


def _loads(columns: list[Column]) -> tuple[Floats, Floats]:
    return np.array([c.busy_us for c in columns]), np.array([c.path_us for c in columns])


def _parts(task: Task) -> int:
    return min(task.slots, MAX_PARTS)
