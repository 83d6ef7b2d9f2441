"""Plan -> Timeline: the executor's schedule under a virtual clock."""

from tessera.simulate.core import simulate, throughput_per_s
from tessera.simulate.steady import SteadyRates

__all__ = ["SteadyRates", "simulate", "throughput_per_s"]
