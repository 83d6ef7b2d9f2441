"""Fluid: a window over long programs, of which only samples are simulated.

While every slot stays in its step, each goes on at a steady pace: what a few hundred stretches show holds for
the thousands that follow. So some stretches are simulated to settle, then some to measure each slot's pace;
then all slots are moved ahead at their paces, until just before the first of them comes to the end of its
step, and taken up there. The end of a step is always simulated. Work and time of what is skipped
are those of the sample, times how often it fits.

Not seen: what differs along a program beyond the samples, which fall on other launches every time.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tessera.execute.schedule import Job
from tessera.ir import Plan, Recv
from tessera.simulate.columns import LaunchStretch, Script, Scripts
from tessera.simulate.core import Flight
from tessera.simulate.window import Window, WindowExtent

# Stretches that settle and that are measured: of each slot on average, where there are no more than these.
SETTLE, SAMPLE, MANY_SLOTS = 10, 30, 4
# A skip shorter than this many samples is not worth the settling behind it.
MIN_SKIP = 1.0


@dataclass(eq=False)
class Cuts:
    """The places where a run of one script can be taken up, as if the launches before some launch were done.

    A cut is a number of launches in trace order. Behind it every launch has run and what it sent has
    arrived. Transfers that would be under way at that moment count as arrived; that is all that is lost.
    """

    script: Script

    @cached_property
    def done_us(self) -> list[float]:
        """[launches done]: busy time of the run so far, over all devices."""
        lists = [
            next((x.ends_us for x in c.items if isinstance(x, LaunchStretch)), None)
            for c in self.script.columns
        ]
        return np.sum([x for x in lists if x is not None], axis=0).tolist() if any(lists) else [0.0]

    @cached_property
    def _sent(self) -> tuple[list[int], list[int]]:
        """(launches done when it leaves, transfer), in that order."""
        stretches = [x for c in self.script.columns for x in c.items if isinstance(x, LaunchStretch)]
        found = sorted((x.stop, wire.number) for x in stretches for wire in x.sends)
        return [stop for stop, _ in found], [number for _, number in found]

    @cached_property
    def _stretches(self) -> list[tuple[list[int], list[int]]]:
        """[device]: (where its stretches stop, their places in its list)."""
        found = []
        for column in self.script.columns:
            listed = [(x.stop, n) for n, x in enumerate(column.items) if isinstance(x, LaunchStretch)]
            found.append(([stop for stop, _ in listed], [n for _, n in listed]))
        return found

    def at(self, busy_us: float) -> int:
        """The last cut with no more busy time behind it."""
        return max(0, bisect_right(self.done_us, busy_us) - 1)

    def job(self, device: int, cut: int, slot: int, ticket: int) -> Job | None:
        """What a device still has to do behind the cut; None if nothing."""
        column = self.script.columns[device]
        stops, places = self._stretches[device]
        first = bisect_right(stops, cut)
        if first == len(places):
            return None
        at = places[first]
        item = column.items[at]
        assert isinstance(item, LaunchStretch), "only stretches are listed"
        spent = item.ends_us[cut] - item.ends_us[item.start] if item.start < cut else 0.0
        while item.start >= cut and at and isinstance(column.items[at - 1], Recv):
            at -= 1  # it may have to wait for what is read next
        left_at, numbers = self._sent
        arrived = set(numbers[: bisect_right(left_at, cut)])
        return Job(slot, ticket, column.items, at, arrived, column.until_wait_us, spent)


class Fluid(Window):
    """Skips ahead by the paces of a sample."""

    def __init__(
        self, plan: Plan, scripts: Scripts, lanes: list[tuple[Script, ...]], extent: WindowExtent
    ) -> None:
        super().__init__(plan, scripts, lanes, extent)
        few = min(plan.slots, MANY_SLOTS)
        self._settled, self._sampled = SETTLE * few, (SETTLE + SAMPLE) * few
        self._due = self._settled  # stretches until something is to be done about the sample
        # Slot -> runs begun since the sample began; time, work and busy times of runs when it did.
        self._begun: dict[int, int] = dict.fromkeys(range(self._slots), 0)
        self._mark: tuple[float, float, dict[int, float]] | None = None
        self._cuts: dict[Script, Cuts] = {}

    def begin(self, flight: Flight, now: float) -> None:
        """Starts a run; a slot that comes to another step ends the sample."""
        slot = flight.microbatch
        if self._script.get(slot) is flight.left[-1][0]:
            self._begun[slot] += 1
        else:
            self._start_again()
        super().begin(flight, now)

    def _until(self, work: float) -> tuple[float, float]:
        """As a window does, with skips."""
        self._target = work
        now: float | None = 0.0
        while self._done < work and now is not None:
            now = self.advance()
            if self._count >= self._due and now is not None:
                self._watch(now)
        return self._stand(now)

    def _start_again(self) -> None:
        """Whatever was sampled no longer holds."""
        self._count, self._mark, self._due = 0, None, self._settled

    def _watch(self, now: float) -> None:
        """Settled: a sample begins, or ends in a skip."""
        if self._mark is None:
            done, run_us = self._so_far(now)
            self._mark, self._due = (now, done, run_us), self._sampled
            self._begun = dict.fromkeys(self._begun, 0)
        else:
            self._skip(self._mark, now)
            self._start_again()

    def _skip(self, mark: tuple[float, float, dict[int, float]], now: float) -> None:
        """Moves every slot ahead by as many samples as fit before a step ends or the work is done."""
        if not all(script.busy_us for script in self._script.values()):
            return  # state is under way: nothing to measure its pace by
        done, run_us = self._so_far(now)
        moved = {
            slot: run_us[slot] - mark[2][slot] + self._begun[slot] * self._script[slot].busy_us
            for slot in self._flights
        }
        if done <= mark[1]:
            return
        most = (self._target - done) / (done - mark[1])
        times = min((self._left_us(x) - run_us[x]) / us - 1.0 for x, us in moved.items() if us > 0.0)
        if times < min(most, MIN_SKIP):
            return
        times = min(times, most)
        self._skipped_us += times * (now - mark[0])
        self._done = done + times * (done - mark[1])
        self._clear(now)
        for slot, us in moved.items():
            self._take_up(slot, run_us[slot] + times * us)
        for device in range(len(self.devices)):
            self._look(device, now)

    def _left_us(self, slot: int) -> float:
        """Busy time from the beginning of the run to the end of its step."""
        script = self._script[slot]
        same = 0
        for other, _ in reversed(self._flights[slot].left):
            if other is not script:
                break
            same += 1
        return (1 + same) * script.busy_us

    def _clear(self, now: float) -> None:
        """Nothing runs, nothing is under way."""
        self._events.clear()
        self._bus_free = [now] * len(self._bus_free)
        for device in self.devices:
            device.job, device.epoch = None, device.epoch + 1
            for job in list(device.queue):
                device.queue.drop(job.ticket)

    def _take_up(self, slot: int, busy_us: float) -> None:
        """A slot's run, or the later one of its step, where so much is done since its beginning."""
        flight, ticket, script = self._flights[slot], self._ticket[slot], self._script[slot]
        cuts = self._cuts.setdefault(script, Cuts(script))
        runs, rest = divmod(busy_us, script.busy_us)
        if runs:
            del flight.left[len(flight.left) - int(runs) :]
        cut = cuts.at(rest)
        flight.waiting = 0
        for index, device in enumerate(self.devices):
            job = cuts.job(index, cut, slot, ticket)
            if job is not None:
                device.queue.add(job)
                flight.waiting += 1
        self._run_us[slot] = cuts.done_us[cut]
