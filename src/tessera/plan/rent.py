"""Rent: sets of GPUs of one provider and one maker, and bounds of their throughput.

The bound spreads launches freely, with free transfers and unlimited memory; it only discards sets.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from tessera.plan.arrays import Floats
from tessera.plan.problem import SPREAD_ROUNDS, spread_us


@dataclass(frozen=True, slots=True)
class Offer:
    gpu: str
    maker: str
    # (provider, USD per hour)
    prices: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Basket:
    # With repeats.
    gpus: tuple[str, ...]
    provider: str
    usd_per_hour: float

    def __str__(self) -> str:
        counted = Counter(self.gpus)
        return " + ".join(f"{n} x {gpu}" if n > 1 else gpu for gpu, n in counted.items())


def baskets(offers: Sequence[Offer], max_devices: int, provider: str = "") -> list[Basket]:
    """Each at its cheapest provider; by price, then size."""
    best: dict[tuple[str, ...], Basket] = {}
    names = dict.fromkeys(p for offer in offers for p, _ in offer.prices if provider in ("", p))
    for name in names:
        for basket in _of_provider(offers, max_devices, name):
            cheapest = best.get(basket.gpus)
            if cheapest is None or basket.usd_per_hour < cheapest.usd_per_hour:
                best[basket.gpus] = basket
    return sorted(best.values(), key=lambda b: (round(b.usd_per_hour, 6), len(b.gpus), b.gpus))


def _of_provider(offers: Sequence[Offer], max_devices: int, provider: str) -> Iterator[Basket]:
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
    column_of: Mapping[str, int]
    # [kind of launch, GPU] per request.
    load_us: Floats

    def per_s(self, gpus: Iterable[str], rounds: int = SPREAD_ROUNDS) -> float:
        """n equal GPUs count as one, n times as fast. With fewer rounds, looser and faster."""
        counted = Counter(gpus)
        columns = [self.column_of[gpu] for gpu in counted]
        return 1e6 / spread_us(self.load_us[:, columns] / np.array(list(counted.values())), rounds)
