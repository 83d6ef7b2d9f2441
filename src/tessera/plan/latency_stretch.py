"""The time from one launch's end to a later one's, at least and at best, for many alike at once.

A stretch is two gates (`latency_gates`) and the launches that lie between them, on devices that do nothing
else. Its crossing is the least time from the first gate's end to the last one's, for each pair of their
devices, by a front of schedules (`latency_front`) in which rows that began on different devices are not
compared. Stretches of one shape, as those of repeated layers, go through one front together; equal ones
once.

A front wider than its limit is gone through twice: with rows merged, for the bound, and with the most
promising rows alone, for placements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tessera.plan.arrays import Bools, Floats, Ints
from tessera.plan.latency_front import advance, merged, paths_us
from tessera.plan.latency_layout import (
    LAST,
    NEVER_US,
    Item,
    Layout,
    Outline,
    Work,
    after_us,
    ancestors,
    layout_of,
)
from tessera.plan.latency_unbeaten import unbeaten

# Rows of one stretch's front that began on one device; and rows that are compared at once, over stretches.
MOST_ROWS = 128
SHARED_ROWS = 512
# Launches of a short stretch, on average; the share of all launches that distinct longer ones may have.
SHORT = 48
REPEATED = 0.25
# What a front starts with is multiplied by about this before it is narrow again.
GROWTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Two gates and what lies between them."""

    # Launches of the step, in order.
    members: tuple[int, ...]
    # Of the members alone; those of one shape share it.
    outline: Outline
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """By the devices of the two gates, [first, last]."""

    # No placement takes less, and what some placement takes (infinite: none was found).
    least_us: Floats
    found_us: Floats
    # [member, first, last]: that placement.
    devices: Ints


def stretches_of(outline: Outline, pairs: Sequence[tuple[int, int]]) -> list[Stretch]:
    """What lies between pairs of gates."""
    shapes: dict[object, tuple[Outline, Layout]] = {}
    found = []
    for first, last in pairs:
        above = outline.above
        between = (x for x in range(first + 1, last) if above[x] >> first & 1 and above[last] >> x & 1)
        members = (first, *between, last)
        items = _inside(outline, members)
        key = tuple(tuple((x.readers, x.num_bytes) for x in made) for made in items)
        if key not in shapes:
            shape = Outline(items, ancestors(items), outline.least_wait_us, outline.grid_us)
            shapes[key] = shape, layout_of(shape)
        found.append(Stretch(members, *shapes[key]))
    return found


def _inside(outline: Outline, members: tuple[int, ...]) -> list[list[Item]]:
    """What members wait for among themselves; the end waits for the last."""
    place = {x: i for i, x in enumerate(members)}
    items: list[list[Item]] = []
    for member in members[:-1]:
        inside = ((tuple(place[r] for r in x.readers if r in place), x) for x in outline.items[member])
        items.append([Item(readers, x.wait_us, x.num_bytes) for readers, x in inside if readers])
    nothing = np.zeros_like(outline.least_wait_us)
    return [*items, [Item((len(members),), nothing, LAST)], []]


def are_worthwhile(work: Work, stretches: Sequence[Stretch]) -> bool:
    """Are the stretches short, or repeated, so that crossings take little of the time that fronts would?"""
    distinct = {(id(x.layout), _own(work, x).cost_us.tobytes()): len(x.members) for x in stretches}
    is_short = sum(distinct.values()) <= SHORT * len(distinct)
    return is_short or sum(distinct.values()) <= REPEATED * len(work.cost_us)


def crossings_of(work: Work, stretches: Sequence[Stretch]) -> list[Crossing]:
    """Of every stretch, in order."""
    found: dict[bytes, Crossing] = {}
    alike: dict[int, dict[bytes, Work]] = {}
    keys = []
    for stretch in stretches:
        own = _own(work, stretch)
        shape = id(stretch.layout)
        keys.append(b"%d " % shape + own.cost_us.tobytes() + own.toll_us.tobytes())
        alike.setdefault(shape, {})[keys[-1]] = own
    layouts = {id(x.layout): x.layout for x in stretches}
    for shape, listed in alike.items():
        for some in _batches(list(listed), work.cost_us.shape[1]):
            crossings = _cross(layouts[shape], [listed[x] for x in some])
            found |= dict(zip(some, crossings, strict=True))
    return [found[x] for x in keys]


def _batches(keys: list[bytes], num_devices: int) -> Iterator[list[bytes]]:
    size = max(1, SHARED_ROWS // (GROWTH * num_devices))
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _own(work: Work, stretch: Stretch) -> Work:
    """The stretch's times; the first gate costs nothing."""
    members = list(stretch.members)
    end = np.zeros((1, work.cost_us.shape[1]))
    cost = np.concatenate([work.cost_us[members], end])
    toll = np.concatenate([work.toll_us[members], end])
    cost[0] = np.where(cost[0] < NEVER_US, 0.0, NEVER_US)
    toll[0] = 0.0
    return Work(stretch.outline, cost, toll)


def _cross(layout: Layout, works: list[Work]) -> Iterator[Crossing]:
    many = _Many(layout, works)
    least, devices, is_exact = many.cross(is_bound=True)
    found = least
    if not is_exact.all():
        found, devices, _ = many.cross(is_bound=False)
    least = np.minimum(least, many.upper_us)
    for index in range(len(works)):
        yield Crossing(least[index], found[index], devices[:, index])


class _Many:
    """Stretches of one shape."""

    def __init__(self, layout: Layout, works: list[Work]) -> None:
        self._layout = layout
        # [launch, device, stretch]
        self._cost_us = np.stack([x.cost_us for x in works], axis=2)
        self._toll_us = np.stack([x.toll_us for x in works], axis=2)
        outline = works[0].outline
        tails = np.array(self._cost_us.transpose(0, 2, 1))
        for launch in range(len(tails) - 1, -1, -1):
            tails[launch] += after_us(outline, tails, launch)
        self._tail_us = np.ascontiguousarray(tails.transpose(0, 2, 1))
        # [stretch, device of the first gate, of the last]: with all between on either of the two.
        self.upper_us = _upper_us(outline, self._cost_us + self._toll_us)

    def cross(self, is_bound: bool) -> tuple[Floats, Ints, Bools]:
        """Crossings [stretch, first, last], placements [launch, stretch, first, last], which are exact."""
        layout, num = self._layout, self._cost_us.shape[1]
        many = self._cost_us.shape[2]
        most = self.upper_us.max(axis=2).ravel()
        rows, stretch = np.zeros((1, num, many)), np.arange(many)
        group = stretch * num
        is_exact = np.ones(many, dtype=np.bool_)
        trail: list[tuple[Ints, Ints]] = []
        for launch, move in enumerate(layout.moves[:-1]):
            rows, parent, device = advance(layout, move, rows, self._cost_us[launch].take(stretch, axis=1))
            stretch, group = stretch[parent], group[parent]
            if launch == 0:
                group = group + device
            rows += self._toll_us[launch][device, stretch]
            if launch < len(layout.moves) - 2:
                tails = self._tail_us.take(move.reader, axis=0).take(stretch, axis=2)
                ends = paths_us(move, rows, tails)
                keep = _kept(rows, ends, group, most)
                rows, group, ends = rows.take(keep, axis=2), group[keep], ends[keep]
                parent, device = parent[keep], device[keep]
                rows, group, chosen, full = _narrowed(rows, group, ends, is_bound)
                is_exact[full // num] = False
                parent, device, stretch = parent[chosen], device[chosen], group // num
            trail.append((parent, device))
        return *self._best(rows, group, trail), is_exact

    def _best(self, rows: Floats, group: Ints, trail: list[tuple[Ints, Ints]]) -> tuple[Floats, Ints]:
        """The best row of each group and device of the last gate, and where its launches ran."""
        num, many = self._cost_us.shape[1:]
        last = trail[-1][1]
        stop = rows[0, last, np.arange(len(last))]
        found = np.full((many * num, num), np.inf)
        at = np.zeros((many * num, num), dtype=np.int64)
        order = np.argsort(-stop, kind="stable")
        found[group[order], last[order]] = stop[order]
        at[group[order], last[order]] = order
        devices = []
        for parent, device in reversed(trail):
            devices.append(device[at])
            at = parent[at]
        placed = np.stack(devices[::-1]).reshape(-1, many, num, num)
        return found.reshape(many, num, num), placed


def _upper_us(outline: Outline, own_us: Floats) -> Floats:
    end, num = own_us.shape[0] - 2, own_us.shape[1]
    between, last = own_us[1:end].sum(axis=0).T, own_us[end].T
    nothing = np.zeros((num, num))
    leave = np.max([nothing, *(x.wait_us for x in outline.items[0])], axis=0)
    reach = [x.wait_us for made in outline.items[:end] for x in made if end in x.readers]
    arrive = np.max([nothing, *reach], axis=0)
    upper = np.minimum(between[:, :, None] + arrive, leave + between[:, None, :])
    return np.asarray(upper + last[:, None, :])


def _kept(rows: Floats, ends: Floats, group: Ints, most: Floats) -> Ints:
    """Rows that no other of their group beats; by group, the most promising first."""
    keep = np.flatnonzero(ends <= most[group])
    flat = rows.reshape(-1, rows.shape[2]).take(keep, axis=1)
    order = np.lexsort((np.minimum(flat, NEVER_US).sum(axis=0), ends[keep], group[keep]))
    own = group[keep[order]]
    # Rows of other groups are earlier in one of the two.
    flat = np.concatenate([flat.take(order, axis=1), own[None], -own[None]])
    left = [start + unbeaten(flat[:, start:stop]) for start, stop in _parts(own)]
    return np.asarray(keep[order[np.concatenate([np.zeros(0, dtype=np.int64), *left])]])


def _parts(group: Ints) -> Iterator[tuple[int, int]]:
    """Whole groups, of about as many rows as are compared fast."""
    starts = np.flatnonzero(np.diff(group, prepend=-1, append=-1)).tolist()
    begin = 0
    for start, stop in pairwise(starts):
        if stop - begin > SHARED_ROWS and start > begin:
            yield begin, start
            begin = start
    if len(group):
        yield begin, len(group)


def _narrowed(rows: Floats, group: Ints, ends: Floats, is_bound: bool) -> tuple[Floats, Ints, Ints, Ints]:
    """(rows, their groups, which they were, groups that had too many); merged, or the first of each."""
    names, starts, counts = np.unique(group, return_index=True, return_counts=True)
    full = names[counts > MOST_ROWS]
    everyone = np.arange(len(group))
    if not len(full):
        return rows, group, everyone, full
    if not is_bound:
        chosen = everyone[everyone - np.repeat(starts, counts) < MOST_ROWS]
        return rows.take(chosen, axis=2), group[chosen], chosen, full
    parts, picked = [], []
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        part = rows[:, :, start : start + count]
        if count > MOST_ROWS:
            part = merged(part.copy(), ends[start : start + count].copy(), MOST_ROWS)
        parts.append(part)
        picked.append(everyone[start : start + parts[-1].shape[2]])
    chosen = np.concatenate(picked)
    return np.concatenate(parts, axis=2), group[chosen], chosen, full
