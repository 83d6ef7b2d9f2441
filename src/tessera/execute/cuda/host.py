"""Host: transfers through pinned memory and the worker's links, over any network.

A sending graph copies to pinned memory and sets a flag there, which a thread per link polls. Arriving bytes
are read into pinned memory and flagged; the receiver's graph waits for the flag, clears it and copies to the
GPU. A transfer that arrives before its run begins is kept.

Shared: beside CPU workers of the same machine, graphs use shared memory and flags there, without a thread.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from tessera.execute import driver
from tessera.execute.cuda.transport import GpuTransport, InboxLayout, InboxSpot
from tessera.execute.driver import MemOp
from tessera.execute.links import Links
from tessera.execute.messages import LinkFrame, Setup
from tessera.execute.transport import WORD, Arenas
from tessera.ir import Program, Trace

# Runs with transfers that arrived before the run began.
MAX_EARLY = 4096
# To drop late transfers of cancelled runs.
REMEMBERED = 4096


class _Mirror:
    """Pinned memory laid out as one device's inbox."""

    def __init__(self, layout: InboxLayout) -> None:
        size = max(layout.total_bytes, WORD)
        self.tensor = driver.pinned((size,))
        self.address, self.layout = self.tensor.data_ptr(), layout
        self.bytes = memoryview(self.tensor.numpy().data)
        flags = layout.num_flags
        self.flags = self.tensor.numpy()[: flags * WORD].view(np.int64)


class _Staged(GpuTransport):
    """Transfers land in the host's memory; graphs copy them to inboxes on the GPU."""

    carries_records = False

    def _allocate(self) -> None:
        card = driver.card(self._ordinal)
        for layout in self._inboxes.layouts[self._device]:
            if (self._device, layout.number) not in self._bases:
                self._places.append(torch.zeros(max(1, layout.total_bytes), dtype=torch.uint8, device=card))
                self._bases[self._device, layout.number] = self._places[-1].data_ptr()

    @cached_property
    def _places(self) -> list[torch.Tensor]:
        return []

    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        super().wait(spot, stream, marks)
        transfer, (source, _) = self._transfer(spot), self._ends(spot, self._device)
        place = self._base(spot.program) + self._inboxes.place(spot, self._device) + transfer.start
        driver.copy(stream, place, source, transfer.num_bytes)


class Shared(_Staged):
    def __init__(self, setup: Setup, ordinal: int) -> None:
        super().__init__(setup, ordinal)
        self._arenas = Arenas(setup, driver.pin)

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        super().add(programs, traces)
        self._arenas.open(programs)

    def _ends(self, spot: InboxSpot, device: int) -> tuple[int, int]:
        program, transfer = self._inboxes.programs[spot.program], self._transfer(spot)
        place = self._arenas.place(program, spot.microbatch, spot.transfer)
        flags = self._arenas.flags(program, transfer.src, transfer.dst, spot.microbatch)
        return place.data_ptr(), flags.ctypes.data + WORD * spot.transfer

    def reset(self, microbatch: int, program: int) -> None:
        self._arenas.fill(microbatch, 0)

    def _zero(self, microbatch: int) -> None:
        self._arenas.fill(microbatch, 0, self._device, "arena")

    def _fill(self, microbatch: int, value: int) -> None:
        self._arenas.fill(microbatch, value, self._device)


class Host(_Staged):
    def __init__(self, setup: Setup, ordinal: int, links: Links) -> None:
        super().__init__(setup, ordinal)
        self._mirrors: list[list[_Mirror]] = [[] for _ in range(self._num)]
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

    def _allocate(self) -> None:
        for mirrors, layouts in zip(self._mirrors, self._inboxes.layouts, strict=True):
            mirrors += [_Mirror(layout) for layout in layouts[len(mirrors) :]]
        super()._allocate()

    def _target(self, program: int, device: int) -> int:
        return self._mirror(program, device).address

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

    def reset(self, microbatch: int, program: int) -> None:
        for device in range(len(self._mirrors)):
            self._fill(microbatch, 0, device)

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
        transfers = self._inboxes.programs[program].transfers if microbatch >= 0 else ()
        if frame.transfer >= len(transfers):
            return
        transfer = transfers[frame.transfer]
        if transfer.num_bytes != len(contents) or transfer.dst != self._device:
            return
        spot, mirror = InboxSpot(microbatch, program, frame.transfer), self._mirror(program, self._device)
        first = self._inboxes.place(spot, self._device) + transfer.start
        mirror.bytes[first : first + len(contents)] = contents
        mirror.flags[mirror.layout.flag(spot) // WORD] = 1

    def _send_all(self, dst: int) -> None:
        seen = 0
        while True:
            with self._changed:
                while not self._in_flight and seen == self._num_ended and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                seen = self._num_ended
                mirrors = list(self._mirrors[dst])
            if not any(self._send_flagged(mirror, dst) for mirror in mirrors):
                time.sleep(driver.LOOK_S)

    def _send_flagged(self, mirror: _Mirror, dst: int) -> bool:
        """Older runs first; True if there was something."""
        words = np.flatnonzero(mirror.flags.copy())  # graphs set flags meanwhile
        flagged = []
        for word in words.tolist():
            microbatch, number = divmod(word, mirror.layout.flags_each)
            mirror.flags[word] = 0
            with self._changed:
                run = self._current.get(microbatch)
                if run is not None:  # else cancelled
                    flagged.append((run, number, self._runs[run][1], microbatch))
        for run, number, program, microbatch in sorted(flagged):
            spot = InboxSpot(microbatch, program, number)
            transfer = self._transfer(spot)
            start = self._inboxes.place(spot, dst) + transfer.start
            frame = LinkFrame(run, number, time.monotonic())
            self._links.post(dst, frame, mirror.bytes[start : start + transfer.num_bytes])
        return bool(words.size)

    def _zero(self, microbatch: int) -> None:
        for mirror in self._mirrors[self._device]:
            start = mirror.layout.part(microbatch)
            mirror.tensor[start : start + mirror.layout.bytes_each] = 0

    def _fill(self, microbatch: int, value: int, device: int | None = None) -> None:
        for mirror in self._mirrors[self._device if device is None else device]:
            start, size = mirror.layout.flags(microbatch)
            mirror.flags[start // WORD : (start + size) // WORD] = value

    def _mirror(self, program: int, device: int) -> _Mirror:
        return self._mirrors[device][self._inboxes.layout(program, device).number]
