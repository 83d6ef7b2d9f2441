"""Throughput: a linear program over placements, by column generation.

    maximise    sum_p x_p                                  requests per microsecond
    subject to  sum_p x_p busy[p, r] <= 1                  for every device and every link r
                sum_p x_p path[p]  <= depth                requests in flight (Little's law)
                sum_p x_p (held[p, d] - memory[d]) <= 0    for every device d, where memory is short
                x_p >= 0                                   for every placement p

`Pricer` finds the cheapest placement at dual prices y. For any y >= 0 no mix exceeds (y times right-hand
sides) / (cheapest price); the minimum is the bound. The depth row rejects plans with many small transfers and
few requests in flight. It ignores overlap within a request: several depths are tried and simulated.
Placements are priced over kinds of devices (`problem`) and spread over their devices.

Memory rows average weights by share and assume that microbatches follow shares, so each mix is checked as it
would run: lanes are dropped, or fewer requests are in flight, until it fits. The bound ignores memory.

The program is solved thousands of times: a dense simplex (`maximised`) takes 0.2 ms, SciPy's linprog 2.7 ms.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from tessera.plan.arrays import Floats
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.pricing.pricer import Pricer, Prices
from tessera.plan.problem import Column, Kinds, Mix, Problem, kinds_of, microbatch_counts, spread_us

EPSILON = 1e-9
# Pivots by the steepest column, before Bland's rule, which cannot cycle.
GREEDY_PIVOTS, MAX_PIVOTS = 200, 20_000


@dataclass(frozen=True, eq=False)
class Solved:
    mix: Mix
    bound_per_s: float


@dataclass(frozen=True, eq=False)
class Rates:
    # Requests per microsecond.
    rates: Floats
    # Devices and links, path time, bytes per device.
    duals: Floats
    path: float
    memory: Floats


class Pool:
    """Each placement fits memory with one request in flight."""

    def __init__(
        self, problem: Problem, microbatches: int, config: SearchConfig = FULL, fewest: int = 1
    ) -> None:
        self.problem, self.microbatches, self.config = problem, microbatches, config
        # Minimum requests in flight.
        self.fewest = fewest
        self.columns: list[Column] = []
        self.pricer = Pricer(problem, config)
        everywhere = map(problem.alone, range(problem.num_devices))
        self.is_tight = not problem.fits(everywhere, microbatches)

    @cached_property
    def kinds(self) -> Kinds | None:
        return self.problem.once("kinds", lambda: kinds_of(self.problem))

    @cached_property
    def part(self) -> "Pool":
        assert self.kinds is not None, "only where devices are alike"
        return Pool(self.kinds.part, self.microbatches, self.config)

    def over_kinds(self) -> "Pool | None":
        """None without kinds, or if memory is too small."""
        if self.kinds is None:
            return None
        part = self.part.problem
        mapped = [part.column(self.kinds.kind_of[c.labels]) for c in self.columns]
        if not all(self.part.able(column) for column in mapped):
            return None
        self.part.add(*mapped)
        return self.part

    def add(self, *columns: Column) -> bool:
        """True if a column is new and fits."""
        pooled = set(self.columns)
        new = [c for c in columns if c not in pooled and self.able(c)]
        self.columns += new
        return bool(new)

    def held(self, columns: Iterable[Column], microbatches: Floats) -> Floats:
        each = (self.problem.footprints((column,)) for column in columns)
        return np.array([weights + microbatches * request[0] for weights, request in each])

    def fits(self, columns: Iterable[Column], microbatches: int | Sequence[int]) -> bool:
        """Counted only where a replica does not fit everywhere."""
        return not self.is_tight or self.problem.fits(columns, microbatches)

    def able(self, column: Column) -> bool:
        return self.fits((column,), 1)

    def held_by(self, columns: Sequence[Column], shares: Sequence[float] = (1.0,)) -> Mix | None:
        """With as many microbatches as memory holds; None below `fewest` or one per column."""
        mix = Mix(tuple(columns), tuple(shares))
        if self.fits(mix.columns, microbatch_counts(mix, self.microbatches)):
            return mix
        for microbatches in range(self.microbatches - 1, max(self.fewest, len(mix.columns)) - 1, -1):
            counts = microbatch_counts(mix, microbatches)
            if self.problem.fits(mix.columns, counts):
                return replace(mix, microbatches=counts)
        return None

    def price(self, prices: Prices) -> tuple[Column, float]:
        """The cheapest placement, and its lower bound per work unit."""
        labels, bound = self.pricer.cheapest(prices)
        return self.problem.column(labels), bound

    def fitting(self, microbatches: int) -> Column:
        """A cheap placement that fits, if one was found.

        Byte prices rise on overfull devices and fall on others, by steps that grow, and halve on each
        crossing.
        """
        prob, config = self.problem, self.config
        num = prob.num_devices
        link = np.ones((num, num)) * 1e-3
        free = Prices(np.ones(num), link, microbatches=microbatches, tilt=config.tilt)
        # The bound is not needed, and slow with more than two devices.
        column, _ = self.price(replace(free, memory=np.zeros(num)))
        total_bytes = max(1.0, float(prob.resident(microbatches).num_bytes.sum()))
        step = np.full(num, 1e-3 * float(column.busy_us @ np.append(free.device, link)) / total_bytes)
        memory, last = np.zeros(num), np.zeros(num)
        for _ in range(config.max_memory_tries):
            excess = prob.excess_bytes((column,), microbatches)
            if (excess <= 0).all():
                break
            side = np.sign(excess)
            step *= np.where(side == -last, 0.5, np.where(side == last, 1.6, 1.0))
            memory, last = np.maximum(0.0, memory + side * step), side
            column, _ = self.price(replace(free, memory=memory))
        return column


def seed(pool: Pool) -> None:
    """Adds placements that fit memory; a proof that none fits may take long."""
    from tessera.plan.pricing import milp  # slow to import

    if pool.columns and not pool.is_tight:
        return
    prob = pool.problem
    is_few = prob.num_nodes * prob.num_devices <= pool.config.few_choices
    for microbatches in range(pool.microbatches, 0, -1):
        pool.add(prob.once(("fitting", microbatches, pool.config), partial(pool.fitting, microbatches)))
        if microbatches in (1, pool.microbatches) and is_few:
            best = milp.best_placement(prob, microbatches)
            _ = best is not None and pool.add(best[0])
    if not pool.columns:
        milp.check_total(prob)
        roomiest, least_bytes = milp.roomiest(prob)
        if not pool.add(roomiest):
            raise milp.shortage(prob, roomiest, least_bytes)


def generate(pool: Pool, depth: float | None = None) -> Solved:
    """`depth`: path time in periods; None: busy time alone."""
    kinds, part, mix, bound = pool.kinds, pool.over_kinds(), None, np.inf
    if kinds is not None and part is not None:
        rates, bound = _generate(part, depth, kinds.limits)
        mix = trimmed(pool, *_spread_out(pool, part.columns, rates, kinds), depth)
    if mix is None:  # all devices differ, or one of a kind cannot hold it
        rates, own_bound = _generate(pool, depth, np.ones(len(pool.columns[0].busy_us)))
        mix, bound = trimmed(pool, pool.columns, rates, depth), min(bound, own_bound)
    assert mix is not None, "every column fits with one request in flight"
    return Solved(mix, float(max(bound * 1e6, mix.rate_per_s if depth is None else 0.0)))


def _spread_out(
    pool: Pool, columns: list[Column], rates: Floats, kinds: Kinds
) -> tuple[list[Column], Floats]:
    copies: list[Column] = []
    shared: list[float] = []
    for column, rate in zip(columns, rates.tolist(), strict=True):
        if rate > pool.config.min_share * rates.sum():
            spread = kinds.spread(column.labels, pool.config.max_pairings)
            ways = [pool.problem.column(x) for x in spread]
            pool.add(*ways)
            copies += ways
            shared += [rate / len(ways)] * len(ways)
    return copies, np.array(shared)


def _generate(pool: Pool, depth: float | None, capacity: Floats) -> tuple[Floats, float]:
    """(rate of every column per microsecond, bound); capacity[row] in busy time."""
    num = pool.problem.num_devices
    # First bound: free transfers.
    bound = float(capacity[:num].max()) / spread_us(pool.problem.load_us)
    income_of = np.append(capacity, depth or 0.0)
    config = pool.config
    gap = config.limited_gap if depth is not None else config.gap if num == 2 else config.many_gap
    for _ in range(0 if pool.is_tight and depth is not None else config.max_rounds):
        optimum = master(pool, pool.columns, depth, capacity)
        column, cheapest = pool.price(_prices(pool, optimum))
        if cheapest > 0:
            bound = min(bound, float(np.append(optimum.duals, optimum.path) @ income_of) / cheapest)
        if bound <= float(optimum.rates.sum()) * (1 + gap) or not pool.add(column):
            break
    microbatches = pool.microbatches / capacity[:num] if pool.is_tight else None  # shared by a kind
    for _ in range(config.max_memory_rounds if microbatches is not None else 0):
        optimum = master(pool, pool.columns, depth, capacity, microbatches)
        if not pool.add(pool.price(_prices(pool, optimum, microbatches))[0]):
            break
    return master(pool, pool.columns, depth, capacity, microbatches).rates, bound


def _prices(pool: Pool, optimum: Rates, microbatches: Floats | None = None) -> Prices:
    num = pool.problem.num_devices
    on_links = optimum.duals[num:][pool.problem.link_row].reshape(num, num)
    prices = Prices(optimum.duals[:num], on_links, optimum.path)
    if microbatches is None:
        return prices
    return replace(prices, memory=optimum.memory, microbatches=float(microbatches.mean()))


def master(
    pool: Pool,
    columns: list[Column],
    depth: float | None = None,
    capacity: Floats | None = None,
    microbatches: Floats | None = None,
) -> Rates:
    """`microbatches` adds memory rows."""
    num = pool.problem.num_devices
    busy = np.array([c.busy_us for c in columns]).T
    unit = float(busy.max(axis=0).min())
    most = np.ones(len(busy)) if capacity is None else capacity
    path = np.zeros(len(columns)) if depth is None else np.array([c.path_us for c in columns])
    rows = np.vstack([busy, path]) / unit
    right = np.append(most, depth or 0.0)
    memory, goal = pool.problem.memory_bytes, np.ones(len(columns))
    if microbatches is not None:
        # Slack: overfull share of memory, at a penalty.
        over = pool.held(columns, microbatches).T / memory[:, None] - 1.0
        rows = np.block([[rows, np.zeros((len(rows), 1))], [over, -np.ones((num, 1))]])
        right, goal = np.append(right, np.zeros(num)), np.append(goal, -pool.config.memory_penalty)
    used = rows.any(axis=1)
    best, prices = maximised(goal, rows[used], right[used])
    duals = np.zeros(len(rows))
    duals[used] = prices / unit
    at = len(busy)
    bytes_ = duals[at + 1 :] * unit / memory if microbatches is not None else np.zeros(num)
    rates = best[: len(columns)] / unit
    return Rates(rates, duals[:at], float(duals[at]), bytes_)


def trimmed(pool: Pool, columns: list[Column], rates: Floats, depth: float | None) -> Mix | None:
    """Main lanes that fit together, rebalanced."""
    order, min_share = np.argsort(-rates, kind="stable"), pool.config.min_share
    kept = [columns[i] for i in order[rates[order] > min_share * rates.sum()].tolist()]
    mixes: list[Mix] = []
    while kept:
        again = master(pool, kept, depth).rates
        live = [(c, float(x)) for c, x in zip(kept, again, strict=True) if x > min_share * again.sum()]
        total = sum(x for _, x in live)
        mix = pool.held_by([c for c, _ in live], [x / total for _, x in live])
        mixes += [mix] if mix is not None else []
        if mix is not None and not mix.microbatches:
            break
        least = min(live, key=lambda x: x[1])[0]
        kept = [c for c, _ in live if c is not least]
    if pool.is_tight:
        mixes += [mix for c in columns if (mix := pool.held_by((c,))) is not None]
    return max(mixes, key=lambda m: upper_bound_per_s(m, pool.microbatches), default=None)


def upper_bound_per_s(mix: Mix, microbatches: int) -> float:
    if not mix.microbatches:
        return mix.rate_per_s
    paths = [n / c.path_us for n, c in zip(microbatch_counts(mix, microbatches), mix.columns, strict=True)]
    return min(mix.rate_per_s, 1e6 * sum(paths))


def balanced(pool: Pool, columns: Iterable[Column]) -> Mix | None:
    able = [c for c in columns if pool.able(c)]
    if not able:
        return None
    microbatches = np.full(pool.problem.num_devices, float(pool.microbatches)) if pool.is_tight else None
    return trimmed(pool, able, master(pool, able, microbatches=microbatches).rates, None)


def maximised(goal: Floats, rows: Floats, right: Floats) -> tuple[Floats, Floats]:
    """(variables, price of every row); an optimum must exist."""
    num_rows, num = rows.shape
    table = np.zeros((num_rows + 1, num + num_rows + 1))
    table[:-1, :num], table[:-1, -1], table[-1, :num] = rows, right, -goal
    table[:-1, num:-1] = np.eye(num_rows)
    basis = np.arange(num, num + num_rows)
    pivots = 0
    while (improving := table[-1, :-1] < -EPSILON).any():
        pivots += 1
        assert pivots < MAX_PIVOTS, "there is an optimum"
        entering = int(table[-1, :-1].argmin() if pivots < GREEDY_PIVOTS else improving.argmax())
        step = table[:-1, entering]
        ratios = np.divide(table[:-1, -1], step, out=np.full(num_rows, np.inf), where=step > EPSILON)
        tied = np.flatnonzero(ratios <= ratios.min() + EPSILON)
        leaving = int(tied[basis[tied].argmin()])
        table[leaving] /= table[leaving, entering]
        factors = table[:, entering].copy()
        factors[leaving] = 0.0
        table -= factors[:, None] * table[leaving]
        basis[leaving] = entering
    x = np.zeros(num + num_rows)
    x[basis] = table[:-1, -1]
    return np.maximum(0.0, x[:num]), np.maximum(0.0, table[-1, num:-1])
