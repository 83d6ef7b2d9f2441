"""Meters: totals since the start, and shares of the last seconds.

The engine's thread writes; any thread reads.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tessera.execute.stepper import DeviceStatus, DeviceUse
from tessera.ir.units import quantile
from tessera.serve.records import Counts, Finish, Latency

SAMPLE_S, WINDOW_S = 0.5, 5.0
NEWEST_WEIGHT = 0.02
NUM_FIRST, NUM_BETWEEN = 500, 5000


class Times(NamedTuple):
    """None: not reached."""

    queued_s: float | None
    first_token_s: float | None
    whole_s: float


class _Sample(NamedTuple):
    at_s: float
    output_tokens: int
    busy_s: Mapping[str, float]
    moved: Mapping[tuple[str, str], int]


class Meters(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.finished: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.status: Mapping[str, DeviceStatus] = {}
        self.experts: Mapping[str, Sequence[int]] = {}
        self.first_s: deque[float] = deque(maxlen=NUM_FIRST)
        self.between_s: deque[float] = deque(maxlen=NUM_BETWEEN)
        # See `Snapshot.host_ms`.
        self.host_s: float | None = None
        self._samples: deque[_Sample] = deque([_Sample(time.monotonic(), 0, {}, {})])

    def seated(self, queued_s: float) -> None: ...

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        self.prompt_tokens += prompt_tokens
        self.first_s.append(seconds)

    def next_tokens(self, seconds: Sequence[float]) -> None:
        self.between_s.extend(seconds)

    def stepped(self, kind: str, seconds: float) -> None: ...

    def hosted(self, seconds: float) -> None:
        mean_s = seconds if self.host_s is None else self.host_s
        self.host_s = mean_s + NEWEST_WEIGHT * (seconds - mean_s)

    def ended(self, finish: Finish, times: Times) -> None:
        self.finished[finish.reason] += 1

    def is_due(self) -> bool:
        return time.monotonic() - self._samples[-1].at_s >= SAMPLE_S

    def sample(self, use: DeviceUse) -> None:
        now = time.monotonic()
        samples = self._samples
        samples.append(_Sample(now, self.output_tokens, dict(use.busy_s), dict(use.moved)))
        self.status, self.experts = dict(use.devices), use.experts
        while len(samples) > 2 and samples[1].at_s <= now - WINDOW_S:
            samples.popleft()

    @property
    def latency(self) -> Latency:
        first, between = sorted(self.first_s), sorted(self.between_s)
        pairs = ((values, q) for values in (first, between) for q in (0.5, 0.99))
        return Latency(*(quantile(values, q) if values else None for values, q in pairs))

    @property
    def tokens_per_s(self) -> float:
        first, last, span_s = self._window()
        return (last.output_tokens - first.output_tokens) / span_s

    def busy(self) -> dict[str, float]:
        first, last, span_s = self._window()
        return {name: _share(s - first.busy_s.get(name, 0.0), span_s) for name, s in last.busy_s.items()}

    def moved(self, bytes_per_s: Mapping[tuple[str, str], float]) -> list[tuple[str, str, float, int]]:
        """(source, destination, share of the window at the modelled speed, total bytes) by link."""
        first, last, span_s = self._window()
        links = []
        for ends in sorted({*bytes_per_s, *last.moved}):
            total = last.moved.get(ends, 0)
            speed = bytes_per_s.get(ends, 0.0)
            wire_s = (total - first.moved.get(ends, 0)) / speed if speed else 0.0
            links.append((*ends, _share(wire_s, span_s), total))
        return links

    def _window(self) -> tuple[_Sample, _Sample, float]:
        first, last = self._samples[0], self._samples[-1]
        return first, last, last.at_s - first.at_s or 1.0


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s))
