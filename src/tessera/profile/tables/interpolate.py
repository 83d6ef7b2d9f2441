"""Interpolation between measured points, in logarithms, with an error that was measured.

What is interpolated is not the time but its ratio to the model's (`tessera.profile.fitted`), which changes
little from point to point: the mean of the logarithms of the nearest points' ratios, weighted by one over the
squared distance; at a measured point, its own. Distances are octaves: 1 is one doubling of one size.

The error at a distance is what the same rule makes on the table's own points when every point nearer than
that is hidden, the point itself included: leave-one-out, and more. Beyond the last such distance, or more
than a factor of MAX_BEYOND outside the table's sizes, there is no answer.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tessera.profile.fitted import Array

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

NEAREST = 8
# Keeps a point that is hit from outweighing all others by chance of rounding, in octaves.
SOFTENING = 0.05
# At which distances the error is measured; the last is as far as is interpolated.
RADII = (0.01, 0.5, 1.0, 2.0)
MAX_BEYOND = 2.0
# Points whose error is measured; more do not change it.
MAX_JUDGED = 120


@dataclass(frozen=True)
class Surface:
    """Measured points of one table and what they say about the model."""

    # (points, sizes), in octaves.
    places: Array
    # log(measured / modelled).
    residual: Array

    @cached_property
    def tree(self) -> "cKDTree[None]":
        """Finds neighbours."""
        # Slow to import, and most commands ask no table.
        from scipy.spatial import cKDTree

        return cKDTree(self.places)

    def at(self, places: Array) -> tuple[Array, Array]:
        """log(measured / modelled) at each place, and how far the nearest point is."""
        count = min(NEAREST, len(self.places))
        found = self.tree.query(places, k=list(range(1, count + 1)))
        distance, index = (np.asarray(x) for x in found)
        nearest, between = distance[:, 0], _weighted(distance, self.residual[index])
        return np.where(nearest < RADII[0], self.residual[index[:, 0]], between), nearest

    def is_inside(self, places: Array) -> npt.NDArray[np.bool_]:
        """True where no size is further than MAX_BEYOND outside the table's."""
        margin = np.log2(MAX_BEYOND)
        low, high = self.places.min(axis=0) - margin, self.places.max(axis=0) + margin
        return np.asarray(((places >= low) & (places <= high)).all(axis=1), dtype=np.bool_)

    def errors(self) -> Array:
        """Mean relative error at each of RADII, never falling with distance."""
        step = max(1, len(self.places) // MAX_JUDGED)
        found = [self._errors_of(i) for i in range(step // 2, len(self.places), step)]
        means = np.nanmean(np.array(found), axis=0)
        return np.asarray(np.maximum.accumulate(means), dtype=np.float64)

    def _errors_of(self, judged: int) -> list[float]:
        distance = np.sqrt(((self.places - self.places[judged]) ** 2).sum(axis=1))
        off = []
        for radius in RADII:
            seen = np.flatnonzero(distance >= radius)
            if seen.size == 0:
                off.append(float("nan"))
                continue
            count = min(NEAREST, seen.size)
            nearest = seen[np.argpartition(distance[seen], count - 1)[:count]]
            guess = _weighted(distance[nearest][None], self.residual[nearest][None])[0]
            off.append(abs(float(np.exp(guess - self.residual[judged])) - 1.0))
        return off


def error_at(distance: Array, errors: Array) -> Array:
    """The expected relative error of interpolating so far from the nearest point; a hit has none."""
    between = np.interp(distance, RADII, errors)
    return np.asarray(np.where(distance < RADII[0], 0.0, between), dtype=np.float64)


def _weighted(distance: Array, residual: Array) -> Array:
    weight = 1.0 / (distance + SOFTENING) ** 2
    return np.asarray((weight * residual).sum(axis=1) / weight.sum(axis=1), dtype=np.float64)
