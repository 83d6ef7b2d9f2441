"""Meter: how many requests come in a window, and how much that number varies.

Counts of a Poisson stream vary by their square root. Real streams come in bursts and vary more: the variance
of a window's count is a multiple of its mean, the dispersion, which is measured over the last windows. A lull
in a bursty stream is then not taken for a load that has gone.
"""

import math
from collections import deque
from itertools import accumulate

# Windows that are remembered, and how many windows of a Poisson stream are supposed before them.
NUM_WINDOWS, NUM_SUPPOSED = 24, 4
# Levels that a steady load may have had in that time.
NUM_LEVELS = 2


class Meter:
    """Counts arrivals; time only needs to run forward."""

    def __init__(self) -> None:
        self.window_s = math.inf
        # What is supposed of the time before the first arrival.
        self.before_per_s = 0.0
        self._times: deque[float] = deque()
        self._start_s: float | None = None
        self._counts: deque[int] = deque(maxlen=NUM_WINDOWS)
        self._mark_s = 0.0
        self._num = 0
        # Measured when it is asked for, once a window.
        self._dispersion: float | None = None

    def set(self, window_s: float, before_per_s: float) -> None:
        """Another window; counts of windows of another length say nothing about it."""
        if window_s != self.window_s:
            self._counts.clear()
            self._dispersion = None
            self._num = 0
            self._mark_s = self._times[-1] if self._times else self._start_s or 0.0
        self.window_s, self.before_per_s = window_s, before_per_s

    def start(self, now_s: float) -> None:
        """Watching begins."""
        if self._start_s is None:
            self._start_s = self._mark_s = now_s

    def arrived(self, now_s: float) -> None:
        """One more."""
        self._roll(now_s)
        self._times.append(now_s)
        self._num += 1

    def _roll(self, now_s: float) -> None:
        # After a long silence only the last windows count.
        self._mark_s = max(self._mark_s, now_s - (NUM_WINDOWS + 1) * self.window_s)
        while now_s >= self._mark_s + self.window_s:
            self._counts.append(self._num)
            self._dispersion = None
            self._num = 0
            self._mark_s += self.window_s

    def count(self, now_s: float) -> float:
        """Arrivals within a window; the part of it before watching began is supposed."""
        self._roll(now_s)
        while self._times and self._times[0] <= now_s - self.window_s:
            self._times.popleft()
        unseen_s = max(0.0, self.window_s - (now_s - (self._start_s or 0.0)))
        return len(self._times) + unseen_s * self.before_per_s

    @property
    def dispersion(self) -> float:
        """Variance of a window's count over its mean; 1 for a Poisson stream, and never less here.

        About a mean that may have changed once: such a load is steady before and after, and that is no burst.
        """
        if self._dispersion is None:
            self._dispersion = self._measure()
        return self._dispersion

    def _measure(self) -> float:
        counts, num = list(self._counts), len(self._counts)
        mean = sum(counts) / max(1, num)
        if num <= NUM_LEVELS or not mean:
            return 1.0
        sums, squares = [0, *accumulate(counts)], [0, *accumulate(n * n for n in counts)]

        def spread(a: int, b: int) -> float:
            """Squares about the mean of windows a to b."""
            return squares[b] - squares[a] - (sums[b] - sums[a]) ** 2 / (b - a) if b > a else 0.0

        least = min(spread(0, cut) + spread(cut, num) for cut in range(num))
        return max(1.0, (NUM_SUPPOSED + least / mean) / (NUM_SUPPOSED + num - NUM_LEVELS))
