"""Plan -> Timeline: the executor on null devices under a virtual clock."""

from tessera.simulate.clock import simulate
from tessera.simulate.steady import SteadyRates
from tessera.simulate.throughput import throughput_per_s

__all__ = ["SteadyRates", "simulate", "throughput_per_s"]
