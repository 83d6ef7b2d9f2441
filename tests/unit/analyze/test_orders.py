"""Orders: what may run when, and orders that break one rule on purpose."""

import random

import pytest

from factories import make_trace
from tessera.analyze import build_graph
from tessera.analyze.graph import direct_hazards
from tessera.cli.trials import (
    EdgeClass,
    edge_classes,
    edge_pairs,
    legal_order,
    order_without,
    value_pairs,
)
from tessera.ir import BufferKind, Graph, Hazard, Trace


def make_graph() -> Graph:
    """0 makes a; 1 reads it; 2 overwrites it; 3 and 4 write overlapping halves of b; 5 reads all."""
    return build_graph(
        make_trace(
            [
                [(0, 0, 8, "w")],
                [(0, 0, 8, "r"), (2, 0, 8, "w")],
                [(0, 0, 8, "w")],
                [(1, 0, 6, "w")],
                [(1, 4, 8, "w")],
                [(0, 0, 8, "r"), (1, 0, 8, "r"), (2, 0, 8, "r"), (3, 0, 8, "w")],
            ]
        )
    )


def class_of(trace: Trace, hazard: Hazard) -> EdgeClass:
    """One class of a trace's edges."""
    return next(c for c in edge_classes(direct_hazards(trace), len(trace.launches)) if c.hazard is hazard)


@pytest.mark.parametrize("number", range(6))
def test_a_legal_order_keeps_every_pair(number: int) -> None:
    """However eager, an order has each launch once and every edge forward."""
    graph = make_graph()
    order = legal_order(6, edge_pairs(graph), random.Random(number), number)

    assert list(range(6)) == sorted(order)
    assert all(order.index(src) < order.index(dst) for src, dst in edge_pairs(graph))


def test_the_eager_order_runs_ahead() -> None:
    """Order number 0 always takes the latest launch that is ready."""
    assert [2, 1, 0] == legal_order(3, [], random.Random(0), 0)


def test_pairs_that_contradict_each_other_are_an_error() -> None:
    """No order is made up for a cycle."""
    with pytest.raises(ValueError, match="in a cycle"):
        legal_order(2, [(0, 1), (1, 0)], random.Random(0))


def test_an_overwrite_behind_a_reader_is_an_open_war() -> None:
    """Nothing but the WAR edge keeps the second writer behind the reader."""
    found = class_of(make_graph().trace, Hazard.WAR)

    assert ((1, 2),) == found.open


def test_an_overwrite_behind_a_reader_implies_its_waw() -> None:
    """Writer, reader, writer: RAW and WAR keep the writers in order; halves without a reader are open."""
    found = class_of(make_graph().trace, Hazard.WAW)

    assert ((0, 2), (3, 4)) == found.pairs
    assert ((3, 4),) == found.open


def test_a_class_that_does_not_occur_has_no_pairs() -> None:
    """A chain of fresh results has RAW alone."""
    trace = make_trace([[(0, 0, 8, "w")], [(0, 0, 8, "r"), (1, 0, 8, "w")]])

    assert () == class_of(trace, Hazard.WAR).pairs


@pytest.mark.parametrize("hazard", list(Hazard))
def test_an_order_without_a_class_breaks_that_class_alone(hazard: Hazard) -> None:
    """The chosen pair is turned round; pairs of the other classes are kept."""
    found = class_of(make_graph().trace, hazard)
    (src, dst), order = order_without(found, 6, random.Random(1), 1)

    assert order.index(dst) < order.index(src)
    assert all(order.index(a) < order.index(b) for a, b in found.others)


def test_renamed_memory_needs_makers_before_readers_only() -> None:
    """An overwritten temporary is a new version: its writer waits for nobody."""
    trace = make_trace(
        [[(0, 0, 64, "w")], [(0, 0, 64, "r"), (1, 0, 64, "w")], [(0, 0, 64, "w")]], {1: BufferKind.OUTPUT}
    )

    assert [(0, 1)] == value_pairs(build_graph(trace))
