"""Memory of temporaries: what a step holds besides weights and state, by liveness.

Every device runs its launches in trace order, so what it holds is a function of how far it has come.
A temporary is there from the first launch of that device that touches it to the last; an input from the
start of the step; an output to its end. A buffer that two devices touch is whole on both. The peak of a
request is that of its hungriest step, and every microbatch may stand at its peak at once, since a request
that waits for a transfer keeps what it holds while another runs.

Not counted: workspace inside kernels, what an allocator loses to fragments, copies on their way through
a link, and what a driver keeps for itself.
"""

from dataclasses import dataclass

import numpy as np

from tessera import ir
from tessera.plan.problem.arrays import Bools, Floats, Ints, Labels

KINDS = (ir.BufferKind.TEMPORARY, ir.BufferKind.INPUT, ir.BufferKind.OUTPUT)


@dataclass(frozen=True, eq=False)
class Temporaries:
    """One step's buffers that come and go, and the launches that touch them."""

    node_of: Ints
    num_bytes: Floats
    from_start: Bools
    to_end: Bools
    # Touches, ascending in launch.
    touch_buffer: Ints
    touch_launch: Ints

    def peak_bytes(self, labels: Labels, num_devices: int) -> Floats:
        """The most that each device holds at once for one request."""
        num_launches = len(self.node_of)
        if not len(self.touch_launch):
            return np.zeros(num_devices)
        key = self.touch_buffer * num_devices + labels[self.node_of[self.touch_launch]]
        first = np.full(len(self.num_bytes) * num_devices, -1, dtype=np.int64)
        last = first.copy()
        # Of repeated places the last assignment stays, and touches ascend.
        last[key] = self.touch_launch
        first[key[::-1]] = self.touch_launch[::-1]
        held = np.flatnonzero(last >= 0)
        buffer, device = held // num_devices, held % num_devices
        begin = np.where(self.from_start[buffer], 0, first[held])
        end = np.where(self.to_end[buffer], num_launches, last[held] + 1)
        width = num_launches + 1
        size = self.num_bytes[buffer]
        change = np.bincount(device * width + begin, weights=size, minlength=width * num_devices)
        change -= np.bincount(device * width + end, weights=size, minlength=width * num_devices)
        return np.asarray(change.reshape(num_devices, width).cumsum(axis=1).max(axis=1))


def temporaries_of(graph: ir.Graph, node_of: Ints) -> Temporaries:
    """The liveness of one step, ready for any placement."""
    buffers = graph.trace.buffers
    counted = [b.kind in KINDS for b in buffers]
    touches = [
        (launch, access.buffer)
        for launch, x in enumerate(graph.trace.launches)
        for access in x.accesses
        if counted[access.buffer]
    ]
    listed = np.array(touches, dtype=np.int64).reshape(-1, 2)
    return Temporaries(
        node_of,
        np.array([b.size_bytes for b in buffers], dtype=np.float64),
        np.array([b.kind is ir.BufferKind.INPUT for b in buffers], dtype=np.bool_),
        np.array([b.kind is ir.BufferKind.OUTPUT for b in buffers], dtype=np.bool_),
        listed[:, 1].copy(),
        listed[:, 0].copy(),
    )
