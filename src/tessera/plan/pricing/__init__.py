"""Pricing: the linear program over placements (`throughput`), the cheapest placement at its prices (`pricer`,
`elimination`), and mixed-integer programs (`milp`).
"""
