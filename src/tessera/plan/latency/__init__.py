"""Latency: one placement of least makespan for one request alone, under a proved bound. Read `placement`."""

from tessera.plan.latency.placement import Fastest, RequestTimer, bound_us, solve

__all__ = ["Fastest", "RequestTimer", "bound_us", "solve"]
