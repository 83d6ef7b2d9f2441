"""Latency: one placement of least makespan for one request alone, under a proved bound. Read `placement`."""

from tessera.plan.latency.placement import Clock, Fastest, bound_us, solve

__all__ = ["Clock", "Fastest", "bound_us", "solve"]
