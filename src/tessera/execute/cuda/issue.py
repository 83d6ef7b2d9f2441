"""Issue: one program issued once, on one stream a device and one a pair of devices.

Run inside a capture this makes the graph; run outside it does the work at once. Streams are reached through
`Streams` only, so that tests issue the same code on the CPU and look at who waits for whom.

Memory that a copy reads, and the copies' marks, are kept until the whole program has been issued: a buffer
that its device has released may not be handed out again while a copy still reads it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from tessera.execute.cuda.launches import Launches, Memory, bytes_of
from tessera.execute.cuda.order import Compute, Copy, Item, Release
from tessera.execute.cuda.stretch import Hold
from tessera.execute.cuda.turnstile import Chain
from tessera.ir import Program, Trace

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
Pair = tuple[int, int]
# A device, or a pair of devices.
Track = int | Pair


class Streams(Protocol[S_contra]):
    """What is done with streams."""

    def on(self, stream: S_contra) -> AbstractContextManager[Any]:
        """While entered, work goes to the stream."""

    def mark(self, stream: S_contra) -> Any:
        """The work issued on the stream so far."""

    def wait(self, stream: S_contra, mark: Any) -> None:
        """Work issued on the stream from now on starts after the marked work has ended."""


class CudaStreams:
    """Streams and events of torch."""

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Makes the stream torch's current one."""
        return torch.cuda.stream(stream)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, mark: torch.cuda.Event) -> None:
        """An edge of the graph, inside a capture."""
        stream.wait_event(mark)


@dataclass(frozen=True)
class Pace:
    """How long things take where that is not left to the card. Missing: no turnstile.

    A hold without a queue stamps: nothing waits for anything but its own end.
    """

    # (launch, device) -> hold
    launches: Mapping[Pair, Hold] = field(default_factory=dict)
    # transfer -> hold
    copies: Mapping[int, Hold] = field(default_factory=dict)
    # Device or pair -> the word that says until when it is taken.
    queues: Mapping[Track, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Ground(Generic[S]):
    """What a program is issued on."""

    streams: Streams[S]
    compute: Mapping[int, S]
    copies: Mapping[Pair, S]
    # Device -> what issues the trace's launches on its card.
    launches: Mapping[int, Launches]
    # Transfer -> memory it lands in, as large as its buffer.
    landing: Mapping[int, torch.UntypedStorage]
    pace: Pace = field(default_factory=Pace)
    # Track -> (turnstile of its card, records on its card: a row a launch, then a row a transfer).
    timing: Mapping[Track, tuple[Any, torch.Tensor]] = field(default_factory=dict)
    # The slot, which is its place in the devices' queues.
    place: int = 0


class Issue(Generic[S]):
    """One pass over a program."""

    def __init__(
        self, program: Program, trace: Trace, ground: Ground[S], memory: Sequence[Memory], origin: S
    ) -> None:
        """`memory[device]`: what the device has before the first launch; changed by the pass."""
        self._program, self._trace, self._ground = program, trace, ground
        self._memory, self._origin = memory, origin
        self._streams = ground.streams
        self._left: dict[int, Any] = {}  # transfer -> mark of its copy
        self._kept: list[torch.UntypedStorage] = []
        self._chains = {
            track: Chain(turnstile, ground.pace.queues.get(track), ground.place)
            for track, (turnstile, _) in ground.timing.items()
        }

    def run(self, order: Sequence[Item]) -> None:
        """Forks from the origin stream, issues everything, joins."""
        start = self._streams.mark(self._origin)
        for stream in self._all():
            self._streams.wait(stream, start)
        for item in order:
            match item:
                case Compute():
                    self._compute(item)
                case Copy(number):
                    self._copy(number)
                case Release(device, buffer):
                    self._memory[device].pop(buffer, None)
        for device, stream in self._ground.compute.items():
            self._settle(device, stream)
        for stream in self._all():
            self._streams.wait(self._origin, self._streams.mark(stream))

    def _all(self) -> list[S]:
        return [*self._ground.compute.values(), *self._ground.copies.values()]

    def _compute(self, item: Compute) -> None:
        stream, memory = self._ground.compute[item.device], self._memory[item.device]
        if item.arrivals or item.departures:
            self._settle(item.device, stream)
        for number in (*item.arrivals, *item.departures):
            self._streams.wait(stream, self._left[number])
        for number in item.arrivals:
            memory[self._program.transfers[number].buffer] = self._ground.landing[number]
        with self._streams.on(stream):
            self._enter(item)
            self._ground.launches[item.device].issue(item.launch, memory)

    def _copy(self, number: int) -> None:
        transfer = self._program.transfers[number]
        pair = (transfer.src, transfer.dst)
        source = self._memory[transfer.src][transfer.buffer]
        self._settle(transfer.src, self._ground.compute[transfer.src])
        stream = self._ground.copies[pair]
        self._streams.wait(stream, self._streams.mark(self._ground.compute[transfer.src]))
        with self._streams.on(stream):
            hold = self._ground.pace.copies.get(number) if pair in self._chains else None
            if hold is not None:
                self._chains[pair].enter(self._copy_record(number), hold)
            into = bytes_of(self._ground.landing[number], transfer.start, transfer.stop)
            into.copy_(bytes_of(source, transfer.start, transfer.stop), non_blocking=True)
            if hold is not None:
                self._chains[pair].settle()
        self._left[number] = self._streams.mark(stream)
        self._kept.append(source)

    def _enter(self, item: Compute) -> None:
        """Time starts for a launch: after its arrivals' latency, and when its device is free."""
        chain = self._chains.get(item.device)
        hold = self._ground.pace.launches.get((item.launch, item.device))
        if chain is None:
            return
        for number in item.arrivals:
            arrival = self._ground.pace.copies.get(number)
            if arrival is not None and arrival.extra_ns:
                chain.arrive(self._copy_record(number), arrival.extra_ns)
        if hold is not None:
            chain.enter(self._ground.timing[item.device][1][item.launch], hold)
        else:
            chain.settle()

    def _copy_record(self, number: int) -> torch.Tensor:
        transfer = self._program.transfers[number]
        records = self._ground.timing[transfer.src, transfer.dst][1]
        return records[len(self._trace.launches) + number]

    def _settle(self, device: int, stream: S) -> None:
        """Nothing issued after this on the device's stream starts before its last launch is due."""
        if device in self._chains:
            with self._streams.on(stream):
                self._chains[device].settle()
