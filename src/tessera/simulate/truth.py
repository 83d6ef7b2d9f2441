"""Truth: what launches really take, which is not what plans believe.

A price list of its own: that of one plan, with every kernel type mispriced on every device by a factor drawn
from the seed, and with devices that became slow. All plans are timed by the same truth, whatever costs they
were made with.
"""

import math
import zlib
from dataclasses import dataclass

import numpy as np

from tessera.adapt import scaled_costs
from tessera.ir import Cluster, Plan
from tessera.simulate.columns import Scripts


@dataclass(frozen=True)
class Truth:
    """What each launch really takes: the costs of a plan, times factors by kernel type and by device."""

    plan: Plan
    noise: float = 0.0
    seed: int = 0
    # (device, factor) of devices that are slower than they should be.
    slow: tuple[tuple[str, float], ...] = ()

    @property
    def cluster(self) -> Cluster:
        """All devices there are."""
        return self.plan.cluster

    def factor(self, kernel: str, device: str) -> float:
        """How many times as long as modelled a kernel type takes on a device; its logarithm is normal."""
        found = math.prod(factor for name, factor in self.slow if name == device)
        if not self.noise:
            return found
        words = [self.seed, zlib.crc32(kernel.encode()), zlib.crc32(device.encode())]
        return found * math.exp(self.noise * float(np.random.default_rng(words).standard_normal()))

    def scripts(self) -> tuple[Scripts, ...]:
        """Makes what devices do of placements, at the costs that hold: one a variant of the plan."""
        return tuple(
            Scripts(variant.unit, scaled_costs(variant.unit, variant.costs, self.factor), self.cluster)
            for variant in self.plan.every_variant
        )
