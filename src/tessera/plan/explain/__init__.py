"""Explain: what a plan does and why, as records for others to show."""

from tessera.plan.explain.explanation import Explanation, Room, explain, latency_bound_us

__all__ = ["Explanation", "Room", "explain", "latency_bound_us"]
