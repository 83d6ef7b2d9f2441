"""Plan -> Timeline: the executor on null devices under a virtual clock."""

from tessera.simulate.core import simulate, throughput_per_s
from tessera.simulate.steady import SteadyRates

__all__ = ["SteadyRates", "simulate", "throughput_per_s"]
