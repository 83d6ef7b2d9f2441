"""Trace -> Graph: what depends on what."""

from tessera.analyze.graph import build_graph, hazards, values

__all__ = ["build_graph", "hazards", "values"]
