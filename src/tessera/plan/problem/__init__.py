"""Problem: a work unit, its costs and a cluster as arrays, and the placements of it.

`problem` has the words (node, value, column, mix), `arrays` and `memory` how they are made from a unit,
`kinds` which devices are alike, `constraints` what the user wants where.
"""

from tessera.plan.problem.arrays import Bools, Floats, Holdings, Ints, Labels, Values, contract
from tessera.plan.problem.constraints import Constraint, check_constraints, constraints_of, parse_constraint
from tessera.plan.problem.kinds import Kinds, kinds_of
from tessera.plan.problem.problem import (
    MESSAGE_US,
    Column,
    Mix,
    Problem,
    build,
    microbatch_counts,
    microbatch_table,
    restricted,
    rounded,
    spread_us,
)

__all__ = [
    "MESSAGE_US",
    "Bools",
    "Column",
    "Constraint",
    "Floats",
    "Holdings",
    "Ints",
    "Kinds",
    "Labels",
    "Mix",
    "Problem",
    "Values",
    "build",
    "check_constraints",
    "constraints_of",
    "contract",
    "kinds_of",
    "microbatch_counts",
    "microbatch_table",
    "parse_constraint",
    "restricted",
    "rounded",
    "spread_us",
]  # fmt: skip
