"""Pricing: the linear program over placements (`throughput`), the cheapest placement at its prices
(`pricer`), and mixed-integer programs (`milp`).
"""
