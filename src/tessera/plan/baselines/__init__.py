"""Baselines: the coarse policies that every plan is compared with."""

from tessera.plan.baselines.coarse import COARSE, coarse_mixes

__all__ = ["COARSE", "coarse_mixes"]
