"""Latency: a placement with minimal makespan for one request, and a proved bound. See `placement`."""

from tessera.plan.latency.placement import Fastest, RequestTimer, bound_us, solve

__all__ = ["Fastest", "RequestTimer", "bound_us", "solve"]
