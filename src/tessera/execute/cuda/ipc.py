"""Ipc: transfers between GPUs of one machine, from inside graphs: CUDA IPC memory and flags in it.

Every worker has an inbox in its GPU's memory (`transport`) and tells its handle through the engine's store. A
sender opens it; to send is a copy into it and a write to its flag, both on the sender's stream. When a peer's
worker is started again its inbox is another, so graphs that send there are captured again.
"""

from collections.abc import Sequence

from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.cuda.pace_kernel import RECORD_WORDS
from tessera.execute.cuda.transport import WORD, GpuTransport, InboxSpot, Parcel
from tessera.execute.driver import MemOp
from tessera.execute.links import KeyStore
from tessera.execute.orders import OwnerGone, key_of

# A peer that has not told its handle after so long has failed.
MEET_S = 120.0


class PeerAway(WorkerError):
    """A peer's memory cannot be opened: its worker is gone, and will be started again."""

    def __init__(self, message: str, device: int) -> None:
        super().__init__(message)
        self.device = device


class Ipc(GpuTransport):
    def __init__(
        self,
        device: int,
        ordinal: int,
        num_devices: int,
        microbatches: int,
        store: KeyStore,
        epochs: Sequence[int],
    ) -> None:
        """`epochs`: how often every device's worker was started before."""
        super().__init__(device, ordinal, num_devices, microbatches)
        self._store, self._epochs = store, list(epochs)
        # This device's inboxes, and (device, inbox) -> address of a peer's in this process.
        self._own: list[driver.IpcMemory] = []
        self._opened: dict[tuple[int, int], int] = {}
        self._side = driver.new_stream(ordinal)

    def _allocate(self) -> None:
        """Those of the peers are opened when they are first sent to."""
        for layout in self._inboxes.layouts[self._device][len(self._own) :]:
            memory = driver.IpcMemory(self._ordinal, layout.total_bytes)
            self._own.append(memory)
            self._store.set(self._key(self._device, layout.number), memory.handle)

    def meet(self, program: int) -> None:
        transfers = self._inboxes.programs[program].transfers
        for dst in {t.dst for t in transfers if t.src == self._device}:
            self._address(dst, program)

    def put(self, spot: InboxSpot, parcel: Parcel, stream: int) -> None:
        base, layout = self._address(parcel.dst, spot.program), self._inboxes.layout(spot.program, parcel.dst)
        place = self._inboxes.place(spot, parcel.dst) + parcel.start
        driver.copy(stream, base + place, parcel.source, parcel.num_bytes)
        if parcel.record:
            driver.copy(stream, base + layout.record(spot), parcel.record, WORD * RECORD_WORDS)
        driver.mem_ops(stream, [MemOp(base + layout.flag(spot), 1)])

    def wait(self, spot: InboxSpot, stream: int, marks: tuple[MemOp, MemOp]) -> None:
        flag = self._base(spot.program) + self._inboxes.layout(spot.program, self._device).flag(spot)
        driver.mem_ops(stream, [marks[0], MemOp(flag, 1, is_wait=True), MemOp(flag, 0), marks[1]])

    def reset(self, microbatch: int, program: int) -> None:
        """On a stream of its own, for those of the graphs wait; then what it has set in other inboxes."""
        super().reset(microbatch, program)
        for number, transfer in enumerate(self._inboxes.programs[program].transfers):
            layout = self._inboxes.layout(program, transfer.dst)
            base = self._opened.get((transfer.dst, layout.number))
            if transfer.src == self._device and base is not None:
                flag = layout.flag(InboxSpot(microbatch, program, number))
                driver.mem_ops(self._side.cuda_stream, [MemOp(base + flag, 0)])
        self._side.synchronize()

    def relink(self, device: int, epoch: int) -> bool:
        if epoch == self._epochs[device]:
            return False
        self._epochs[device] = epoch
        for key in [k for k in self._opened if k[0] == device]:
            driver.close_shared(self._opened.pop(key))
        return True

    def close(self) -> None:
        """Peers' inboxes; this worker's own go with its process, for peers may still write to them."""
        for address in self._opened.values():
            driver.close_shared(address)
        self._opened = {}

    def _fill(self, microbatch: int, value: int) -> None:
        for memory, layout in zip(self._own, self._inboxes.layouts[self._device], strict=True):
            start, size = layout.flags(microbatch)
            ops = [MemOp(memory.address + start + at, value) for at in range(0, size, WORD)]
            for first in range(0, len(ops), 128):  # a call takes no more than 256
                driver.mem_ops(self._side.cuda_stream, ops[first : first + 128])
        self._side.synchronize()

    def _base(self, program: int) -> int:
        return self._own[self._inboxes.layout(program, self._device).number].address

    def _address(self, device: int, program: int) -> int:
        key = (device, self._inboxes.layout(program, device).number)
        if key not in self._opened:
            try:
                handle = self._store.get(self._key(*key), MEET_S)
            except OwnerGone as error:
                raise PeerAway(error.message, device) from error
            if len(handle) != driver.IPC_HANDLE_BYTES:
                raise WorkerError(f"device {device} told no handle of its memory", "Update both sides.")
            try:
                self._opened[key] = driver.open_shared(self._ordinal, handle)
            except WorkerError as error:
                raise PeerAway(error.message, device) from error
        return self._opened[key]

    def _key(self, device: int, number: int) -> str:
        return key_of(f"ipc/{number}", device, self._epochs[device])
