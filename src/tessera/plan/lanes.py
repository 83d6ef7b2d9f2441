"""From shares to a lane table: a short sequence of lane numbers that repeats, for a scheduler to keep to.

With n lanes and a table of L entries, each lane's share becomes a whole number of L-ths by largest
remainder, and the entries are spread as evenly as they can be. The shortest table is taken whose shares
cost at most `GOOD` of the rate by busy time and are within `CLOSE` of the exact ones; failing that, the
one that costs least.
"""

from itertools import islice

import numpy as np

from tessera import ir
from tessera.plan.problem import Floats, Ints, Mix

MAX_TABLE = 64
# Rounding that costs less than this is not worth a longer table.
GOOD = 1e-3
# Shares further off than this are another plan, even if busy time does not mind.
CLOSE = 0.02


def lane_table(mix: Mix) -> tuple[tuple[int, ...], float]:
    """(lanes in the order requests take them, share of the mix's rate that rounding costs)."""
    shares = np.array(mix.shares)
    busy = np.array([c.busy_us for c in mix.columns])
    best = (np.inf, np.inf, np.ones(len(shares), dtype=np.int64))
    for length in range(len(shares), max(MAX_TABLE, len(shares)) + 1):
        counts = rounded(shares, length)
        rate = 1e6 / float((counts / length @ busy).max())
        loss = max(0.0, 1.0 - rate / mix.rate_per_s)
        off = max(CLOSE, float(np.abs(counts / length - shares).max()))
        if (off, loss) < best[:2]:
            best = (off, loss, counts)
        if best[0] <= CLOSE and best[1] <= GOOD:
            break
    _, loss, counts = best
    return tuple(islice(ir.lane_sequence(counts.tolist()), int(counts.sum()))), float(loss)


def rounded(shares: Floats, length: int) -> Ints:
    """Whole numbers that sum to `length`, near the shares, none of them zero."""
    exact = shares * length
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    while counts.sum() < length:
        counts[int((exact - counts).argmax())] += 1
    while counts.sum() > length:
        spare = np.where(counts > 1, counts - exact, -np.inf)
        counts[int(spare.argmax())] -= 1
    return counts
