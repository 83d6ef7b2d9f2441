"""VirtualMachine: the simulator's loop, for a caller that starts runs and takes their ends."""

import heapq
from collections import deque
from collections.abc import Collection, Sequence

from tessera.simulate.columns import LaunchSegment, Script, TransferWire
from tessera.simulate.core import END, Core, Flight, Work

# An end so close after a limit is at the limit: sums of times differ by their rounding.
SAME_US = 1e-5


class VirtualMachine(Core):
    def __init__(self, num_devices: int, num_buses: int) -> None:
        super().__init__(num_devices, num_buses)
        self.now_us = 0.0
        # Per device, then per bus.
        self.busy_us = [0.0] * (num_devices + num_buses)
        self._ended: deque[int] = deque()

    def start(self, microbatch: int, works: Sequence[Work]) -> None:
        self.begin(Flight(microbatch, microbatch, 0, list(reversed(works))), self.now_us)

    def take(self, limit_us: float) -> int | None:
        """To the next end of a microbatch's last run, or to the limit (None)."""
        while not self._ended and self._events and self._events[0][0] <= limit_us + SAME_US:
            self.now_us = max(self.now_us, self.advance() or 0.0)
        if self._ended:
            return self._ended.popleft()
        if limit_us < float("inf"):
            self.now_us = max(self.now_us, limit_us)
        return None

    def drop(self, microbatches: Collection[int]) -> None:
        """Their transfers still occupy buses."""
        self._ended = deque(number for number in self._ended if number not in microbatches)
        for ticket in [t for t, (flight, _, _) in self._running.items() if flight.number in microbatches]:
            del self._running[ticket]
            for device in self.devices:
                if any(job.ticket == ticket for job in device.queue):
                    device.queue.drop(ticket)
                if device.job is not None and device.job.ticket == ticket:
                    device.job, device.epoch = None, device.epoch + 1
            self._events = [e for e in self._events if e[4] == END or e[3] != ticket]
        heapq.heapify(self._events)
        for index in range(len(self.devices)):
            self._look(index, self.now_us)

    def on_end(self, flight: Flight, now: float) -> None:
        self._ended.append(flight.number)

    def on_segment(
        self, device: int, flight: Flight, script: Script, segment: LaunchSegment, stop_us: float
    ) -> None:
        self.busy_us[device] += stop_us - self.devices[device].since_us

    def on_send(self, flight: Flight, wire: TransferWire, start_us: float, stop_us: float) -> None:
        self.busy_us[len(self.devices) + wire.bus] += stop_us - start_us
