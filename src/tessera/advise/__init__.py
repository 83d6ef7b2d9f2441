"""Advise: a load in, the cheapest GPUs that carry it out, or what to do with GPUs that are there.

Read `search` for the first, `owned` for the second.
"""

from tessera.advise.owned import NextCard, OwnedAdvice, Regime, Way, use
from tessera.advise.search import Advice, Choice, Load, Market, advise

__all__ = [
    "Advice", "Choice", "Load", "Market", "NextCard", "OwnedAdvice", "Regime", "Way", "advise", "use",
]  # fmt: skip
