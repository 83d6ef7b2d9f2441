"""Advise: a load in, the cheapest GPUs that carry it out. Read `search`."""

from tessera.advise.records import Advice, Choice, Load, Market
from tessera.advise.search import advise

__all__ = ["Advice", "Choice", "Load", "Market", "advise"]
