"""Pricing: the linear program over placements, and the cheapest placement at its prices.

Read `throughput` for the program, `pricer` for the placement that its prices ask for, by minimum cuts (`cut`)
or by eliminating nodes (`elimination`); `milp` is the published program for one placement, `shortage` says
why nothing fits.
"""

from tessera.plan.pricing.pricer import Bill, Priced, Pricer, Prices, swap

__all__ = ["Bill", "Priced", "Pricer", "Prices", "swap"]
