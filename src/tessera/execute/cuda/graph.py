"""ProgramGraph: one program of one lane, captured for one slot as one CUDA graph over all devices.

The capture begins on the slot's origin stream and forks to the streams of the devices; events of the capture
become edges of the graph, so that a replay is one call and no CPU takes part in it. The same code runs once
before the capture, so that libraries and kernels set themselves up.

A device keeps time if it is stretched, or if the graph is made to be profiled; then a turnstile stands before
and after each of its launches, and the records say when each ran.
"""

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from tessera.execute.cuda import driver
from tessera.execute.cuda.issue import CudaStreams, Ground, Issue, Pace, Track
from tessera.execute.cuda.launches import Launches, Memory
from tessera.execute.cuda.order import inbox_offsets, is_move_of_state, issue_order
from tessera.execute.cuda.slot import ALIGN, Resident, Slot, Storage
from tessera.execute.cuda.turnstile import RECORD_WORDS
from tessera.execute.cuda.workspace import own_workspaces
from tessera.ir import Program, Trace


class ProgramGraph:
    """A captured program; `replay` runs it on the current stream."""

    def __init__(
        self,
        program: Program,
        trace: Trace,
        slot: Slot,
        resident: Resident,
        launches: Mapping[int, Launches],
        pace: Pace,
        is_short: bool = False,
    ) -> None:
        """`launches[ordinal]` issues the trace's launches on a card. `is_short`: goes before long steps."""
        self.program, self.trace, self._is_short = program, trace, is_short
        self._slot, self._resident, self._launches, self._pace = slot, resident, launches, pace
        self._machine = slot.machine
        self._order = issue_order(program, trace)
        # ordinal -> a row a launch, then a row a transfer; only what is timed on that card is written.
        self.records = self._make_records()
        self._ground = self._make_ground()
        self.outputs: dict[str, torch.Tensor] = {}
        self._graph = self._capture()

    def replay(self) -> dict[str, torch.Tensor]:
        """Launches the graph on the current stream; outputs and state are overwritten."""
        self._graph.replay()
        return self.outputs

    def record_rows(self, copied: Mapping[int, torch.Tensor]) -> dict[Track, torch.Tensor]:
        """Track -> its card's records, out of a copy of `records`."""
        ordinal = [d.ordinal for d in self._machine.devices]
        return {
            track: copied[ordinal[track if isinstance(track, int) else track[1]]]
            for track in self._ground.timing
        }

    def _capture(self) -> torch.cuda.CUDAGraph:
        origin = self._slot.origin
        with torch.no_grad(), torch.cuda.stream(origin):
            self._issue()
        self._machine.synchronize()
        graph = torch.cuda.CUDAGraph()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(own_workspaces())
            for ordinal in self._machine.ordinals:
                if ordinal != origin.device_index:  # the capture gives its own card a pool, not the others
                    pool = self._slot.pools.setdefault(ordinal, torch.cuda.MemPool())
                    stack.enter_context(torch.cuda.use_mem_pool(pool, driver.card(ordinal)))
            stack.enter_context(
                torch.cuda.graph(
                    graph, pool=self._slot.pool, stream=origin, capture_error_mode="thread_local"
                )
            )
            self.outputs = self._issue()
        return graph

    def _issue(self) -> dict[str, torch.Tensor]:
        memory = [self._base(device) for device in range(len(self._machine.devices))]
        Issue(self.program, self.trace, self._ground, memory, self._slot.origin).run(self._order)
        here = dict(self.program.outputs)
        return {
            name: self._ground.launches[here[name]].tensor(memory[here[name]], view)
            for name, view in self.trace.outputs
            if name in here
        }

    def _make_ground(self) -> Ground[torch.cuda.Stream]:
        transfers, devices = self.program.transfers, self._machine.devices
        pairs = {(t.src, t.dst) for t in transfers}
        tracks: set[Track] = {device for _, device in self._pace.launches}
        tracks |= {(transfers[n].src, transfers[n].dst) for n in self._pace.copies}
        cards = {t: devices[t if isinstance(t, int) else t[1]].ordinal for t in tracks}
        busy = {d for d, column in enumerate(self.program.instructions) if column}
        return Ground(
            CudaStreams(),
            {d: self._slot.compute[d, self._is_short] for d in sorted(busy)},
            {pair: self._slot.copies[pair] for pair in sorted(pairs)},
            {d: self._launches[device.ordinal] for d, device in enumerate(devices)},
            self._places(),
            self._pace,
            {t: (self._machine.turnstile(o), self.records[o]) for t, o in cards.items()},
            self._slot.number,
        )

    def _base(self, device: int) -> Memory:
        """What a device has before the first launch."""
        card = self._machine.card(device)
        base = self._resident.of(self.program, device, card)
        base |= self._slot.inputs_of(self.trace, self.program.step, device)
        base |= self._slot.state_of(self.trace, self.program, device)
        for number, transfer in enumerate(self.program.transfers):
            if is_move_of_state(self.program, number) and transfer.src == device:
                name = self.trace.buffers[transfer.buffer].name
                base[transfer.buffer] = self._slot.state[device, name]
        for index, buffer in enumerate(self.trace.buffers):
            if buffer.size_bytes == 0 and index not in base:  # nobody sends it, and everybody may name it
                base[index] = torch.empty(0, dtype=torch.uint8, device=card).untyped_storage()
        return base

    def _places(self) -> dict[int, Storage]:
        """Transfer -> memory it lands in: a place in its device's inbox, or the state's new home."""
        found: dict[int, Storage] = {}
        buffers = self.trace.buffers
        for device in range(len(self._machine.devices)):
            offsets, _ = inbox_offsets(self.program, self.trace, device, ALIGN)
            for number, offset in offsets.items():
                size = buffers[self.program.transfers[number].buffer].size_bytes
                found[number] = self._slot.inbox[device][offset : offset + size]
        for number, transfer in enumerate(self.program.transfers):
            if is_move_of_state(self.program, number):
                found[number] = self._slot.state[transfer.dst, buffers[transfer.buffer].name]
        return found

    def _make_records(self) -> dict[int, torch.Tensor]:
        rows = len(self.trace.launches) + len(self.program.transfers)
        return {
            ordinal: torch.zeros(rows, RECORD_WORDS, dtype=torch.int64, device=driver.card(ordinal))
            for ordinal in self._machine.ordinals
        }
