"""Transfers of a GPU through the host's memory, where graphs set flags and wait for them.

Shared: beside CPU workers of the same machine, in shared memory, without a thread.

Host: over any network. A sending graph copies to pinned memory and sets a flag there, which a thread per
link polls. Arriving bytes are read into pinned memory and flagged. A transfer that arrives before its run
begins is kept.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tessera.execute import driver
from tessera.execute.cuda.transport import GpuTransport, InboxSpot
from tessera.execute.links import Links
from tessera.execute.messages import LinkFrame, Setup
from tessera.execute.transport import WORD, Arenas, Words, shared_bytes
from tessera.ir import Program, Trace

# Runs with transfers that arrived before the run began.
MAX_EARLY = 4096
# To drop late transfers of cancelled runs.
REMEMBERED = 4096


class Shared(GpuTransport):
    """What arrives is copied to memory of the graph."""

    carries_records = False

    def __init__(self, setup: Setup, ordinal: int) -> None:
        super().__init__(setup, ordinal)
        self._arenas = Arenas(setup, self._memory)

    @staticmethod
    def _memory(path: Path, size: int) -> torch.Tensor:
        shared = shared_bytes(path, size)
        driver.pin(shared)
        return shared

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        super().add(programs, traces)
        self._arenas.open(programs)

    def _place(self, spot: InboxSpot) -> torch.Tensor:
        return self._arenas.place(self.programs[spot.program], spot.microbatch, spot.transfer)

    def _flags(self, spot: InboxSpot) -> Words:
        transfer = self._transfer(spot)
        ends = transfer.src, transfer.dst
        return self._arenas.flags(self.programs[spot.program], *ends, spot.microbatch)

    def _ends(self, spot: InboxSpot, device: int) -> tuple[int, int]:
        return self._place(spot).data_ptr(), self._flags(spot).ctypes.data + WORD * spot.transfer

    def landed(self, spot: InboxSpot, num_bytes: int, stream: int) -> torch.UntypedStorage:
        card, transfer = driver.card(self._ordinal), self._transfer(spot)
        landed = torch.empty(num_bytes, dtype=torch.uint8, device=card)
        source, _ = self._ends(spot, self._device)
        driver.copy(stream, landed.data_ptr() + transfer.start, source, transfer.num_bytes)
        return landed.untyped_storage()

    def reset(self, microbatch: int, program: int) -> None:
        self._arenas.fill(microbatch, 0)

    def _zero(self, microbatch: int) -> None:
        self._arenas.fill(microbatch, 0, self._device, "arena")

    def _fill(self, microbatch: int, value: int) -> None:
        self._arenas.fill(microbatch, value, self._device)


class Host(Shared):
    def __init__(self, setup: Setup, ordinal: int, links: Links) -> None:
        super().__init__(setup, ordinal)
        # Run -> (microbatch, program); microbatch -> its last run, whose flagged transfers may still have to
        # be sent.
        self._runs: dict[int, tuple[int, int]] = {}
        self._current: dict[int, int] = {}
        # After each end the flags are checked once more.
        self._in_flight: set[int] = set()
        self._num_ended = 0
        self._cancelled: deque[int] = deque(maxlen=REMEMBERED)
        self._early: dict[int, list[tuple[LinkFrame, memoryview]]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._senders: set[int] = set()
        self._links = links
        links.arrived = self.arrived

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        with self._changed:
            super().add(programs, traces)
        peers = {t.dst for program in programs for t in program.transfers if t.src == self._device}
        for dst in peers - self._senders:
            self._senders.add(dst)
            name = f"tessera-send-{dst}"
            threading.Thread(target=self._send_all, args=(dst,), name=name, daemon=True).start()

    @staticmethod
    def _memory(path: Path, size: int) -> torch.Tensor:
        return driver.pinned((size,))

    def begin(self, microbatch: int, run: int, program: int) -> None:
        with self._changed:
            self._runs.pop(self._current.get(microbatch, -1), None)
            self._runs[run] = (microbatch, program)
            self._current[microbatch] = run
            self._in_flight.add(run)
            early = self._early.pop(run, [])
            self._changed.notify_all()
        for frame, contents in early:
            self._land(frame, contents)

    def end(self, run: int, is_cancelled: bool) -> None:
        """Transfers of a cancelled run are neither sent nor received any more."""
        with self._changed:
            self._in_flight.discard(run)
            self._num_ended += 1
            if is_cancelled:
                microbatch, _ = self._runs.pop(run, (-1, -1))
                if self._current.get(microbatch) == run:
                    del self._current[microbatch]
                self._early.pop(run, None)
                self._cancelled.append(run)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def arrived(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        with self._changed:
            if frame.run in self._cancelled or self._is_closed:
                return
            if frame.run not in self._runs:
                self._early.setdefault(frame.run, []).append((frame, contents))
                while len(self._early) > MAX_EARLY:
                    del self._early[next(iter(self._early))]
                return
        self._land(frame, contents)

    def _land(self, frame: LinkFrame, contents: memoryview) -> None:
        with self._changed:
            microbatch, program = self._runs.get(frame.run, (-1, -1))
        transfers = self.programs[program].transfers if microbatch >= 0 else ()
        if frame.transfer >= len(transfers):
            return
        transfer = transfers[frame.transfer]
        if transfer.num_bytes != len(contents) or transfer.dst != self._device:
            return
        spot = InboxSpot(microbatch, program, frame.transfer)
        self._place(spot).numpy().data[:] = contents
        self._flags(spot)[frame.transfer] = 1

    def _send_all(self, dst: int) -> None:
        seen = 0
        while True:
            with self._changed:
                while not self._in_flight and seen == self._num_ended and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                seen = self._num_ended
                all_flags = self._arenas.all_flags(self._device, dst)
            if not any(self._send_flagged(flags, dst) for flags in all_flags):
                time.sleep(driver.LOOK_S)

    def _send_flagged(self, flags: Words, dst: int) -> bool:
        """Older runs first; True if there was something."""
        found = np.argwhere(flags.copy()).tolist()  # graphs set flags meanwhile
        flagged = []
        for microbatch, number in found:
            flags[microbatch, number] = 0
            with self._changed:
                run = self._current.get(microbatch)
                if run is not None:  # else cancelled
                    flagged.append((run, InboxSpot(microbatch, self._runs[run][1], number)))
        for run, spot in sorted(flagged, key=lambda each: (each[0], each[1].transfer)):
            frame = LinkFrame(run, spot.transfer, time.monotonic())
            self._links.post(dst, frame, self._place(spot).numpy().data)
        return bool(found)
