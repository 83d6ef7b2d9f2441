"""From repeated timings to one number and how sure it is.

The number is the median. Its interval is that of order statistics, which assumes nothing about how timings
are distributed: of n sorted samples, those at ranks n/2 -+ 0.98 sqrt(n) enclose the true median with 95 %.
A launch is timed until half of that interval is within 2 % of the median, or until its time is up; the
interval that was reached is what the number carries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE_Z = 1.96
# Half of the interval, as a share of the median, at which a launch has been timed often enough.
TARGET_ERROR = 0.02
MIN_SAMPLES = 8
MAX_SAMPLES = 400
# A launch that is still not sure after this long is left as it is.
CAP_S = 0.25

# (samples so far, seconds they took) -> True to stop.
Enough = Callable[[Sequence[float], float], bool]


@dataclass(frozen=True, slots=True)
class Timing:
    """What repeated timing of one thing gave."""

    us: float
    # Half of the 95 % interval of the median.
    half_us: float
    num: int

    @property
    def rel_error(self) -> float:
        """The interval as a share of the time; 1 for a time that is not told from zero."""
        return self.half_us / self.us if self.us > 0 else 1.0


def timing(samples: Sequence[float]) -> Timing:
    """The median of some samples with its interval; a median below zero is noise around zero."""
    ordered = sorted(samples)
    num = len(ordered)
    skipped = max(0, math.floor((num - CONFIDENCE_Z * math.sqrt(num)) / 2))
    half = (ordered[num - 1 - skipped] - ordered[skipped]) / 2
    return Timing(max(0.0, median(ordered)), half, num)


def until(cap_s: float = CAP_S, error: float = TARGET_ERROR) -> Enough:
    """The rule for when to stop: sure enough, or out of time."""

    def enough(samples: Sequence[float], seconds: float) -> bool:
        if len(samples) < MIN_SAMPLES:
            return seconds > 4 * cap_s and bool(samples)
        if seconds > cap_s or len(samples) >= MAX_SAMPLES:
            return True
        return timing(samples).rel_error <= error

    return enough
