"""How long a step still lasts after certain launches, by adding up what lies between them.

Gates are launches of which each waits for the one before. Between two gates g and h lie the launches that
wait for g and that h waits for. None of them starts before g has ended, so with g on device a and h on b the
time from g's end to h's is at least that of the launches between alone, on devices that do nothing else
(`latency_stretch`). What these crossings add up to, over the best devices of the gates, is a lower bound
whatever else the step has to do. It follows long chains of layers, with all that is parallel inside a layer,
which paths of single launches and sums of work do not; and the placements of the stretches, put together,
are a good placement of the step.

Gates are chosen so that as much work as possible lies between them and few values bypass them. Nothing is
gained where no launch separates what is before it from what is after it, as in random graphs.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from tessera.plan.arrays import Bools, Floats, Ints
from tessera.plan.latency_layout import GROUP, NEVER_US, Outline, Work, after_us
from tessera.plan.latency_stretch import Crossing, Stretch

# Launches from a gate to the next, at most.
REACH = 128
# What a gate is worth, as a share of all work: enough to prefer short stretches where nothing is lost.
GATE_SHARE = 1e-7
# How much of the wait for a value counts against a gate that it bypasses.
BYPASS_SHARE = 0.1


def tails_of(work: Work, stretches: Sequence[Stretch], crossings: Sequence[Crossing]) -> Floats:
    """[launch, device]: from the launch's start there to the end, no placement takes less."""
    crossed = {s.members[0]: (s.members[-1], c.least_us) for s, c in zip(stretches, crossings, strict=True)}
    tails = np.array(work.cost_us)
    for launch in range(len(tails) - 1, -1, -1):
        after = after_us(work.outline, tails, launch)
        if launch in crossed:
            gate, least_us = crossed[launch]
            least = least_us + (tails[gate] - work.cost_us[gate])
            np.maximum(after, np.minimum(least.min(axis=1), NEVER_US), out=after)
        tails[launch] += after
    return tails


def put_together(stretches: Sequence[Stretch], crossings: Sequence[Crossing], tails: Floats) -> Ints:
    """Devices of the launches between gates, on the gates' best devices; -1 for all other launches."""
    devices = np.full(len(tails) - 1, -1)
    if not stretches:
        return devices
    rest = tails[stretches[-1].members[-1]]
    choices = []
    for crossing in reversed(crossings):
        total = crossing.found_us + rest
        choices.append(total.argmin(axis=1))
        rest = total.min(axis=1)
    here = int(rest.argmin())
    if not np.isfinite(rest[here]):
        return devices
    for stretch, crossing, choice in zip(stretches, crossings, reversed(choices), strict=True):
        there = int(choice[here])
        devices[list(stretch.members)] = crossing.devices[:, here, there]
        here = there
    return devices


def gates_of(outline: Outline, cost_us: Floats) -> list[tuple[int, int]]:
    """Pairs of consecutive gates, with as much work between them as possible."""
    own = cost_us.min(axis=1)
    num = len(own)
    worth = own + GATE_SHARE * own.sum() - BYPASS_SHARE * _bypass_us(outline)
    best, before = np.zeros(num), np.full(num, -1)
    for low, start, reaches, between in _windows(outline, own):
        for gate in range(start, min(start + REACH, num)):
            first = max(low, gate - REACH)
            rows, column = slice(first - low, gate - low), gate - low
            value = np.where(reaches[rows, column], best[first:gate] + between[rows, column], 0.0)
            if len(value) and value.max() > 0.0:
                before[gate] = first + int(value.argmax())
                best[gate] = value.max()
            best[gate] += worth[gate]
    gate = int(best.argmax()) if num else -1
    found = []
    while gate >= 0:
        found.append(gate)
        gate = int(before[gate])
    return list(pairwise(found[::-1]))


def _windows(outline: Outline, own: Floats) -> Iterator[tuple[int, int, Bools, Floats]]:
    """Every so many launches, with as many before: who waits for whom, and the work between the two."""
    num = len(own)
    for start in range(0, num, REACH):
        low, stop = max(0, start - REACH), min(num, start + REACH)
        size = stop - low
        mask, length = (1 << size) - 1, -(-size // 8)
        packed = b"".join(
            (outline.above[x] >> low & mask).to_bytes(length, "little") for x in range(low, stop)
        )
        bits = np.frombuffer(packed, np.uint8).reshape(size, length)
        waits = np.unpackbits(bits, axis=1, bitorder="little")[:, :size]
        reaches = np.ascontiguousarray(waits.T.astype(np.float32))
        between = (reaches * own[low:stop].astype(np.float32)) @ reaches
        yield low, start, reaches > 0, between.astype(np.float64)


def _bypass_us(outline: Outline) -> Floats:
    """Of each launch: the waits of values that reach from before it, where it waits for them, to after it."""
    num = len(outline.items) - 1
    total = np.zeros(num)
    apart = ~np.eye(len(outline.least_wait_us), dtype=np.bool_)
    for producer, made in enumerate(outline.items):
        for item in made:
            last = item.readers[-1]
            if item.num_bytes < GROUP or last - producer > REACH or last >= num or not apart.any():
                continue
            wait = min(float(item.wait_us[apart].min()), NEVER_US)
            for launch in range(producer + 1, last):
                if outline.above[launch] >> producer & 1:
                    total[launch] += wait
    return total
