"""Joint: one problem a batch on the same devices, and the linear program over the placements of all of them.

Rates count work units of the first batch. A request of batch b is b / b0 of them, so a column of that batch
is divided by this weight: its busy time, path and transfers are then those of one such work unit, and

    maximise    sum x_p            over the columns p of all batches
    subject to  the rows of `throughput`

is the same linear program as for one batch. For any prices y >= 0 of the rows, no mix exceeds (sum of y) /
(the least price of a work unit), where the least is over all placements of all batches: each batch is priced
by itself, divided by its weight, and the least of them counts. That is the bound; it leaves out memory.

A device holds the weights that any lane reads there once, whatever the batches, and for every microbatch the
state and temporaries of its lane. A batch of which nothing fits takes no part, in the bound either.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tessera import ir
from tessera.plan.arrays import Bools, Floats, Ints, Labels
from tessera.plan.pricing import throughput
from tessera.plan.pricing.pricer import Prices
from tessera.plan.pricing.throughput import FREE, Limits, Pool, Solved
from tessera.plan.problem import Column, Kinds, Mix, Problem, microbatch_counts
from tessera.plan.search.robust import Sampler
from tessera.plan.search.task import Task

# Prices that are tried for the first bound.
ROUNDS = 40


@dataclass(eq=False)
class JointTask(Task):
    """The tasks of several batches as one; `problem` is the first one's."""

    parts: tuple[Task, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """One a batch."""
        return tuple(part.problem for part in self.parts)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Work units in a request of each batch."""
        batches = [p.unit.batch for p in self.problems]
        return tuple(batch / batches[0] for batch in batches)

    @cached_property
    def variants(self) -> tuple[ir.Variant, ...]:
        """The batches behind the first."""
        return tuple(ir.Variant(p.unit, p.costs) for p in self.problems[1:])

    @cached_property
    def sampler(self) -> Sampler:
        """With one factor for a kernel at all batches."""
        return Sampler(self.problem, tuple(zip(self.problems[1:], self.weights[1:], strict=True)))

    def weight_of(self, column: Column) -> float:
        """Work units in one request of a column."""
        return self.weights[column.variant]

    def scaled(self, variant: int, column: Column) -> Column:
        """A column of one batch's own task as one of all of them."""
        weight = self.weights[variant]
        return replace(
            column,
            busy_us=column.busy_us / weight,
            path_us=column.path_us / weight,
            num_messages=column.num_messages / weight,
            variant=variant,
        )

    def scaled_mix(self, variant: int, mix: Mix) -> Mix:
        """A mix of one batch's own task as one of all of them."""
        return Mix(tuple(self.scaled(variant, c) for c in mix.columns), mix.shares, mix.microbatches)

    @property
    def columns(self) -> list[Column]:
        """Those of all batches that are known."""
        return [self.scaled(v, c) for v, part in enumerate(self.parts) for c in part.pool.columns]

    def column(self, variant: int, labels: Labels) -> Column:
        """A placement of one batch, its loads those of a work unit."""
        return self.scaled(variant, self.problems[variant].column(labels))

    def add(self, variant: int, labels: Labels) -> None:
        """A placement of one batch that may be of use."""
        self.parts[variant].add(0, labels)

    def held_by(self, column: Column) -> Mix | None:
        """One placement with as many requests in flight as memory holds."""
        for microbatches in range(self.microbatches, 0, -1):
            if self.fits_with((column,), (microbatches,)):
                return Mix((column,), (1.0,), (microbatches,))
        return None

    def holds(self, mix: Mix) -> bool:
        """Are the constraints kept, and does memory hold a mix as it would run?"""
        return self.fits_with(mix.columns, microbatch_counts(mix, self.microbatches))

    def fits_with(self, columns: Sequence[Column], microbatches: int | Sequence[int]) -> bool:
        """With so many requests in flight on each column; of one number, all on the one that needs most."""
        if not all(self.problems[c.variant].is_allowed(c.labels) for c in columns):
            return False
        fixed, each = self.footprints(columns)
        held = (
            microbatches * each.max(axis=0)
            if isinstance(microbatches, int)
            else np.asarray(microbatches) @ each
        )
        return bool((fixed + held <= self.problem.memory_bytes).all())

    def footprint(self, columns: Iterable[Column]) -> tuple[Floats, Floats]:
        """(bytes of weights on each device, bytes that one more request in flight may take there)."""
        fixed, each = self.footprints(columns)
        return fixed, np.asarray(each.max(axis=0))

    def footprints(self, columns: Iterable[Column]) -> tuple[Floats, Floats]:
        """(bytes of weights on each device, [column, device]: bytes of a request in flight there)."""
        sizes, items = self._weights
        num = self.problem.num_devices
        held: Bools = np.zeros((len(sizes), num), dtype=np.bool_)
        each: list[Floats] = []
        for column in columns:
            problem = self.problems[column.variant]
            held[items[column.variant]] |= problem.weights.present(column.labels, num)
            each.append(problem.microbatch_bytes(column.labels))
        return np.asarray(sizes @ held, dtype=np.float64), np.array(each).reshape(-1, num)

    @cached_property
    def _weights(self) -> tuple[Floats, tuple[Ints, ...]]:
        """(bytes of every weight of any batch, [batch]: numbers of its own weights among them)."""
        number: dict[str, int] = {}
        items = tuple(
            np.array([number.setdefault(name, len(number)) for name in p.weights.names], dtype=np.int64)
            for p in self.problems
        )
        sizes = np.zeros(len(number))
        for problem, own in zip(self.problems, items, strict=True):
            np.maximum.at(sizes, own, problem.weights.num_bytes)
        return sizes, items

    @cached_property
    def free(self) -> Solved:
        """The optimum by busy time alone over all batches, and its bound."""
        columns, rates, bound = _generate(self)
        mix = trimmed(self, columns, rates, FREE)
        return Solved(mix, max(bound * 1e6, mix.rate_per_s))


def optimum(task: JointTask, columns: Sequence[Column], limits: Limits) -> Mix | None:
    """The best mix of some columns under limits of depth; None if there is none."""
    rates = throughput.master(task.parts[0].pool, list(columns), limits).rates
    return trimmed(task, columns, rates, limits) if rates.sum() > 0 else None


def trimmed(task: JointTask, columns: Sequence[Column], rates: Floats, limits: Limits) -> Mix:
    """The lanes that matter and fit together, with shares that balance them."""
    order = np.argsort(-rates, kind="stable")
    kept = [columns[i] for i in order[rates[order] > throughput.MIN_SHARE * rates.sum()].tolist()]
    while True:
        again = throughput.master(task.parts[0].pool, kept, limits).rates
        least = throughput.MIN_SHARE * again.sum()
        live = [(c, float(x)) for c, x in zip(kept, again, strict=True) if x > least]
        total = sum(x for _, x in live)
        mix = Mix(tuple(c for c, _ in live), tuple(x / total for _, x in live))
        if len(live) == 1 or task.holds(mix):
            return mix
        rare = min(live, key=lambda x: x[1])[0]
        kept = [c for c, _ in live if c is not rare]


def _generate(task: JointTask) -> tuple[list[Column], Floats, float]:
    """Column generation over all batches: (columns, their rates per microsecond, bound).

    Where devices are alike, over kinds of them; see `problem`.
    """
    kinds = _kinds(task)
    over = [] if kinds is None else [part.pool.over_kinds() for part in task.parts]
    pools = [pool for pool in over if pool is not None]
    if len(pools) < len(task.parts):
        kinds, pools = None, [part.pool for part in task.parts]
    capacity = np.ones(len(pools[0].columns[0].busy_us)) if kinds is None else kinds.limits
    columns = [task.scaled(v, c) for v, pool in enumerate(pools) for c in pool.columns]
    is_pair = pools[0].problem.num_devices == 2
    gap = throughput.GAP if is_pair else throughput.MANY_GAP
    # With transfers free: a first bound, which pricing improves.
    loads = [pool.problem.load_us / w for pool, w in zip(pools, task.weights, strict=True)]
    bound, center = float(capacity[: loads[0].shape[1]].max()) / _spread_us(loads), np.zeros(0)
    rates = np.zeros(0)
    for _ in range(throughput.MAX_ROUNDS):
        found = throughput.master(pools[0], columns, FREE, capacity)
        rates, new = found.rates, list[Column]()
        # As in `throughput`: half way to the prices of the best bound first, then the last prices.
        for share in (0.0,) if is_pair or not len(center) else (0.5, 0.0):
            tried = share * center + (1 - share) * found.duals if share else found.duals
            new, cheapest = _priced(task, pools, tried)
            if cheapest > 0 and float(tried @ capacity) / cheapest < bound:
                bound, center = float(tried @ capacity) / cheapest, tried
            if new:
                break
        columns += new
        if bound <= float(rates.sum()) * (1 + gap) or not new:
            break
    rates = np.append(rates, np.zeros(len(columns) - len(rates)))
    if kinds is None:
        return columns, rates, bound
    return *_spread(task, columns, rates, kinds), bound


def _priced(task: JointTask, pools: Sequence[Pool], duals: Floats) -> tuple[list[Column], float]:
    """(new columns of every batch that are cheap at these prices, the least price of a work unit)."""
    num = pools[0].problem.num_devices
    on_links = duals[num:][pools[0].problem.link_row].reshape(num, num)
    prices = Prices(duals[:num], on_links)
    new: list[Column] = []
    least = float("inf")
    for variant, pool in enumerate(pools):
        column, cheapest = pool.price(prices)
        least = min(least, cheapest / task.weights[variant])
        if pool.add(column):
            new.append(task.scaled(variant, column))
    return new, least


def _spread_us(loads: Sequence[Floats]) -> float:
    """No mix of batches, even with fractions of launches, keeps all devices below this for a work unit.

    loads[batch][node, device], of one work unit. Any prices of the devices that sum to one prove such a
    figure: what the cheapest batch costs with every node where it is cheapest. The best of some is returned.
    """
    num = loads[0].shape[1]
    prices = np.full(num, 1.0 / num)
    best = 0.0
    for round_number in range(1, ROUNDS):
        priced = [(load * prices).min(axis=1).sum() for load in loads]
        load = loads[int(np.argmin(priced))]
        best = max(best, float(min(priced)))
        choice = (load * prices).argmin(axis=1)
        busy = np.bincount(choice, weights=load[np.arange(len(choice)), choice], minlength=num)
        # Busier devices become dearer, by steps that shrink.
        prices = prices * np.exp((busy / max(busy.max(), 1e-12) - 0.5) / round_number)
        prices /= prices.sum()
    return best


def _kinds(task: JointTask) -> Kinds | None:
    """The kinds of devices, if they are the same at all batches."""
    found = [part.pool.kinds for part in task.parts]
    first = found[0]
    if first is None or any(k is None or k.members != first.members for k in found):
        return None
    return first


def _spread(
    task: JointTask, columns: Sequence[Column], rates: Floats, kinds: Kinds
) -> tuple[list[Column], Floats]:
    """Placements over kinds on real devices: one for every way the cards of the kinds are paired."""
    found: list[Column] = []
    shared: list[float] = []
    for column, rate in zip(columns, rates.tolist(), strict=True):
        if rate > throughput.MIN_SHARE * rates.sum():
            problem = task.problems[column.variant]
            ways = [problem.column(labels) for labels in kinds.spread(column.labels)]
            found += [task.scaled(column.variant, way) for way in ways]
            shared += [rate / len(ways)] * len(ways)
    return found, np.array(shared)
