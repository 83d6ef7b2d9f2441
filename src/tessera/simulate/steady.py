"""steady_throughput: the rate of a plan with all slots full, from a short stretch of simulated time.

The same loop as `simulate`, without a timeline. Slots start spread over their requests instead of all at the
beginning, so the system is full at once and a quarter of a request's time with four slots sees every phase of
a request once. While every slot either repeats a step or is inside a long run, a few runs are simulated and
the rest is skipped: each slot as many runs as it did in the few, or as much of its long run, times the same
number. Work is counted as fractions of a request: a
stretch's share of its request's busy time.

Long programs need less of it: what a few hundred transfers see is close to what thousands do. A quick look
ends early where it is clearly behind the best look so far; its figure is then rougher still.
"""

import heapq
from dataclasses import dataclass

from tessera.ir import Plan
from tessera.simulate.columns import Script, Scripts, Stretch
from tessera.simulate.core import END, Core, Flight
from tessera.simulate.cuts import Cuts

# Requests' worth of work per slot: before the clock counts, and while it does; but at least so many runs.
WARM_UP, MIN_WARM_UP_RUNS = 0.25, 2
WINDOW, MIN_WINDOW_RUNS = 1.0, 6
# Programs of more items than this average out by themselves: less work is looked at, down to one request's.
LONG_LISTS = 400
# A quick look at a long program ends after this share of its window if it is so far behind the best one.
GIVE_UP = ((0.25, 0.88), (0.5, 0.95))
# With more slots than this, the work that is looked at grows no further.
MANY_SLOTS = 4
# Runs of every slot before a repetition is believed to be steady, and runs that stand for the skipped ones:
# of long programs one is enough.
SETTLE_RUNS, SAMPLE_RUNS, LONG_SAMPLE_RUNS = 1, 2, 1
# A run of so many launches is long: it may be skipped in part.
LONG_RUN = 400


@dataclass(slots=True)
class _Mark:
    """Where a sample of a repetition began."""

    slot: int
    now: float
    # Work done by then; below zero while the repetition settles.
    done: float
    # Slot -> runs it had begun, and busy time of the run that it was in.
    runs: dict[int, int]
    run_us: dict[int, float]


class _Steady(Core):
    def __init__(self, plan: Plan, scripts: Scripts, window: float) -> None:
        super().__init__(plan, scripts.wires.num_buses)
        self._lanes = [scripts.of(lane.placement) for lane in plan.lanes]
        self._slots = plan.slots
        num_runs = sum(plan.unit.counts)
        slots = min(self._slots, MANY_SLOTS)
        items = max(sum(len(c.items) for script in lane for c in script.columns) for lane in self._lanes)
        window = min(window, max(1 / slots, LONG_LISTS / max(1, items)))
        self._warm_up = max(slots * WARM_UP, self._slots * MIN_WARM_UP_RUNS / num_runs)
        self._window = max(slots * WINDOW * window, self._slots * MIN_WINDOW_RUNS / num_runs)
        self._done = self._target = self._skipped_us = 0.0
        self._flights: dict[int, Flight] = {}
        self._runs = dict.fromkeys(range(self._slots), 0)
        self._is_long_list = items > LONG_LISTS
        self._sample_runs = LONG_SAMPLE_RUNS if self._is_long_list else SAMPLE_RUNS
        self._mark: _Mark | None = None
        # Slot -> the run that it is in: its script, its ticket and its busy time so far.
        self._script: dict[int, Script] = {}
        self._ticket: dict[int, int] = {}
        self._run_us: dict[int, float] = {}
        self._cuts: dict[int, Cuts] = {}  # by the script's id, which the lanes keep

    @property
    def extent(self) -> tuple[float, float]:
        """Requests' worth of work before the clock counts, and while it does."""
        return self._warm_up, self._window

    def rate_per_us(self, rival: float = 0.0) -> float:
        """Requests per microsecond; rougher where it is clearly below a rival's."""
        for slot in range(self._slots):
            self._admit(slot, 0.0, slot / self._slots)
        since_us, since = self._until(self._warm_up)
        rate = 0.0
        for share, least in (*GIVE_UP, (1.0, 0.0)) if rival and self._is_long_list else ((1.0, 0.0),):
            until_us, until = self._until(self._warm_up + share * self._window)
            rate = (until - since) / (until_us - since_us) if until_us > since_us else 0.0
            if rate < least * rival:
                break
        return rate

    def _until(self, work: float) -> tuple[float, float]:
        """Runs on until so much work is done: (time, work done)."""
        self._target = work
        now: float | None = 0.0
        while self._done < work and now is not None:
            now = self.advance()
        return (now or 0.0) + self._skipped_us, self._done

    def _admit(self, slot: int, now: float, skipped: float = 0.0) -> None:
        """A request begins; of the first ones, the runs that make up the skipped share are left out."""
        lane = self.table.take()
        runs = [(script, 1.0) for script in self._lanes[lane] for _ in range(script.count)]
        total = sum(script.busy_us for script, _ in runs)
        first, spent = 0, 0.0
        while first < len(runs) - 1:
            spent += runs[first][0].busy_us
            if spent > skipped * total:
                break
            first += 1
        flight = Flight(0, slot, lane, runs[first:][::-1], per_us=1.0 / total if total else 0.0)
        self._flights[slot] = flight
        self.begin(flight, now)

    def begin(self, flight: Flight, now: float) -> None:
        """Starts a run, and looks whether many like it can be skipped."""
        slot, script = flight.slot, flight.left[-1][0]
        is_same = self._script.get(slot) is script
        self._script[slot], self._ticket[slot], self._run_us[slot] = script, self._order + 1, 0.0
        super().begin(flight, now)
        self._runs[slot] += 1
        if not is_same or not self._repeats(flight):
            self._mark = None
        elif self._mark is None:
            if all(self._repeats(f) or self._is_long(f) for f in self._flights.values()):
                self._mark = _Mark(slot, now, -1.0, dict(self._runs), {})
        elif self._mark.slot == slot:
            self._sample(self._mark, now)

    def _repeats(self, flight: Flight) -> bool:
        """Are enough runs of one script left to make a sample and skip some?"""
        need = SETTLE_RUNS + 2 * self._sample_runs
        left = flight.left
        return len(left) >= need and left[-1][0] is left[-need][0] is self._script[flight.slot]

    def _is_long(self, flight: Flight) -> bool:
        return len(self._cuts_of(flight.slot).done_us) > LONG_RUN

    def _cuts_of(self, slot: int) -> Cuts:
        script = self._script[slot]
        return self._cuts.setdefault(id(script), Cuts(script))

    def _so_far(self, now: float) -> tuple[float, dict[int, float]]:
        """(work done, slot -> busy time of its run), with what the devices are at."""
        done, run_us = self._done, dict(self._run_us)
        for device in self.devices:
            if device.job is not None:
                flight = self._running[device.job.ticket][0]
                done += (now - device.since_us) * flight.per_us
                run_us[flight.slot] += now - device.since_us
        return done, run_us

    def _sample(self, mark: _Mark, now: float) -> None:
        """Lets the repetition settle, then measures some runs of it, then skips as often as it can."""
        repeating = {slot: f for slot, f in self._flights.items() if self._repeats(f)}
        runs = {slot: self._runs[slot] - mark.runs[slot] for slot in repeating}
        done, run_us = self._so_far(now)
        if mark.done < 0.0:
            if min(runs.values()) >= SETTLE_RUNS:
                self._mark = _Mark(mark.slot, now, done, dict(self._runs), run_us)
            return
        if min(runs.values()) < self._sample_runs or done <= mark.done:
            return
        self._mark = None
        steps = {slot: run_us[slot] - mark.run_us[slot] for slot in self._flights if slot not in repeating}
        times = min(_repeated(f) // runs[slot] for slot, f in repeating.items())
        times = min(times, int((self._target - done) / (done - mark.done)))
        for slot, step in steps.items():
            if step > 0.0:
                # The last part of a run is always simulated.
                times = min(times, int((self._cuts_of(slot).done_us[-1] - run_us[slot]) / step) - 1)
        if times <= 0:
            return
        for slot, flight in repeating.items():
            del flight.left[len(flight.left) - times * runs[slot] :]
        self._skipped_us += times * (now - mark.now)
        self._done += times * (done - mark.done)
        for slot, step in steps.items():
            self._jump(slot, run_us[slot] + times * step, now)

    def _jump(self, slot: int, busy_us: float, now: float) -> None:
        """Takes up a slot's run where so much of it is done."""
        cuts, ticket = self._cuts_of(slot), self._ticket[slot]
        cut = cuts.at(busy_us)
        flight = self._flights[slot]
        self._events = [e for e in self._events if e[4] == END or e[3] != ticket]
        heapq.heapify(self._events)
        for index, device in enumerate(self.devices):
            if device.job is not None and device.job.ticket == ticket:
                self._done += (now - device.since_us) * flight.per_us
                device.job, device.epoch = None, device.epoch + 1
            if not any(job.ticket == ticket for job in device.queue):
                continue
            device.queue.drop(ticket)
            job = cuts.job(index, cut, slot, ticket)
            if job is None:
                flight.waiting -= 1
            else:
                device.queue.add(job)
        self._run_us[slot] = cuts.done_us[cut]
        for index in range(len(self.devices)):
            self._look(index, now)

    def on_stretch(
        self, device: int, flight: Flight, script: Script, stretch: Stretch, stop_us: float
    ) -> None:
        """Counts the work."""
        us = stop_us - self.devices[device].since_us
        self._done += us * flight.per_us
        self._run_us[flight.slot] += us

    def on_request_end(self, flight: Flight, now: float) -> None:
        """The slot takes the next request."""
        self._admit(flight.slot, now)


def _repeated(flight: Flight) -> int:
    """Runs left that are the same as the next one, less one: the last is always simulated."""
    script = flight.left[-1][0]
    count = 0
    for other, _ in reversed(flight.left):
        if other is not script:
            break
        count += 1
    return count - 1


class SteadyRates:
    """Work units per second of plans with their slots full; plans of one unit share what they can."""

    def __init__(self) -> None:
        self._scripts: Scripts | None = None
        # What was simulated -> its rate per microsecond.
        self._known: dict[object, float] = {}
        self._best_glance: dict[int, float] = {}

    def __call__(self, plan: Plan, window: float = 1.0) -> float:
        """The rate of one plan; `window` scales how much work is looked at."""
        return 1e6 * self._rate(plan, window)

    def glance(self, plan: Plan) -> float:
        """A quick look: one request's worth of work, less for a plan that is clearly not the best so far."""
        best = self._best_glance.get(plan.slots, 0.0) if self._shares(plan) else 0.0
        rate = self._rate(plan, 1 / min(plan.slots, MANY_SLOTS), best)
        self._best_glance[plan.slots] = max(best, rate)
        return 1e6 * rate

    def _rate(self, plan: Plan, window: float, rival: float = 0.0) -> float:
        if self._scripts is None or not self._shares(plan):
            self._scripts = Scripts(plan.unit, plan.costs, plan.cluster)
            self._known.clear()
            self._best_glance.clear()
        steady = _Steady(plan, self._scripts, window)
        # Rates of lanes matter only where no table says which lane comes next.
        shares = (plan.lane_table, () if plan.lane_table else tuple(lane.rate_per_s for lane in plan.lanes))
        key = (tuple(lane.placement for lane in plan.lanes), shares, plan.slots, steady.extent)
        rate = self._known.get(key)
        if rate is None:
            rate = steady.rate_per_us(rival)
            if rate >= rival * GIVE_UP[-1][1]:  # only what was simulated to its end
                self._known[key] = rate
        return rate

    def _shares(self, plan: Plan) -> bool:
        """Is it of the unit, the costs and the cluster that are known?"""
        known = self._scripts
        return known is not None and (
            known.unit is plan.unit and known.costs is plan.costs and known.cluster is plan.cluster
        )
