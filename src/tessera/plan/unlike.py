"""Teams of unlike batches: placements of several batches, and how many of the slots follow each.

As in `teams`, with columns of several batches, all per work unit (see `joint`), so that the same rough
figures order them:

  pairs    two placements of unlike batches whose mix keeps the busiest device or link least busy
  filled   a divided placement, with slots that stay on one device at another batch
  changed  a good team, in which one slot follows a placement of another batch
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tessera.plan import throughput
from tessera.plan.joint import JointTask
from tessera.plan.lanes import slot_counts
from tessera.plan.problem import Column, Floats, Mix

# Numbers in one table of pairs, the most.
MAX_ENTRIES = 2_000_000
# Shares of the work that are compared.
SHARES = np.arange(1, 8) / 8
# A placement of a team has at least this share of the work.
LEAST_SHARE = 1 / 64
# How busy the busiest device is with divided requests, where others fill the rest.
DIVIDED = 0.9


def team(task: JointTask, columns: Sequence[Column], counts: Sequence[int]) -> Mix:
    """With the shares that balance its placements by busy time, none of them left out."""
    rates = throughput.master(task.parts[0].pool, list(columns)).rates
    shares = np.maximum(rates / rates.sum(), LEAST_SHARE)
    return Mix(tuple(columns), tuple((shares / shares.sum()).tolist()), tuple(counts))


def most_paired(columns: Sequence[Column]) -> int:
    """Placements that are paired with one another, the most."""
    return max(2, int((MAX_ENTRIES / len(columns[0].busy_us)) ** 0.5))


def pairs(task: JointTask, columns: Sequence[Column], depth: float, num: int) -> Iterator[Mix]:
    """The best so many, best first, among those whose path time is within a depth."""
    columns = columns[: most_paired(columns)]
    busy, path, variant = _loads(columns)
    least = np.full((len(columns), len(columns)), np.inf)
    share_of = np.zeros_like(least)
    for share in SHARES.tolist():
        period = (share * busy[:, None, :] + (1 - share) * busy[None, :, :]).max(axis=2)
        waits = share * path[:, None] + (1 - share) * path[None, :]
        period[waits > depth * period] = np.inf
        is_better = period < least
        least[is_better], share_of[is_better] = period[is_better], share
    # Every pair once: the earlier variant first.
    least[variant[:, None] >= variant[None, :]] = np.inf
    for flat in np.argsort(least, axis=None, kind="stable").tolist() if task.slots > 1 else ():
        one, other = divmod(flat, len(columns))
        if num == 0 or not np.isfinite(least[one, other]):
            return
        pair, share = (columns[one], columns[other]), float(share_of[one, other])
        counts = slot_counts(Mix(pair, (share, 1 - share)), task.slots)
        if task.fits_with(pair, counts):
            num -= 1
            yield team(task, pair, counts)


def filled(task: JointTask, columns: Sequence[Column], alone: Sequence[Column], num: int) -> Iterator[Mix]:
    """The best so many teams of a divided placement and slots on one device each; alone: one a device."""
    busy, path, _ = _loads(columns)
    is_divided = (busy[:, : task.problem.num_devices] > 0.0).sum(axis=1) > 1
    found: list[tuple[float, int, tuple[Column, ...]]] = []
    for staying in (*((c,) for c in alone), *((tuple(alone),) if len(alone) > 1 else ())):
        free = task.slots - len(staying)
        if free < 1:
            continue
        # By Little's law, and by the busiest device or link; what is left free on these devices is filled.
        rate = np.minimum(free / path, 1.0 / busy.max(axis=1)) * DIVIDED
        at = [(int(c.labels[0]), float(c.busy_us.max())) for c in staying]
        total = rate + sum((1.0 - rate * busy[:, d]) / whole for d, whole in at)
        found += [(-x, n, staying) for n, x in enumerate(total.tolist()) if is_divided[n]]
    for _, index, staying in sorted(found, key=lambda x: x[:2]):
        placements = (columns[index], *staying)
        if num == 0:
            return
        counts = (task.slots - len(staying), *(1,) * len(staying))
        is_mixed = any(c.variant != columns[index].variant for c in staying)
        if is_mixed and task.fits_with(placements, counts):
            num -= 1
            yield team(task, placements, counts)


def changed(task: JointTask, mix: Mix, columns: Sequence[Column], num: int) -> Iterator[Mix]:
    """The best so many teams, by busy time, in which one slot of a mix follows one of these placements."""
    counts = slot_counts(mix, task.slots)
    known = {c.variant for c in mix.columns}
    found: list[Mix] = []
    for lane in range(len(mix.columns)) if sum(counts) > 1 else ():
        kept = {c: n - (i == lane) for i, (c, n) in enumerate(zip(mix.columns, counts, strict=True))}
        kept = {c: n for c, n in kept.items() if n}
        for column in columns:
            if column.variant not in known:
                found.append(team(task, (*kept, column), (*kept.values(), 1)))
    for other in sorted(found, key=lambda m: -m.rate_per_s):
        if num == 0:
            return
        if task.holds(other):
            num -= 1
            yield other


def _loads(columns: Sequence[Column]) -> tuple[Floats, Floats, Floats]:
    """Busy times, paths and variants."""
    return (
        np.array([c.busy_us for c in columns]),
        np.array([c.path_us for c in columns]),
        np.array([float(c.variant) for c in columns]),
    )
