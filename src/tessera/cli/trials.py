"""Trials: the orders that `tessera verify` tries on one graph, and their results.

A legal order keeps every edge; a broken one reverses a pair of launches that only one class of edges orders.
A class without such a pair is implied by the others.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import torch

from tessera.analyze.graph import direct_hazards
from tessera.cli.verification import ClassTrial, FreshRequests, LegalOrders, Necessity
from tessera.errors import WorkerError
from tessera.execute.reference import GARBAGE_ERRORS, Replay, Replayed, differing, differing_buffers
from tessera.flow import workload_of
from tessera.ir import Edge, Graph, Hazard
from tessera.ir.graph import ancestors

Pair = tuple[int, int]

# Preference for launches late in the program: 1 runs them as early as edges allow, 0 is random.
EAGERNESS = (1.0, 0.0, 0.5)
RECORDED = 0


@dataclass(frozen=True, slots=True)
class EdgeClass:
    hazard: Hazard
    pairs: tuple[Pair, ...]
    others: tuple[Pair, ...]
    # Pairs that no path of the other classes orders.
    open: tuple[Pair, ...]


def legal_order(num_launches: int, pairs: Iterable[Pair], rng: random.Random, number: int = 1) -> list[int]:
    """A random order that keeps every pair; `number` selects its eagerness."""
    sorter = TopologicalSorter[int](dict.fromkeys(range(num_launches), ()))
    for src, dst in pairs:
        sorter.add(dst, src)
    sorter.prepare()
    eager = EAGERNESS[number % len(EAGERNESS)]
    rank = [(1 - eager) * rng.random() - eager * i / num_launches for i in range(num_launches)]
    ready: list[tuple[float, int]] = []
    order = []
    while sorter.is_active():
        for launch in sorter.get_ready():
            heapq.heappush(ready, (rank[launch], launch))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def edge_pairs(graph: Graph) -> list[Pair]:
    return [(e.src, e.dst) for e in graph.edges]


def value_pairs(graph: Graph) -> list[Pair]:
    """Producers come before readers if every version of a buffer has its own memory."""
    return [(v.producer, r) for v in graph.values if v.producer is not None for r in v.readers]


def edge_classes(direct: Sequence[Edge], num_launches: int) -> tuple[EdgeClass, ...]:
    """Classes of the hazards before reduction (see `direct_hazards`)."""
    classes = []
    for hazard in Hazard:
        pairs = tuple(dict.fromkeys((e.src, e.dst) for e in direct if e.hazard is hazard))
        others = tuple(dict.fromkeys((e.src, e.dst) for e in direct if e.hazard is not hazard))
        above = ancestors(num_launches, others)
        open_pairs = tuple((src, dst) for src, dst in pairs if not above[dst] >> src & 1)
        classes.append(EdgeClass(hazard, pairs, others, open_pairs))
    return tuple(classes)


def order_without(
    edges: EdgeClass, num_launches: int, rng: random.Random, number: int
) -> tuple[Pair, list[int]]:
    """A pair of this class, and an order that reverses it and keeps the other classes."""
    src, dst = rng.choice(edges.open)
    return (src, dst), legal_order(num_launches, [*edges.others, (dst, src)], rng, number)


Tensors = Mapping[str, torch.Tensor]


class Trials:
    """One request of a graph: the model's own run, and replays compared with it."""

    def __init__(self, graph: Graph, num_orders: int, seed: int, advance: Callable[[str], None]) -> None:
        self._graph, self._num_orders, self._advance = graph, num_orders, advance
        self._num = len(graph.trace.launches)
        self._rng = random.Random(seed)
        workload, self._inputs = workload_of(graph.trace).varied()
        self._workload = workload
        inputs, state = workload.make_inputs(RECORDED), workload.make_state(RECORDED)
        self._replay = Replay(graph.trace, workload.weights(), inputs, state)
        advance("running the model")
        outputs, final_state = self._run_model(inputs, state)
        advance("replaying in program order")
        first = self._replay.run_in_program_order()
        self._model = Replayed(outputs, final_state, first.memory)
        # If program order differs, no order can be right.
        self._differs = differing(self._model, first)
        # Buffers whose final bytes do not depend on the order, known after the legal orders.
        self._settled = set(first.memory)

    def _run_model(self, inputs: Tensors, state: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
        final_state = {name: t.clone() for name, t in state.items()}
        outputs = self._workload.run({name: t.clone() for name, t in inputs.items()}, final_state)
        return dict(outputs), final_state

    def fresh(self, num: int) -> FreshRequests:
        """Launches in program order against the model itself, on other inputs."""
        weights, equal, differs = self._workload.weights(), 0, dict[str, None]()
        for seed in range(RECORDED + 1, RECORDED + 1 + num):
            inputs, state = self._workload.make_inputs(seed), self._workload.make_state(seed)
            outputs, final_state = self._run_model(inputs, state)
            try:
                replayed = Replay(self._graph.trace, weights, inputs, state).run_in_program_order()
                names = differing(Replayed(outputs, final_state, {}), replayed)
            except WorkerError as error:  # a result of another shape than the recorded one
                names = [error.message]
            equal += not names
            differs |= dict.fromkeys(names)
            self._advance(f"fresh request {seed}")
        return FreshRequests(requests=num, equal=equal, differs=tuple(differs), inputs=self._inputs)

    def legal(self) -> LegalOrders:
        equal = renamed_equal = 0
        edges, versions = edge_pairs(self._graph), value_pairs(self._graph)
        for number in range(self._num_orders):
            result = self._replay.run(legal_order(self._num, edges, self._rng, number))
            equal += not differing(self._model, result)
            self._settled -= differing_buffers(self._model, result)
            self._advance(f"legal order {number + 1}")
        for number in range(self._num_orders):
            order = legal_order(self._num, versions, self._rng, number)
            renamed_equal += not differing(self._model, self._replay.run_renamed(order, self._graph.values))
            self._advance(f"renamed order {number + 1}")
        return LegalOrders(
            orders=self._num_orders,
            equal=equal,
            renamed_equal=renamed_equal,
            program_order_differs=tuple(self._differs),
        )

    def classes(self) -> tuple[ClassTrial, ...]:
        """Call after `legal`."""
        direct = direct_hazards(self._graph.trace)
        return tuple(self._class(edges) for edges in edge_classes(direct, self._num))

    def _class(self, edges: EdgeClass) -> ClassTrial:
        tried, differed = self._num_orders if edges.open else 0, 0
        for number in range(tried):
            differed += self._differs_in(order_without(edges, self._num, self._rng, number)[1])
            self._advance(f"without {edges.hazard.upper()}: {number + 1}")
        necessity = Necessity.SHOWN if differed else Necessity.NOT_SHOWN
        if not edges.open:
            necessity = Necessity.IMPLIED if edges.pairs else Necessity.ABSENT
        return ClassTrial(
            hazard=edges.hazard.upper(),
            edges=sum(e.hazard is edges.hazard for e in self._graph.edges),
            hazards=len(edges.pairs),
            implied=len(edges.pairs) - len(edges.open),
            orders=tried,
            differed=differed,
            necessary=necessity,
        )

    def _differs_in(self, order: list[int]) -> bool:
        """Whether a broken order differs in results or settled memory."""
        try:
            result = self._replay.run(order)
        except GARBAGE_ERRORS:
            return True
        return bool(differing(self._model, result) or differing_buffers(self._model, result) & self._settled)
