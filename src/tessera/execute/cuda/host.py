"""Host: transfers through pinned memory and the worker's links, over any network.

A sending graph copies to pinned memory and sets a flag there. A thread per link polls the flags of its
destination and sends what is flagged. Arriving bytes are read into pinned memory and their flag is set; the
receiver's graph waits for that flag, clears it and copies to the GPU. Both sides use the layout of the
receiver's inbox.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tessera.execute import driver
from tessera.execute.cuda.transport import WORD, GpuTransport, InboxLayout, InboxSpot, Parcel
from tessera.execute.driver import MemOp
from tessera.execute.links import LinkFrame, LinkLost, Links
from tessera.execute.transport import Gone
from tessera.ir import Program, Trace, Transfer

# Seconds between two looks at the flags of runs in flight.
LOOK_S = 20e-6
# A transfer may arrive before its run begins; after this time it is dropped.
EARLY_S = 60.0
# Cancelled runs remembered, to drop their late transfers.
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


class Host(GpuTransport):
    """One worker's end; keeps `links.Receiver`."""

    carries_records = False

    def __init__(
        self,
        device: int,
        ordinal: int,
        num_devices: int,
        microbatches: int,
        make_links: "Callable[[Host, Callable[[int], int]], Links]",
        post: Callable[[Gone], None],
    ) -> None:
        super().__init__(device, ordinal, num_devices, microbatches)
        self._post = post
        # mirrors[device][inbox], and this device's inboxes on the GPU.
        self._mirrors: list[list[_Mirror]] = [[] for _ in range(num_devices)]
        self._places: list[torch.Tensor] = []
        self._largest: dict[int, int] = {}
        # Run -> (microbatch, program); microbatch -> its last run, whose flagged transfers may still have to
        # be sent.
        self._runs: dict[int, tuple[int, int]] = {}
        self._current: dict[int, int] = {}
        # Runs in flight, and runs ended: after each end the flags are checked once more.
        self._in_flight: set[int] = set()
        self._num_ended = 0
        self._cancelled: dict[int, None] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._links = make_links(self, lambda peer: self._largest.get(peer, 0))
        self._links.start()
        self._senders: set[int] = set()

    def add(self, programs: Sequence[Program], traces: Sequence[Trace]) -> None:
        with self._changed:
            super().add(programs, traces)
        transfers = [t for p in programs for t in p.transfers]
        for transfer in transfers:
            if transfer.dst == self._device:
                known = self._largest.get(transfer.src, 0)
                self._largest[transfer.src] = max(known, transfer.num_bytes)
        for dst in {t.dst for t in transfers if t.src == self._device} - self._senders:
            self._senders.add(dst)
            name = f"tessera-send-{dst}"
            threading.Thread(target=self._send_all, args=(dst,), name=name, daemon=True).start()

    def _allocate(self) -> None:
        for mirrors, layouts in zip(self._mirrors, self._inboxes.layouts, strict=True):
            mirrors += [_Mirror(layout) for layout in layouts[len(mirrors) :]]
        card = driver.card(self._ordinal)
        for layout in self._inboxes.layouts[self._device][len(self._places) :]:
            self._places.append(torch.zeros(max(1, layout.total_bytes), dtype=torch.uint8, device=card))

    def _base(self, program: int) -> int:
        return self._places[self._inboxes.layout(program, self._device).number].data_ptr()

    def put(self, spot: InboxSpot, parcel: Parcel, stream: int) -> None:
        mirror = self._mirror(spot.program, parcel.dst)
        place = mirror.address + self._inboxes.place(spot, parcel.dst) + parcel.start
        driver.copy(stream, place, parcel.source, parcel.num_bytes)
        driver.mem_ops(stream, [MemOp(mirror.address + mirror.layout.flag(spot), 1)])

    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        mirror = self._mirror(spot.program, self._device)
        transfer, flag = self._transfer(spot), mirror.address + mirror.layout.flag(spot)
        place = self._inboxes.place(spot, self._device) + transfer.start
        driver.mem_ops(stream, [marks[0], MemOp(flag, 1, is_wait=True), MemOp(flag, 0), marks[1]])
        target = self._places[mirror.layout.number].data_ptr() + place
        driver.copy(stream, target, mirror.address + place, transfer.num_bytes)

    def begin(self, microbatch: int, run: int, program: int) -> None:
        with self._changed:
            self._runs.pop(self._current.get(microbatch, -1), None)
            self._runs[run] = (microbatch, program)
            self._current[microbatch] = run
            self._in_flight.add(run)
            self._changed.notify_all()

    def end(self, run: int, is_cancelled: bool) -> None:
        """Transfers of a cancelled run are neither sent nor received any more."""
        with self._changed:
            self._in_flight.discard(run)
            self._num_ended += 1
            if is_cancelled:
                microbatch, _ = self._runs.pop(run, (-1, -1))
                if self._current.get(microbatch) == run:
                    del self._current[microbatch]
                self._cancelled[run] = None
                while len(self._cancelled) > REMEMBERED:
                    del self._cancelled[next(iter(self._cancelled))]
            self._changed.notify_all()

    def reset(self, microbatch: int, program: int) -> None:
        """Clears flags of this device and of its sends."""
        for device in range(len(self._mirrors)):
            self._fill(microbatch, 0, device)

    def relink(self, device: int, epoch: int) -> bool:
        """The links reconnect; graphs name this process's memory only."""
        self._links.relink(device, epoch)
        return False

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._links.close()

    # Methods of `links.Receiver`.

    def place(self, peer: int, frame: LinkFrame) -> memoryview | None:
        """Pinned memory of an arriving transfer; waits until its run has begun here."""
        spot = self._find(frame)
        if spot is None:
            return None
        first = self._inboxes.place(spot, self._device) + self._transfer(spot).start
        return self._mirror(spot.program, self._device).bytes[first : first + frame.size]

    def arrived(self, peer: int, frame: LinkFrame) -> None:
        spot = self._find(frame)
        if spot is not None:
            mirror = self._mirror(spot.program, self._device)
            mirror.flags[mirror.layout.flag(spot) // WORD] = 1

    def gone(self, peer: int, why: str) -> None:
        self._post(Gone(peer, why, self._links.epochs[peer]))

    def _find(self, frame: LinkFrame) -> InboxSpot | None:
        """The transfer of a frame; None if its run is over."""
        deadline = time.monotonic() + EARLY_S
        with self._changed:
            while frame.run not in self._runs:
                left_s = deadline - time.monotonic()
                if frame.run in self._cancelled or self._is_closed or left_s <= 0.0:
                    return None
                self._changed.wait(left_s)
            microbatch, program = self._runs[frame.run]
        transfers = self._inboxes.programs[program].transfers
        if frame.transfer >= len(transfers) or transfers[frame.transfer].num_bytes != frame.size:
            return None
        is_mine = transfers[frame.transfer].dst == self._device
        return InboxSpot(microbatch, program, frame.transfer) if is_mine else None

    # Sending.

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
                time.sleep(LOOK_S)

    def _send_flagged(self, mirror: _Mirror, dst: int) -> bool:
        """Sends what graphs have flagged, older runs first; True if there was something."""
        found = np.flatnonzero(mirror.flags.copy())  # graphs set flags meanwhile
        flagged = []
        for word in found.tolist():
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
            frame = LinkFrame(run, number, transfer.num_bytes, time.monotonic())
            try:
                self._links.send(dst, frame, mirror.bytes[start : start + transfer.num_bytes])
            except LinkLost as error:
                self.gone(dst, error.message)
        return bool(found.size)

    def _fill(self, microbatch: int, value: int, device: int | None = None) -> None:
        for mirror in self._mirrors[self._device if device is None else device]:
            start, size = mirror.layout.flags(microbatch)
            mirror.flags[start // WORD : (start + size) // WORD] = value

    def _mirror(self, program: int, device: int) -> _Mirror:
        return self._mirrors[device][self._inboxes.layout(program, device).number]

    def _transfer(self, spot: InboxSpot) -> Transfer:
        return self._inboxes.programs[spot.program].transfers[spot.transfer]
