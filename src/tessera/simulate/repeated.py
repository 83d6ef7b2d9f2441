"""Repeated: a window over short programs, with repeated runs skipped.

While every slot repeats a step, a few runs are simulated and the rest is skipped: each slot as many runs as
it did in the few, times the same number.
"""

from dataclasses import dataclass

from tessera.ir import Plan
from tessera.simulate.columns import Script, Scripts
from tessera.simulate.core import Flight
from tessera.simulate.window import Extent, Window

# Runs of every slot before a repetition is believed to be steady, and runs that stand for the skipped ones.
SETTLE_RUNS, SAMPLE_RUNS = 1, 2


@dataclass(slots=True)
class _Mark:
    """Where a sample of a repetition began."""

    slot: int
    now: float
    # Work done by then; below zero while the repetition settles.
    done: float
    # Slot -> runs it had begun.
    runs: dict[int, int]


class Repeated(Window):
    """Skips runs that are like those before them."""

    def __init__(self, plan: Plan, scripts: Scripts, lanes: list[tuple[Script, ...]], extent: Extent) -> None:
        super().__init__(plan, scripts, lanes, extent)
        self._runs = dict.fromkeys(range(self._slots), 0)
        self._mark: _Mark | None = None

    def begin(self, flight: Flight, now: float) -> None:
        """Starts a run, and looks whether many like it can be skipped."""
        slot = flight.slot
        is_same = self._script.get(slot) is flight.left[-1][0]
        super().begin(flight, now)
        self._runs[slot] += 1
        if not is_same or not self._repeats(flight):
            self._mark = None
        elif self._mark is None:
            if all(self._repeats(f) for f in self._flights.values()):
                self._mark = _Mark(slot, now, -1.0, dict(self._runs))
        elif self._mark.slot == slot:
            self._sample(self._mark, now)

    def _repeats(self, flight: Flight) -> bool:
        """Are enough runs of one script left to make a sample and skip some?"""
        need = SETTLE_RUNS + 2 * SAMPLE_RUNS
        left = flight.left
        return len(left) >= need and left[-1][0] is left[-need][0] is self._script[flight.slot]

    def _sample(self, mark: _Mark, now: float) -> None:
        """Lets the repetition settle, then measures some runs of it, then skips as often as it can."""
        runs = {slot: self._runs[slot] - mark.runs[slot] for slot in self._flights}
        done, _ = self._so_far(now)
        if mark.done < 0.0:
            if min(runs.values()) >= SETTLE_RUNS:
                self._mark = _Mark(mark.slot, now, done, dict(self._runs))
            return
        if min(runs.values()) < SAMPLE_RUNS or done <= mark.done:
            return
        self._mark = None
        if not all(self._repeats(f) for f in self._flights.values()):
            return
        times = min(_repeated(f) // runs[slot] for slot, f in self._flights.items())
        times = min(times, int((self._target - done) / (done - mark.done)))
        if times <= 0:
            return
        for slot, flight in self._flights.items():
            del flight.left[len(flight.left) - times * runs[slot] :]
        self._skipped_us += times * (now - mark.now)
        self._done += times * (done - mark.done)


def _repeated(flight: Flight) -> int:
    """Runs left that are the same as the next one, less one: the last is always simulated."""
    script = flight.left[-1][0]
    count = 0
    for other, _ in reversed(flight.left):
        if other is not script:
            break
        count += 1
    return count - 1
