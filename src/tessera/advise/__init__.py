"""Advise: which cards carry a load, at what rate, price and latency; see `search` (which imports torch)."""

from tessera.advise.records import Advice, Candidate, Load, Market, Regime

__all__ = ["Advice", "Candidate", "Load", "Market", "Regime"]
