"""Trace -> Graph: what depends on what."""

from tessera.analyze.graph import build_graph
from tessera.analyze.hazards import hazards
from tessera.analyze.values import values

__all__ = ["build_graph", "hazards", "values"]
