"""Small linear programs: the simplex method on one dense table.

    maximise    goal @ x      subject to  rows @ x <= right,  x >= 0      with right >= 0

A master problem has some rows a device and some tens of columns, and is solved thousands of times: handing it
to a solver takes ten times as long as solving it. Programs of many rows go to HiGHS, which is sparse.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from tessera.plan.problem import Floats

# With more rows than this a dense table is slower.
MANY_ROWS = 24
# Figures are near one; smaller ones than this are rounding.
EPSILON = 1e-9
# Pivots by the steepest column; then by the first (Bland's rule), which cannot go round in circles.
GREEDY_PIVOTS, MAX_PIVOTS = 200, 20_000


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best values of the variables, and the price of every row."""

    x: Floats
    duals: Floats


def maximised(goal: Floats, rows: Floats, right: Floats) -> Optimum:
    """The optimum; there must be one."""
    if len(rows) > MANY_ROWS:
        found = linprog(-goal, A_ub=rows, b_ub=right, method="highs")
        return Optimum(np.asarray(found.x), np.maximum(0.0, -found.ineqlin.marginals))
    num_rows, num = rows.shape
    table = np.zeros((num_rows + 1, num + num_rows + 1))
    table[:-1, :num], table[:-1, -1], table[-1, :num] = rows, right, -goal
    table[:-1, num:-1] = np.eye(num_rows)
    basis = np.arange(num, num + num_rows)
    pivots = 0
    while (improving := table[-1, :-1] < -EPSILON).any():
        pivots += 1
        assert pivots < MAX_PIVOTS, "there is an optimum"
        entering = int(table[-1, :-1].argmin() if pivots < GREEDY_PIVOTS else improving.argmax())
        step = table[:-1, entering]
        ratios = np.divide(table[:-1, -1], step, out=np.full(num_rows, np.inf), where=step > EPSILON)
        tied = np.flatnonzero(ratios <= ratios.min() + EPSILON)
        leaving = int(tied[basis[tied].argmin()])
        table[leaving] /= table[leaving, entering]
        factors = table[:, entering].copy()
        factors[leaving] = 0.0
        table -= factors[:, None] * table[leaving]
        basis[leaving] = entering
    x = np.zeros(num + num_rows)
    x[basis] = table[:-1, -1]
    return Optimum(np.maximum(0.0, x[:num]), np.maximum(0.0, table[-1, num:-1]))
