"""Trace -> Graph: what depends on what."""

from tessera.analyze.graph import build_graph, values
from tessera.analyze.hazards import hazards

__all__ = ["build_graph", "hazards", "values"]
