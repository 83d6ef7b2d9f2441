"""Advise: which cards carry a load, at what rate, price and latency; `search` imports torch."""

from tessera.advise.records import Advice, Candidate, Market, ModelLoad, Regime, RentedLoad

__all__ = ["Advice", "Candidate", "Market", "ModelLoad", "Regime", "RentedLoad"]
