"""pace: which launches and copies of a program keep time, and how long each takes.

On a stretched device every launch that costs time holds the device for its modelled time, and every copy that
touches such a device holds its link. Links of one group share one queue. In a profiled graph everything else
is stamped: a hold of nothing, in no queue. Who goes first on a device is decided as in `execute.schedule`; a
link serves who comes first.
"""

from collections.abc import Callable, Mapping

import torch

from tessera.execute.cuda import driver
from tessera.execute.cuda.issue import Pace, Pair, Track
from tessera.execute.cuda.stretch import Hold, launch_hold, link_hold, throttled_links
from tessera.execute.schedule import until_wait
from tessera.ir import Cluster, Plan, Program, Run

STAMP = Hold(0)


def make_queues(cluster: Cluster, num_slots: int) -> dict[Track, torch.Tensor]:
    """Stretched device or throttled link -> until when it is taken; a device has a place for each slot."""
    queues: dict[Track, torch.Tensor] = {}
    for number, device in enumerate(cluster.devices):
        if device.is_stretched:
            queues[number] = _words(device.ordinal, 1 + num_slots)
    groups: dict[str, torch.Tensor] = {}
    for (src, dst), link in throttled_links(cluster).items():
        word = groups.get(link.group) if link.group else None
        queues[src, dst] = _words(cluster.devices[dst].ordinal, 1) if word is None else word
        if link.group:
            groups[link.group] = queues[src, dst]
    return queues


def make_pace(
    program: Program, plan: Plan, queues: Mapping[Track, torch.Tensor], scale: float, is_profiled: bool
) -> Pace:
    """What keeps time in one program of a plan."""
    return Pace(
        _launches(program, plan, scale, is_profiled), _copies(program, plan, scale, is_profiled), queues
    )


def _launches(program: Program, plan: Plan, scale: float, is_profiled: bool) -> dict[Pair, Hold]:
    holds: dict[Pair, Hold] = {}
    for device, column in enumerate(program.instructions):
        stretched = plan.cluster.devices[device].is_stretched
        left = until_wait(column, _duration_us(program, plan, device)) if stretched else ()
        for position, instruction in enumerate(column):
            if not isinstance(instruction, Run):
                continue
            key = (instruction.launch, device)
            if stretched:
                us = plan.costs[program.step].us(instruction.launch, device)
                hold = launch_hold(us, scale, left[position])
                if hold.hold_ns or is_profiled:
                    holds[key] = hold
            elif is_profiled:
                holds[key] = STAMP
    return holds


def _copies(program: Program, plan: Plan, scale: float, is_profiled: bool) -> dict[int, Hold]:
    throttled = throttled_links(plan.cluster)
    holds: dict[int, Hold] = {}
    for number, transfer in enumerate(program.transfers):
        link = throttled.get((transfer.src, transfer.dst))
        if link is not None:
            holds[number] = link_hold(link, transfer.num_bytes, scale)
        elif is_profiled:
            holds[number] = STAMP
    return holds


def _duration_us(program: Program, plan: Plan, device: int) -> Callable[[object], float]:
    """The modelled time of an instruction; only launches take any."""

    def duration_us(instruction: object) -> float:
        if not isinstance(instruction, Run):
            return 0.0
        return plan.costs[program.step].us(instruction.launch, device)

    return duration_us


def _words(ordinal: int, num: int) -> torch.Tensor:
    return torch.zeros(num, dtype=torch.int64, device=driver.card(ordinal))
