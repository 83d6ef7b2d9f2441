"""Overlap: whether a step may be queued behind the running one of its microbatch, on several devices.

Transfers land in the same places in every step, so before a device sends in the next step, the receiver must
have used what it received in the last one. A lane queues only if its transfers assure this:

    the sender has heard, in the last step, from behind that use (directly or by way of others), or
    it has heard, in the next step, from a device that knew of it when its share of the last one ended.

Nearly all served lanes qualify: the choice of tokens depends on everything before it. Lanes that move state
between steps, or whose steps use different devices, do not.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.execute.lower import LoweredRun, StepLowering, UnitLowering, outputs_of
from tessera.ir import Lane, Plan, Trace

Pair = tuple[int, int]
ALL = 1 << 62


@dataclass(frozen=True)
class StepOrder:
    """What devices know of one another in a step. Events of a device are its sends and receives."""

    devices: frozenset[int]
    # [device]: its vector clock at the end of its share, events of each device.
    clocks: tuple[tuple[int, ...], ...]
    # Event of the destination after its last use of what it received.
    needed: dict[Pair, int]
    # Devices that have begun the step when the source first sends to the destination.
    begun: dict[Pair, frozenset[int]]

    def can_precede(self, following: "StepOrder") -> bool:
        return self.devices == following.devices and all(
            max(self.clocks[device][pair[1]] for device in begun) >= self.needed.get(pair, 0)
            for pair, begun in following.begun.items()
        )


def can_overlap(plan: Plan, lane: Lane) -> bool:
    unit = UnitLowering(plan.unit, len(plan.cluster.devices))
    if any(unit.moves(lane.placement)):
        return False
    orders = [order_of(step, place) for step, place in zip(unit.steps, lane.placement.devices, strict=True)]
    return all(one.can_precede(other) for one in orders for other in orders)


def order_of(step: StepLowering, place: Sequence[int]) -> StepOrder:
    run, num = step.run(place), step.num_devices
    clocks = [[0] * num for _ in range(num)]
    begun = [frozenset({device}) for device in range(num)]
    first: dict[Pair, frozenset[int]] = {}
    sent: dict[int, tuple[list[int], frozenset[int]]] = {}
    position, ready = [0] * num, list(range(num))
    while ready:
        device = ready.pop()
        for _, is_send, number in run.points[device][position[device] :]:
            if not is_send and number not in sent:
                break
            position[device] += 1
            clocks[device][device] += 1
            transfer = run.transfers[number]
            if is_send:
                sent[number] = list(clocks[device]), begun[device]
                first.setdefault((device, transfer.dst), begun[device])
                ready.append(transfer.dst)
            else:
                clock, others = sent[number]
                clocks[device] = [max(pair) for pair in zip(clocks[device], clock, strict=True)]
                begun[device] |= others
    for device in range(num):
        clocks[device][device] = ALL
    devices = frozenset({*place, *(device for _, device in outputs_of(step.graph, place))})
    return StepOrder(devices, tuple(map(tuple, clocks)), _needed(step.graph.trace, place, run), first)


def _needed(trace: Trace, place: Sequence[int], run: LoweredRun) -> dict[Pair, int]:
    """Received buffers are used where they land."""
    last: dict[Pair, int] = {}
    for number, launch in enumerate(trace.launches):
        named = {view.buffer for view in launch.views} | {access.buffer for access in launch.accesses}
        last |= {(place[number], buffer): number for buffer in named}
    # Outputs are read after the end, and buffers that are sent on by streams of their own.
    lasting = {(device, view.buffer) for device in range(len(run.points)) for _, view in trace.outputs}
    lasting |= {(transfer.src, transfer.buffer) for transfer in run.transfers}
    needed: dict[Pair, int] = {}
    for transfer in run.transfers:
        pair, points = (transfer.src, transfer.dst), run.points[transfer.dst]
        used = (last.get((transfer.dst, transfer.buffer), -1), 1)
        behind = bisect_left(points, used, key=lambda point: point[:2]) + 1
        is_lasting = (transfer.dst, transfer.buffer) in lasting or behind > len(points)
        needed[pair] = max(needed.get(pair, 0), ALL if is_lasting else behind)
    return needed
