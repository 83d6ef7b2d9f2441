"""steady_throughput: the rate of a plan with all slots full, from a short stretch of simulated time.

The same loop as `simulate`, without a timeline. Slots start spread over their requests instead of all at the
beginning, so the system is full at once and a quarter of a request's time with four slots sees every phase of
a request once. While every slot repeats a step, a few runs are simulated and the rest is skipped: each slot
as many runs as it did in the few, times the same number. Work is counted as fractions of a request: a
stretch's share of its request's busy time.

Long programs need less of it: what a few hundred transfers see is close to what thousands do. A quick look
ends early where it is clearly behind the best look so far; its figure is then rougher still.
"""

from dataclasses import dataclass

from tessera.ir import Plan
from tessera.simulate.columns import Script, Scripts, Stretch
from tessera.simulate.core import Core, Flight

# Requests' worth of work per slot: before the clock counts, and while it does; but at least so many runs.
WARM_UP, MIN_WARM_UP_RUNS = 0.25, 2
WINDOW, MIN_WINDOW_RUNS = 1.0, 6
# Programs of more items than this average out by themselves: less work is looked at, down to one request's
# and to this share of the warm-up and of the fewest runs.
LONG_LISTS, LEAST_SHARE = 400, 0.25
# A quick look ends after this share of its window if it is so far behind the best one.
GIVE_UP = ((0.25, 0.88), (0.5, 0.95))
# With more slots than this, the work that is looked at grows no further.
MANY_SLOTS = 4
# Runs of every slot before a repetition is believed to be steady, and runs that stand for the skipped ones.
SETTLE_RUNS, SAMPLE_RUNS = 1, 2


@dataclass(slots=True)
class _Mark:
    """Where a sample of a repetition began."""

    slot: int
    now: float
    done: float
    # Slot -> runs it had begun.
    runs: dict[int, int]


class _Steady(Core):
    def __init__(self, plan: Plan, scripts: Scripts, window: float) -> None:
        super().__init__(plan, scripts.wires.num_buses)
        self._lanes = [scripts.of(lane.placement) for lane in plan.lanes]
        self._slots = plan.slots
        num_runs = sum(plan.unit.counts)
        slots = min(self._slots, MANY_SLOTS)
        items = max(sum(len(c.items) for script in lane for c in script.columns) for lane in self._lanes)
        window = min(window, max(1 / slots, LONG_LISTS / max(1, items)))
        share = min(1.0, max(LEAST_SHARE, LONG_LISTS / max(1, items)))
        per_run = self._slots * share / num_runs
        self._warm_up = max(slots * WARM_UP * share, per_run * MIN_WARM_UP_RUNS)
        self._window = max(slots * WINDOW * window, per_run * MIN_WINDOW_RUNS)
        self._done = self._target = self._skipped_us = 0.0
        self._flights: dict[int, Flight] = {}
        self._runs = dict.fromkeys(range(self._slots), 0)
        self._mark: _Mark | None = None

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
        for share, least in (*GIVE_UP, (1.0, 0.0)) if rival else ((1.0, 0.0),):
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
        super().begin(flight, now)
        self._runs[flight.slot] += 1
        if not self._repeats(flight):
            self._mark = None
        elif self._mark is None:
            if all(self._repeats(f) for f in self._flights.values()):
                self._mark = _Mark(flight.slot, now, -1.0, dict(self._runs))
        elif self._mark.slot == flight.slot:
            self._sample(self._mark, now)

    def _repeats(self, flight: Flight) -> bool:
        """Are enough runs of one script left to make a sample and skip some?"""
        need = SETTLE_RUNS + 2 * SAMPLE_RUNS
        left = flight.left
        return len(left) >= need and left[-1][0] is left[-need][0]

    def _sample(self, mark: _Mark, now: float) -> None:
        """Lets the repetition settle, then measures some runs of it, then skips as often as it can."""
        done = {slot: count - mark.runs[slot] for slot, count in self._runs.items()}
        if mark.done < 0.0:
            if min(done.values()) >= SETTLE_RUNS:
                self._mark = _Mark(mark.slot, now, self._done, dict(self._runs))
            return
        if min(done.values()) < SAMPLE_RUNS or self._done <= mark.done:
            return
        times = min(_repeated(f) // done[slot] for slot, f in self._flights.items())
        times = min(times, int((self._target - self._done) / (self._done - mark.done)))
        if times > 0:
            for slot, flight in self._flights.items():
                del flight.left[len(flight.left) - times * done[slot] :]
            self._skipped_us += times * (now - mark.now)
            self._done += times * (self._done - mark.done)
        self._mark = None

    def on_stretch(
        self, device: int, flight: Flight, script: Script, stretch: Stretch, stop_us: float
    ) -> None:
        """Counts the work."""
        self._done += (stop_us - self.devices[device].since_us) * flight.per_us

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
        shares = plan.lane_table or tuple(lane.rate_per_s for lane in plan.lanes)
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
