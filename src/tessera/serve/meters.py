"""What the engine counts and times: totals since the start, and shares of the last seconds.

The engine's thread writes, so it must be quick; totals may be read by any thread. Of the times of single
requests only the last ones are kept: whoever wants histograms hands the engine meters that make them.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tessera.execute.stepper import DeviceStatus, DeviceUse
from tessera.serve.records import Counts, Finish, Latency

# Seconds between two looks at what the stepper counts, and over which shares and rates are shown.
LOOK_S, WINDOW_S = 0.5, 5.0
# Answers and tokens whose times are kept, the last ones.
NUM_FIRST, NUM_BETWEEN = 500, 5000


class Times(NamedTuple):
    """A request's times, in seconds; None: it did not get so far."""

    # In the queue until it had a row, for the first time.
    queued_s: float | None
    # From arrival to its first token.
    first_token_s: float | None
    # From arrival to its end.
    whole_s: float


class _Look(NamedTuple):
    at_s: float
    output_tokens: int
    busy_s: Mapping[str, float]
    moved: Mapping[tuple[str, str], int]


class Meters(Counts):
    """Counters, and a window of looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: Counter[str] = Counter()
        # Device -> how often it was lost; and how it was at the last look.
        self.losses: Counter[str] = Counter()
        self.status: Mapping[str, DeviceStatus] = {}
        # Seconds to the first token of the last answers, and between the last tokens.
        self.first_s: deque[float] = deque(maxlen=NUM_FIRST)
        self.between_s: deque[float] = deque(maxlen=NUM_BETWEEN)
        self._looks: deque[_Look] = deque([_Look(time.monotonic(), 0, {}, {})])

    def seated(self, queued_s: float) -> None:
        """A request has waited so long, and has a row now."""

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        """So long after the request arrived, with its prompt read."""
        self.prompt_tokens += prompt_tokens
        self.first_s.append(seconds)

    def next_tokens(self, seconds: Sequence[float]) -> None:
        """Since the token before, for every token of a step that is not an answer's first."""
        self.between_s.extend(seconds)

    def stepped(self, kind: str, seconds: float) -> None:
        """A step ended; its kind tells its size too."""

    def ended(self, finish: Finish, times: Times) -> None:
        """A request has left, for whatever reason."""
        self.finished[finish.reason] += 1

    def is_due(self) -> bool:
        return time.monotonic() - self._looks[-1].at_s >= LOOK_S

    def look(self, use: DeviceUse) -> None:
        """Remembers what there is now, and forgets what is older than the window."""
        now = time.monotonic()
        looks = self._looks
        looks.append(_Look(now, self.output_tokens, dict(use.busy_s), dict(use.moved)))
        self.status = dict(use.devices)
        while len(looks) > 2 and looks[1].at_s <= now - WINDOW_S:
            looks.popleft()

    @property
    def latency(self) -> Latency:
        first, between = sorted(self.first_s), sorted(self.between_s)
        return Latency(*(quantile(values, q) for values in (first, between) for q in (0.5, 0.99)))

    @property
    def tokens_per_s(self) -> float:
        first, last = self._ends()
        return (last.output_tokens - first.output_tokens) / (last.at_s - first.at_s or 1.0)

    def busy(self) -> dict[str, float]:
        """Device -> share of the window in which it worked."""
        first, last = self._ends()
        span_s = last.at_s - first.at_s or 1.0
        return {name: _share(s - first.busy_s.get(name, 0.0), span_s) for name, s in last.busy_s.items()}

    def moved(self, bytes_per_s: Mapping[tuple[str, str], float]) -> list[tuple[str, str, float, int]]:
        """(source, destination, share of the window at the link's modelled speed, bytes so far)."""
        first, last = self._ends()
        span_s = last.at_s - first.at_s or 1.0
        found = []
        for ends in sorted({*bytes_per_s, *last.moved}):
            total = last.moved.get(ends, 0)
            speed = bytes_per_s.get(ends, 0.0)
            wire_s = (total - first.moved.get(ends, 0)) / speed if speed else 0.0
            found.append((*ends, _share(wire_s, span_s), total))
        return found

    def _ends(self) -> tuple[_Look, _Look]:
        looks = self._looks
        return looks[0], looks[-1]


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share does not exceed; None of nothing."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else None


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s))
