"""rebalanced: the same lanes in other shares, at costs that turned out different.

    maximise  sum_l x_l     such that   sum_l x_l load_l,d <= 1  for every device and bus d,   x >= 0

with x_l runs a second along lane l. Lanes stay as they are, so neither state nor weights move.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from tessera.adapt.capability import LaneLoad
from tessera.adapt.drift import Factors

# Lanes with less than this share of the work are left a trace of it: a plan's lanes all have a rate.
LEAST_SHARE = 1e-3


def loads_s(lanes: Sequence[LaneLoad], factors: Factors) -> np.ndarray:
    """loads[lane, device or bus]: seconds in one run, at corrected costs."""
    names = sorted({n for lane in lanes for n, _ in (*lane.devices, *lane.buses)})
    column = {name: index for index, name in enumerate(names)}
    found = np.zeros((len(lanes), len(names)))
    for row, lane in enumerate(lanes):
        for device, kernels in lane.devices:
            found[row, column[device]] += (
                sum(us * factors.of(kernel, device) for kernel, us in kernels) * 1e-6
            )
        for bus, us in lane.buses:
            found[row, column[bus]] += us * 1e-6
    return found


def rebalanced(lanes: Sequence[LaneLoad], factors: Factors) -> tuple[tuple[float, ...], float]:
    """(rate of every lane, how many times as much work that gives as the old shares) at corrected costs."""
    loads = loads_s(lanes, factors)
    old = np.array([lane.rate_per_s for lane in lanes])
    shares = old / old.sum()
    before = 1.0 / float((shares @ loads).max())
    found = linprog(-np.ones(len(lanes)), A_ub=loads.T, b_ub=np.ones(loads.shape[1]), method="highs")
    if found.x is None:  # cannot be: zero is feasible and every lane loads a device
        return tuple(old.tolist()), 1.0
    rates = np.maximum(found.x, LEAST_SHARE * found.x.sum())
    rates /= max(1.0, float((rates @ loads).max()))
    return tuple(rates.tolist()), float(rates.sum()) / before
