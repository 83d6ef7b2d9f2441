"""Plan -> Timeline: the executor's schedule under a virtual clock."""

from tessera.simulate.closed import SteadyRates, simulate, throughput_per_s

__all__ = ["SteadyRates", "simulate", "throughput_per_s"]
