"""Latency: a placement with minimal makespan for one request, and a proved bound."""

from tessera.plan.latency.placement import Fastest, RequestTimer, bound_us, solve

__all__ = ["Fastest", "RequestTimer", "bound_us", "solve"]
