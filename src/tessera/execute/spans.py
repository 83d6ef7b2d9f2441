"""SpanLog: what workers report of launches and transfers, as a timeline by the stepper's clock.

A stepper over workers has an attribute `spans`; with a log there, every order asks for spans and every answer
is added. Who drives the stepper says which request a microbatch is.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.ir import Clock, Plan, Program, Span, Timeline

if TYPE_CHECKING:
    from tessera.execute.messages import Done


class SpanLog:
    """The spans of one list of requests."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._spans: dict[int, list[Span]] = {}
        # Microbatch -> the request that it is.
        self._requests: dict[int, int] = {}
        # Device -> CPU time of its launches.
        self.cpu_us = dict.fromkeys(plan.cluster.names, 0.0)
        self._origin_s = 0.0

    def begin(self, origin_s: float) -> None:
        """Forgets what there was; time starts now."""
        self._spans, self._requests, self._origin_s = {}, {}, origin_s
        self.cpu_us = dict.fromkeys(self._plan.cluster.names, 0.0)

    def open(self, microbatch: int, request: int) -> None:
        """What a microbatch does from now on it does for this request."""
        self._requests[microbatch] = request

    def forget(self, request: int) -> None:
        self._spans.pop(request, None)

    def add(
        self, device: int, done: "Done", program: Program, microbatch: int, offset_s: Callable[[int], float]
    ) -> None:
        """Takes in what one worker did for one run; `offset_s`: from a device's clock to the stepper's."""
        request = self._requests.get(microbatch)
        if request is None:
            return
        names = self._plan.cluster.names
        trace = self._plan.graphs[program.step].trace
        spans = self._spans.setdefault(request, [])
        here_s = offset_s(device) - self._origin_s
        for launch, start, stop, cpu_s in done.spans:
            label = trace.kernel_of(launch).name
            begin, end = (start + here_s) * 1e6, (stop + here_s) * 1e6
            spans.append(Span(names[device], label, request, microbatch, begin, end))
            self.cpu_us[names[device]] += cpu_s * 1e6
        for number, start, stop in done.transfers:
            transfer = program.transfers[number]
            begin = (start + offset_s(transfer.src) - self._origin_s) * 1e6
            track, label = f"{names[transfer.src]} -> {names[transfer.dst]}", f"{transfer.num_bytes} bytes"
            # Clocks of two machines agree to a message's time only; a span must not end before it starts.
            end = max(begin, (stop + here_s) * 1e6)
            spans.append(Span(track, label, request, microbatch, begin, end, True))

    def timeline(self) -> Timeline:
        spans = sorted(
            (s for own in self._spans.values() for s in own), key=lambda s: (s.start_us, s.stop_us)
        )
        ends = {number: max(s.stop_us for s in own) for number, own in self._spans.items() if own}
        requests = tuple((number, 0.0, stop) for number, stop in sorted(ends.items()))
        return Timeline(Clock.MEASURED, tuple(spans), requests)
