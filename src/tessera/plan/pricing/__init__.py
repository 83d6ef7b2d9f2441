"""Pricing: the linear program over placements, and the cheapest placement at its prices.

`throughput`: the program. `pricer`: the cheapest placement, by minimum cuts or node elimination
(`elimination`). `milp`: the single-placement program, and why nothing fits.
"""
