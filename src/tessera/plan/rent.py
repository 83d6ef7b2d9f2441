"""Rent: sets of GPUs, and bounds of their throughput.

A basket holds GPUs of one provider and one maker. The bound spreads every launch freely, with free transfers
and unlimited memory; it only discards baskets. So does the minimum time of a step: every launch on its
fastest GPU.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from tessera import ir
from tessera.plan.arrays import Floats
from tessera.plan.problem import build, spread_us


@dataclass(frozen=True, slots=True)
class Offer:
    gpu: str
    maker: str
    # (provider, USD per hour)
    prices: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Basket:
    # In order of the offers, with repeats.
    gpus: tuple[str, ...]
    provider: str
    usd_per_hour: float

    def __str__(self) -> str:
        counted = Counter(self.gpus)
        return " + ".join(f"{n} x {gpu}" if n > 1 else gpu for gpu, n in counted.items())


def baskets(offers: Sequence[Offer], max_devices: int, provider: str = "") -> list[Basket]:
    """Every basket at its cheapest provider, by price, then size."""
    best: dict[tuple[str, ...], Basket] = {}
    names = dict.fromkeys(p for offer in offers for p, _ in offer.prices if provider in ("", p))
    for name in names:
        for basket in _of(offers, max_devices, name):
            known = best.get(basket.gpus)
            if known is None or basket.usd_per_hour < known.usd_per_hour:
                best[basket.gpus] = basket
    return sorted(best.values(), key=lambda b: (round(b.usd_per_hour, 6), len(b.gpus), b.gpus))


def _of(offers: Sequence[Offer], max_devices: int, provider: str) -> Iterator[Basket]:
    for maker in dict.fromkeys(offer.maker for offer in offers):
        priced = [
            (offer.gpu, usd)
            for offer in offers
            for name, usd in offer.prices
            if name == provider and offer.maker == maker
        ]
        for num in range(1, max_devices + 1):
            for chosen in combinations_with_replacement(priced, num):
                yield Basket(tuple(gpu for gpu, _ in chosen), provider, sum(usd for _, usd in chosen))


@dataclass(frozen=True, eq=False)
class Limit:
    """Upper bound of a unit's rate on a basket."""

    column_of: Mapping[str, int]
    # [distinct launch, GPU]: microseconds per request.
    load_us: Floats

    def per_s(self, gpus: Iterable[str]) -> float:
        """Work units per second."""
        return 1e6 / spread_us(self._load_us(gpus))

    def upper_bound_per_s(self, gpus: Iterable[str]) -> float:
        """A looser, faster limit: the first prices of `spread_us`."""
        load = self._load_us(gpus)
        weights = 1.0 / load.sum(axis=0)
        return 1e6 * float(weights.sum()) / float((load * weights).min(axis=1).sum())

    def _load_us(self, gpus: Iterable[str]) -> Floats:
        """n equal GPUs count as one, n times as fast."""
        counted = Counter(gpus)
        columns = [self.column_of[gpu] for gpu in counted]
        return np.asarray(self.load_us[:, columns] / np.array(list(counted.values())))


def limit_of(unit: ir.WorkUnit, costs: tuple[ir.Costs, ...]) -> Limit:
    """From the costs of a unit on each GPU."""
    rows: Counter[tuple[float, ...]] = Counter()
    for listed, count in zip(costs, unit.counts, strict=True):
        for row in listed.costs:
            rows[tuple(cost.us for cost in row)] += count
    load = np.array([[us * count for us in row] for row, count in rows.items()])
    return Limit({d.gpu: n for n, d in enumerate(costs[0].devices)}, load)


def alone_bytes(unit: ir.WorkUnit, costs: tuple[ir.Costs, ...], cluster: ir.Cluster) -> float:
    """Weights, state and temporaries of one batch on one device."""
    problem = build(unit, costs, cluster)
    fixed, each = problem.footprint((problem.alone(0),))
    return float(fixed[0] + each[0])


def shortest_us(graph: ir.Graph, costs: ir.Costs, columns: Sequence[int], num_devices: int) -> float:
    """Lower bound of the step's time on these GPUs."""
    fastest = [min(row[column].us for column in columns) for row in costs.costs]
    ready = [0.0] * len(fastest)
    made: dict[int, list[int]] = {}
    for value in graph.values:
        if value.producer is not None:
            made.setdefault(value.producer, []).extend(value.readers)
    longest = 0.0
    for launch, us in enumerate(fastest):
        end = ready[launch] + us
        longest = max(longest, end)
        for reader in made.get(launch, ()):
            ready[reader] = max(ready[reader], end)
    return max(longest, sum(fastest) / num_devices)
