"""Two-way choices by minimum cut: every item takes side 0 or side 1, exactly cheapest.

The cost is a sum of terms:
  own[i, s]     item i takes side s
  forward[v]    value v's producer takes side 0 and some reader takes side 1
  backward[v]   value v's producer takes side 1 and some reader takes side 0
A producer outside the choice (number -1) pays forward[v] whenever some reader takes side 1 and
backward[v] whenever some reader takes side 0.

Side 0 is the source's side. One auxiliary node per (value, direction) makes a value paid once however
many readers it has; with a single reader the direct edge says the same.

Capacities are integers, rounded down after scaling: the flow divided by the scale is a proved lower
bound of the cheapest choice, and the choice itself is within (edges cut) / scale of it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from tessera.plan.problem import Floats, Ints

# The largest flow after scaling: SciPy computes with 32-bit capacities, and two opposite ones are added.
MAX_FLOW = 2**30 - 2
# More than any flow: an edge clipped to this is never full, so it is never cut.
CLIP = MAX_FLOW + 1


@dataclass(frozen=True, eq=False)
class Network:
    """The fixed shape of a cut problem; the costs are given to `solve`."""

    num_items: int
    # Edge e of the network sums the capacities of the terms t with edge_of[t] == e.
    edge_of: Ints
    indptr: Ints
    indices: Ints
    # Which value each non-terminal term belongs to, and whether it prices the forward direction.
    term_value: Ints
    term_forward: npt.NDArray[np.bool_]
    num_network_nodes: int

    def solve(self, own: Floats, forward: Floats, backward: Floats) -> tuple[Ints, float]:
        """(side of every item, proved lower bound of the cost)."""
        base = own.min(axis=1) if self.num_items else np.zeros(0)
        to_sink, from_source = own[:, 0] - base, own[:, 1] - base
        terms = np.where(self.term_forward, forward[self.term_value], backward[self.term_value])
        caps = np.bincount(
            self.edge_of,
            weights=np.concatenate([from_source, to_sink, terms]),
            minlength=len(self.indices),
        )
        source, sink = self.num_network_nodes - 2, self.num_network_nodes - 1
        # Terms of outside producers leave the source and enter the sink too: count what the edges say.
        limit = min(caps[self.indptr[source] :].sum(), caps[self.indices == sink].sum())
        if limit <= 0:
            scaled, scale = (caps > 0).astype(np.int32), np.inf
        else:
            scale = MAX_FLOW / limit
            scaled = np.minimum(np.floor(caps * scale), CLIP).astype(np.int32)
        shape = (self.num_network_nodes, self.num_network_nodes)
        graph = csr_array((scaled, self.indices.astype(np.int32), self.indptr.astype(np.int32)), shape=shape)
        found = maximum_flow(graph, source, sink)
        residual = csr_array(graph - found.flow)
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reached = breadth_first_order(residual, source, return_predecessors=False)
        side = np.ones(self.num_network_nodes, dtype=np.int64)
        side[reached] = 0
        return side[: self.num_items], float(base.sum()) + found.flow_value / scale


def network(num_items: int, producer: Ints, pin_value: Ints, pin_item: Ints) -> Network:
    """Builds the shape: values with their producers (-1: outside) and their reading items."""
    num_values = len(producer)
    pins = np.bincount(pin_value, minlength=num_values)
    shared = np.flatnonzero(pins > 1)
    aux = np.full(num_values, -1, dtype=np.int64)
    aux[shared] = num_items + np.arange(len(shared))
    source = num_items + 2 * len(shared)
    sink = source + 1
    out_of = np.where(producer >= 0, producer, source)  # where the forward direction starts
    into = np.where(producer >= 0, producer, sink)  # where the backward direction ends
    lone = pins[pin_value] == 1
    back_aux = aux + len(shared)
    items = np.arange(num_items)
    forward_src = np.where(lone, out_of[pin_value], aux[pin_value])
    backward_dst = np.where(lone, into[pin_value], back_aux[pin_value])
    rows = np.concatenate(
        [np.full(num_items, source), items, forward_src, out_of[shared], pin_item, back_aux[shared]]
    )
    cols = np.concatenate(
        [items, np.full(num_items, sink), pin_item, aux[shared], backward_dst, into[shared]]
    )
    half = len(pin_value) + len(shared)
    term_forward = np.arange(2 * half) < half
    term_value = np.tile(np.concatenate([pin_value, shared]), 2)
    size = sink + 1
    keys, edge_of = np.unique(rows * size + cols, return_inverse=True)
    indptr = np.searchsorted(keys, np.arange(size + 1) * size)
    return Network(num_items, edge_of, indptr, keys % size, term_value, term_forward, size)
