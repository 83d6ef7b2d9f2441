"""Orders: in which sequences the launches of a graph may run, and sequences that break one rule of it.

An order is legal if every edge points forward in it. A broken order keeps all but one thing: one class of
edges is taken away, and for one pair that nothing else keeps in order the later launch runs first.
A class none of whose pairs can be turned round is implied by the other classes: no order breaks it alone.
"""

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.ir import Edge, Graph, Hazard

Pair = tuple[int, int]

# How strongly orders prefer launches that come late in the program, one order after the other: 1 runs
# ahead as far as edges let it, 0 is pure chance.
EAGERNESS = (1.0, 0.0, 0.5)


@dataclass(frozen=True, slots=True)
class EdgeClass:
    """One class of hazards, and what is left without it."""

    hazard: Hazard
    # Every pair of launches with a hazard of this class.
    pairs: tuple[Pair, ...]
    # Pairs of the other classes.
    others: tuple[Pair, ...]
    # Pairs of this class that no path of the others keeps in order.
    open: tuple[Pair, ...]


def legal_order(num_launches: int, pairs: Iterable[Pair], rng: random.Random, number: int = 1) -> list[int]:
    """A random order in which every pair points forward; `number` picks how eager it is."""
    waits = [0] * num_launches
    after: list[list[int]] = [[] for _ in range(num_launches)]
    for src, dst in set(pairs):
        waits[dst] += 1
        after[src].append(dst)
    eager = EAGERNESS[number % len(EAGERNESS)]
    rank = [(1 - eager) * rng.random() - eager * i / num_launches for i in range(num_launches)]
    ready = [(rank[i], i) for i in range(num_launches) if waits[i] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, launch = heapq.heappop(ready)
        order.append(launch)
        for later in after[launch]:
            waits[later] -= 1
            if waits[later] == 0:
                heapq.heappush(ready, (rank[later], later))
    if len(order) != num_launches:
        raise ValueError("the pairs contradict each other: no order satisfies them all")
    return order


def edge_pairs(graph: Graph) -> list[Pair]:
    """What must precede what on shared memory."""
    return [(e.src, e.dst) for e in graph.edges]


def value_pairs(graph: Graph) -> list[Pair]:
    """What must precede what where every version of a buffer has memory of its own: makers before readers."""
    return [(v.producer, r) for v in graph.values if v.producer is not None for r in v.readers]


def edge_classes(direct: Sequence[Edge], num_launches: int) -> tuple[EdgeClass, ...]:
    """The classes of a graph, from its hazards before reduction (see `direct_hazards`)."""
    found = []
    for hazard in Hazard:
        pairs = tuple(dict.fromkeys((e.src, e.dst) for e in direct if e.hazard is hazard))
        others = tuple(dict.fromkeys((e.src, e.dst) for e in direct if e.hazard is not hazard))
        above = _ancestors(others, num_launches)
        unkept = tuple((src, dst) for src, dst in pairs if not above[dst] >> src & 1)
        found.append(EdgeClass(hazard, pairs, others, unkept))
    return tuple(found)


def order_without(
    edges: EdgeClass, num_launches: int, rng: random.Random, number: int
) -> tuple[Pair, list[int]]:
    """An order that the other classes allow and that turns one pair of this class round; and that pair."""
    src, dst = rng.choice(edges.open)
    return (src, dst), legal_order(num_launches, [*edges.others, (dst, src)], rng, number)


def order_against(graph: Graph, edge: Edge, rng: random.Random, number: int) -> list[int]:
    """An order that turns one edge round and keeps all others: legal but for that edge."""
    kept = [pair for pair in edge_pairs(graph) if pair != (edge.src, edge.dst)]
    return legal_order(len(graph.trace.launches), [*kept, (edge.dst, edge.src)], rng, number)


def _ancestors(pairs: Iterable[Pair], num_launches: int) -> list[int]:
    """ancestors[launch]: one bit for every launch from which a path leads to it."""
    sources: list[list[int]] = [[] for _ in range(num_launches)]
    for src, dst in pairs:
        sources[dst].append(src)
    above: list[int] = []
    for listed in sources:
        reach = 0
        for src in listed:
            reach |= above[src] | 1 << src
        above.append(reach)
    return above
