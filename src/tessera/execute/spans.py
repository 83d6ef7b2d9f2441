"""SpanLog: what workers report of launches and transfers, as a timeline by the engine's clock."""

import time
from collections.abc import Callable

from tessera.execute.messages import Done
from tessera.ir import Clock, Plan, Program, Span, Timeline


class SpanLog:
    """The spans of one call of `Engine.run`."""

    def __init__(self, plan: Plan, offset_s: Callable[[int], float]) -> None:
        self._plan, self._offset_s = plan, offset_s
        self._spans: dict[int, list[Span]] = {}
        # Device -> CPU time of its launches.
        self.cpu_us: dict[str, float] = {}
        self.origin_s = 0.0

    def begin(self) -> None:
        """Forgets the last run; time starts now."""
        self._spans, self.cpu_us, self.origin_s = {}, {}, time.monotonic()

    def forget(self, request: int) -> None:
        """A request starts again: what it did before does not count."""
        self._spans.pop(request, None)

    def add(self, device: int, done: Done, program: Program, request: int, slot: int) -> None:
        """Takes in what one worker did for one run."""
        names = self._plan.cluster.names
        trace = self._plan.graphs[program.step].trace
        spans = self._spans.setdefault(request, [])
        for launch, start, stop, cpu_s in done.spans:
            label = trace.kernel_of(int(launch)).name
            spans.append(
                Span(names[device], label, request, slot, self._us(device, start), self._us(device, stop))
            )
            self.cpu_us[names[device]] = self.cpu_us.get(names[device], 0.0) + cpu_s * 1e6
        for number, start, stop in done.transfers:
            transfer = program.transfers[int(number)]
            begin, end = self._us(transfer.src, start), self._us(device, stop)
            track, label = f"{names[transfer.src]} -> {names[device]}", f"{transfer.num_bytes} bytes"
            # Clocks of two machines agree to a message's time only; a span must not end before it starts.
            spans.append(Span(track, label, request, slot, begin, max(begin, end), True))

    def timeline(self) -> Timeline:
        """All spans in order of their start."""
        spans = sorted(
            (s for own in self._spans.values() for s in own), key=lambda s: (s.start_us, s.stop_us)
        )
        ends = {number: max(s.stop_us for s in own) for number, own in self._spans.items() if own}
        requests = tuple((number, 0.0, stop) for number, stop in sorted(ends.items()))
        return Timeline(Clock.MEASURED, tuple(spans), requests)

    def _us(self, device: int, clock_s: float) -> float:
        return (clock_s + self._offset_s(device) - self.origin_s) * 1e6
