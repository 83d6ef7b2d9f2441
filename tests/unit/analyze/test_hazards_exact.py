"""Hazards against a count of bytes: strided regions, views that overlap, buffers that many launches touch."""

import dataclasses
import random
from collections.abc import Callable

import pytest

from tessera.analyze.graph import direct_hazards, hazards
from tessera.ir import (
    Access,
    Buffer,
    BufferKind,
    Hazard,
    Kernel,
    Launch,
    Origin,
    Region,
    Step,
    Trace,
    View,
    region,
)

SIZE = 96
Bits = dict[int, int]  # buffer -> one bit for every byte


def bytes_of(part: Region) -> int:
    """The bytes of a region as bits."""
    starts = [part.start]
    for n, stride in part.dims:
        starts = [s + i * stride for s in starts for i in range(n)]
    found = 0
    for start in starts:
        found |= ((1 << part.item_bytes) - 1) << start
    return found


def random_region(rng: random.Random, size_bytes: int) -> Region:
    """A strided region inside a buffer; strides may be such that elements overlap."""
    while True:
        dims = tuple((rng.randint(1, 5), rng.randint(1, 24)) for _ in range(rng.randint(0, 3)))
        found = region(rng.randrange(size_bytes), rng.randint(1, 8), dims)
        if found is not None and found.stop <= size_bytes:
            return found


def trace_of(launches: list[list[Access]], size_bytes: int = SIZE) -> Trace:
    """A trace of temporaries."""
    num = 1 + max(a.buffer for x in launches for a in x)
    buffers = tuple(Buffer(f"b{i}", BufferKind.TEMPORARY, size_bytes) for i in range(num))
    made = tuple(Launch(0, (), (), (), tuple(x)) for x in launches)
    return Trace(Step("made", "decode", 1, 1), (Kernel("k", Origin.ATEN),), buffers, made, ())


def random_trace(rng: random.Random, num_launches: int, num_buffers: int, size_bytes: int = SIZE) -> Trace:
    """Reads, writes and updates of random strided regions."""
    modes = [(True, False, False), (False, True, False), (True, True, False), (False, False, True)]
    launches = []
    for _ in range(num_launches):
        accesses = []
        for _ in range(rng.randint(1, 3)):
            read, write, atomic = rng.choice(modes)
            part = random_region(rng, size_bytes)
            accesses.append(Access(rng.randrange(num_buffers), part, read, write, atomic))
        launches.append(accesses)
    return trace_of(launches, size_bytes)


def touched(launch: Launch, counts: Callable[[Access], bool]) -> Bits:
    """What a launch's accesses of one kind touch."""
    found: Bits = {}
    for access in launch.accesses:
        if counts(access):
            found[access.buffer] = found.get(access.buffer, 0) | bytes_of(access.region)
    return found


def meet(a: Bits, b: Bits) -> bool:
    """True iff a byte is in both."""
    return any(bits & b.get(buffer, 0) for buffer, bits in a.items())


def true_ancestors(trace: Trace) -> list[set[int]]:
    """ancestors[launch], byte by byte: every pair of which one writes what the other touches."""
    writes = [touched(x, lambda a: a.write or a.atomic) for x in trace.launches]
    both = [touched(x, lambda a: True) for x in trace.launches]
    above: list[set[int]] = []
    for j in range(len(trace.launches)):
        mine: set[int] = set()
        for i in range(j):
            if meet(writes[i], both[j]) or meet(both[i], writes[j]):
                mine |= above[i] | {i}
        above.append(mine)
    return above


def found_ancestors(trace: Trace) -> list[set[int]]:
    """ancestors[launch] along the edges that were found."""
    above: list[set[int]] = [set() for _ in trace.launches]
    for edge in hazards(trace):
        above[edge.dst] |= above[edge.src] | {edge.src}
    return above


@pytest.mark.parametrize("seed", range(20))
def test_paths_are_exactly_the_order_that_bytes_demand(seed: int) -> None:
    """Strided, overlapping and self-overlapping regions of few buffers, counted byte by byte."""
    trace = random_trace(random.Random(seed), 25, 3)

    assert true_ancestors(trace) == found_ancestors(trace)


@pytest.mark.parametrize("seed", range(6))
def test_a_buffer_that_everybody_touches_is_exact_too(seed: int) -> None:
    """Many small accesses of one large buffer: filing them on shelves loses no hazard and adds none."""
    trace = random_trace(random.Random(seed), 150, 1, 2000)

    assert true_ancestors(trace) == found_ancestors(trace)


def test_columns_on_shelves_are_exact() -> None:
    """Column blocks of a matrix, whose shelves divide one row, and pieces that run on into the next row."""
    rng = random.Random(5)
    launches = []
    for _ in range(120):
        first = rng.randrange(60)
        part = region(first * 4, 4, ((8, 256), (rng.randint(1, 4), 4)))
        if rng.random() < 0.2:
            part = Region(256 * rng.randint(1, 6) - 8, 16)
        assert part is not None
        how = rng.random()
        launches.append([Access(0, part, read=how > 0.4, write=how < 0.7)])
    trace = trace_of(launches, 2048)

    assert true_ancestors(trace) == found_ancestors(trace)


def test_no_edge_is_implied_by_others() -> None:
    """On strided regions too, removing any edge loses some order."""
    trace = random_trace(random.Random(11), 40, 3)
    above = found_ancestors(trace)
    edges = hazards(trace)
    for edge in edges:
        others = [e.src for e in edges if e.dst == edge.dst and e.src != edge.src]

        assert all(edge.src not in above[src] for src in others)


def test_a_long_chain_is_reduced_exactly() -> None:
    """Launches that read recent results of others, several hundred deep."""
    rng = random.Random(2)
    launches = []
    for i in range(400):
        read = (
            [Access(rng.randrange(max(0, i - 6), i), Region(0, 8), read=True) for _ in range(2)] if i else []
        )
        launches.append([*read, Access(i, Region(0, 8), write=True)])
    trace = trace_of(launches)

    assert true_ancestors(trace) == found_ancestors(trace)


def test_a_new_buffer_is_made_whole() -> None:
    """A result with gaps is still the launch that makes the buffer: a write into a gap waits for it."""
    view = View(0, "float32", (2, 1), (8, 1))
    part, gap = region(0, 4, ((2, 32),)), Region(8, 4)
    assert part is not None
    trace = trace_of([[Access(0, part, write=True)], [Access(0, gap, write=True)]])
    maker = dataclasses.replace(trace.launches[0], outputs=(view,))
    made = dataclasses.replace(trace, launches=(maker, trace.launches[1]))

    assert () == hazards(trace)
    assert [(0, 1, Hazard.WAW)] == [(e.src, e.dst, e.hazard) for e in hazards(made)]


def test_a_pair_is_listed_once_for_each_reason() -> None:
    """An update in place of what was written is RAW and WAW; one of what was updated is WAR as well."""
    update = Access(0, Region(0, 8), read=True, write=True)
    trace = trace_of([[Access(0, Region(0, 8), write=True)], [update], [update]])
    found = {(e.src, e.dst, e.hazard.value) for e in direct_hazards(trace)}

    assert {(0, 1, "raw"), (0, 1, "waw"), (1, 2, "raw"), (1, 2, "waw"), (1, 2, "war")} == found


@pytest.mark.parametrize("is_column", [False, True])
def test_disjoint_slices_are_not_compared_with_each_other(
    is_column: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache written by a thousand disjoint rows or columns costs a few comparisons each, not a thousand."""
    num = 1000
    compared = 0
    decide = Region.covers

    def count(self: Region, other: Region) -> bool:
        nonlocal compared
        compared += 1
        return decide(self, other)

    monkeypatch.setattr(Region, "covers", count)
    monkeypatch.setattr(Region, "overlaps", lambda a, b: count(a, b) and False)
    parts = [region(i * 4, 4, ((8, num * 4),)) if is_column else Region(i * 32, 32) for i in range(num)]
    launches = [[Access(0, part, write=True)] for part in parts if part is not None]

    assert () == hazards(trace_of(launches, num * 32))
    assert compared < 20 * num


def test_readers_of_a_weight_are_skipped() -> None:
    """A buffer that nobody writes orders nothing, however many read it."""
    launches = [[Access(0, Region(0, 8), read=True)] for _ in range(100)]

    assert () == hazards(trace_of(launches))
