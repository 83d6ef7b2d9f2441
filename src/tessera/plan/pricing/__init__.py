"""Pricing: the linear program over placements, and the cheapest placement at its prices.

Read `throughput` for the program, `pricer` for the placement that its prices ask for, by minimum cuts or by
eliminating nodes (`elimination`); `milp` is the published program for one placement, and says why nothing
fits.
"""
