"""The dependency graph: byte-exact hazards, versions, and what state ties together."""

import random

from factories import Touch, make_chain, make_trace
from tessera.analyze import build_graph, hazards, values
from tessera.ir import BufferKind, Hazard, Trace


def pairs(trace: Trace) -> set[tuple[int, int, str]]:
    """Edges as (src, dst, hazard)."""
    return {(e.src, e.dst, e.hazard.value) for e in hazards(trace)}


def test_a_reader_waits_for_the_writer() -> None:
    """Writing then reading the same bytes is RAW."""
    assert {(0, 1, "raw")} == pairs(make_trace([[(0, 0, 8, "w")], [(0, 0, 8, "r")]]))


def test_neighbouring_bytes_are_independent() -> None:
    """Ranges are half-open: [0, 8) and [8, 16) share no byte."""
    assert set() == pairs(make_trace([[(0, 0, 8, "w")], [(0, 8, 16, "r")]]))


def test_a_writer_waits_for_earlier_readers() -> None:
    """Reading then writing the same bytes is WAR."""
    trace = make_trace([[(0, 0, 8, "r")], [(0, 4, 12, "w")]], {0: BufferKind.INPUT})

    assert {(0, 1, "war")} == pairs(trace)


def test_two_writers_keep_their_order() -> None:
    """Writing the same bytes twice is WAW."""
    assert {(0, 1, "waw")} == pairs(make_trace([[(0, 0, 8, "w")], [(0, 0, 8, "w")]]))


def test_two_atomic_updates_keep_their_order() -> None:
    """A float sum depends on the order of its terms."""
    assert {(0, 1, "raw")} == pairs(make_trace([[(0, 0, 8, "a")], [(0, 0, 8, "a")]]))


def test_an_implied_edge_is_dropped() -> None:
    """a -> b -> c leaves no edge a -> c, although c reads what a wrote."""
    trace = make_trace([[(0, 0, 8, "w")], [(0, 0, 8, "r"), (1, 0, 8, "w")], [(0, 0, 8, "r"), (1, 0, 8, "r")]])

    assert {(0, 1, "raw"), (1, 2, "raw")} == pairs(trace)


def test_a_covering_write_ends_the_search() -> None:
    """A reader waits for the last writer of its bytes, not for the one before."""
    trace = make_trace([[(0, 0, 8, "w")], [(0, 0, 16, "w")], [(0, 0, 8, "r")]])

    assert {(0, 1, "waw"), (1, 2, "raw")} == pairs(trace)


def test_a_reader_of_two_halves_waits_for_both_writers() -> None:
    """A buffer filled in two parts is complete only after both."""
    trace = make_trace([[(0, 0, 32, "w")], [(0, 32, 64, "w")], [(0, 0, 64, "r")]])

    assert {(0, 2, "raw"), (1, 2, "raw")} == pairs(trace)


def naive_order(trace: Trace) -> set[tuple[int, int]]:
    """Every ordered pair of launches that must stay ordered, found byte by byte and closed transitively."""
    num = len(trace.launches)
    direct = {
        (i, j)
        for j in range(num)
        for i in range(j)
        for a in trace.launches[i].accesses
        for b in trace.launches[j].accesses
        if a.buffer == b.buffer and (a.write or b.write) and a.region.overlaps(b.region)
    }
    return closure(direct, num)


def closure(edges: set[tuple[int, int]], num: int) -> set[tuple[int, int]]:
    """All pairs joined by a path."""
    reach = {i: {i} for i in range(num)}
    for j in range(num):
        for i, k in edges:
            if k == j:
                reach[j] |= reach[i]
    return {(i, j) for j in range(num) for i in reach[j] if i != j}


def test_reduced_edges_imply_every_true_hazard_and_no_other() -> None:
    """On random traces, paths along edges are exactly the order that bytes demand."""
    rng = random.Random(7)
    for _ in range(60):
        launches: list[list[Touch]] = []
        for _ in range(12):
            touches: list[Touch] = []
            for _ in range(rng.randint(1, 3)):
                start = rng.randrange(0, 12)
                mode = rng.choice(["r", "w", "rw"])
                touches.append((rng.randrange(3), start, start + rng.randint(1, 4), mode))
            launches.append(touches)
        trace = make_trace(launches, size_bytes=16)

        found = closure({(e.src, e.dst) for e in hazards(trace)}, len(launches))

        assert naive_order(trace) == found


def test_edges_are_irredundant() -> None:
    """Removing any edge of a random graph loses some order."""
    rng = random.Random(3)
    launches: list[list[Touch]] = [
        [(rng.randrange(4), 0, 8, "r"), (rng.randrange(4), 0, 8, "w")] for _ in range(20)
    ]
    edges = {(e.src, e.dst) for e in hazards(make_trace(launches))}
    whole = closure(edges, 20)

    assert all(closure(edges - {edge}, 20) != whole for edge in edges)


def test_an_overwrite_makes_a_new_version() -> None:
    """Renaming: readers of the old version are not readers of the new one."""
    trace = make_trace([[(0, 0, 64, "w")], [(0, 0, 64, "r")], [(0, 0, 64, "w")], [(0, 0, 64, "r")]])

    assert [(0, (1,)), (2, (3,))] == [(v.producer, v.readers) for v in values(trace)]


def test_a_partial_write_reads_the_version_before() -> None:
    """Bytes that a write leaves alone live on in the next version."""
    trace = make_trace([[(0, 0, 64, "w")], [(0, 0, 8, "w")], [(0, 32, 64, "r")]])

    assert [(0, (1,)), (1, (2,))] == [(v.producer, v.readers) for v in values(trace)]


def test_a_value_is_as_large_as_its_readers_need() -> None:
    """Only the bytes between the first and last byte read have to move."""
    trace = make_trace([[(0, 0, 64, "w")], [(0, 8, 16, "r")], [(0, 24, 32, "r")]])
    (value,) = values(trace)

    assert (8, 32, 24) == (value.start, value.stop, value.num_bytes)


def test_launches_of_one_state_are_one_group() -> None:
    """State has a home: whoever reads or writes it is there."""
    trace = make_trace(
        [[(0, 0, 8, "rw")], [(1, 0, 8, "rw")], [(0, 0, 8, "r"), (2, 0, 8, "w")]],
        {0: BufferKind.STATE, 1: BufferKind.STATE},
    )

    assert ((0, 2), (1,)) == build_graph(trace).groups


def test_a_launch_that_reads_two_states_joins_their_groups() -> None:
    """An attention kernel that reads keys and values pulls both to one device."""
    trace = make_trace(
        [[(0, 0, 8, "rw")], [(1, 0, 8, "rw")], [(0, 0, 8, "r"), (1, 0, 8, "r")]],
        {0: BufferKind.STATE, 1: BufferKind.STATE},
    )

    assert ((0, 1, 2),) == build_graph(trace).groups


def test_a_chain_has_one_edge_a_link() -> None:
    """A chain of n launches has n - 1 dependencies, all RAW."""
    graph = build_graph(make_chain(50))

    assert 49 == len(graph.edges)
    assert {Hazard.RAW} == {e.hazard for e in graph.edges}
