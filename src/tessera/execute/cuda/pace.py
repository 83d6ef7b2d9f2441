"""pace: which launches and sends of one device keep time, and how long each takes.

On a stretched device every launch that costs time holds the device for its modelled time, and every send on a
link that touches such a device holds the link. In a profiled graph everything else is stamped: a hold of
nothing, in no queue. Who goes first on a device is decided as in `execute.schedule`; a link serves who comes
first. Each sender keeps its own links' time: links of a group that several devices send on share a bus only
as far as one device's sends go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tessera.execute.cuda.stretch import Hold, launch_hold, link_hold, throttled_links
from tessera.execute.schedule import until_wait
from tessera.ir import Cluster, Link, Program, Run

STAMP = Hold(0)


@dataclass(frozen=True)
class Pace:
    """How long things take in one program where that is not left to the card. Missing: no turnstile.

    A hold without a queue stamps: nothing waits for anything but its own end.
    """

    # launch -> hold
    launches: Mapping[int, Hold] = field(default_factory=dict)
    # transfer -> hold of its link; also of those that arrive here, for their latency
    transfers: Mapping[int, Hold] = field(default_factory=dict)


class Clockwork:
    """The times of one device: its queue, those of the links it sends on, and the pace of its programs."""

    def __init__(
        self,
        cluster: Cluster,
        device: int,
        us: Sequence[Sequence[float]],
        num_microbatches: int,
        scale: float,
        is_profiled: bool,
        card: torch.device,
        keeps_links: bool = True,
    ) -> None:
        """`us[step][launch]`: modelled time on this device; empty where it keeps its own.

        `keeps_links`: links take their modelled time; else what their transport takes.
        """
        self._device, self._us, self._scale, self._is_profiled = device, us, scale, is_profiled
        self._is_stretched = cluster.devices[device].is_stretched
        self._links: Mapping[tuple[int, int], Link] = throttled_links(cluster) if keeps_links else {}
        # Until when the device is taken, and a place for each microbatch that waits for it.
        self.queue = _words(1 + num_microbatches, card) if self._is_stretched else None
        # Destination -> until when the link there is taken.
        self.wires: dict[int, torch.Tensor] = {}
        groups: dict[str, torch.Tensor] = {}
        for (src, dst), link in self._links.items():
            if src == device:
                word = groups.get(link.group) if link.group else None
                self.wires[dst] = groups[link.group] = _words(1, card) if word is None else word

    def pace(self, program: Program) -> Pace:
        """What keeps time in one program."""
        return Pace(self._launches(program), self._transfers(program))

    def _launches(self, program: Program) -> dict[int, Hold]:
        column = program.instructions[self._device]
        runs = [(at, x.launch) for at, x in enumerate(column) if isinstance(x, Run)]
        if not self._is_stretched:
            return {launch: STAMP for _, launch in runs} if self._is_profiled else {}
        us = self._us[program.step]
        left = until_wait(column, lambda x: us[x.launch] if isinstance(x, Run) else 0.0)
        holds = {launch: launch_hold(us[launch], self._scale, left[at]) for at, launch in runs}
        return {n: hold for n, hold in holds.items() if hold.hold_ns or self._is_profiled}

    def _transfers(self, program: Program) -> dict[int, Hold]:
        holds: dict[int, Hold] = {}
        for number, transfer in enumerate(program.transfers):
            if self._device not in (transfer.src, transfer.dst):
                continue
            link = self._links.get((transfer.src, transfer.dst))
            if link is not None:
                holds[number] = link_hold(link, transfer.num_bytes, self._scale)
            elif self._is_profiled:
                holds[number] = STAMP
        return holds


def _words(num: int, card: torch.device) -> torch.Tensor:
    return torch.zeros(num, dtype=torch.int64, device=card)
