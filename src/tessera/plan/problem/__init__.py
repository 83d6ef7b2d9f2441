"""Problem: a work unit, its costs and a cluster as arrays, and the placements of it.

`problem` has the words (node, value, column, mix), `arrays` and `memory` how they are made from a unit,
`kinds` which devices are alike, `wishes` what the user wants where.
"""

from tessera.plan.problem.arrays import Bools, Floats, Holdings, Ints, Labels, Values, contract
from tessera.plan.problem.kinds import Kinds, kinds_of
from tessera.plan.problem.problem import (
    MESSAGE_US,
    Column,
    Mix,
    Problem,
    build,
    restricted,
    rounded,
    slot_counts,
    slot_table,
    spread_us,
)
from tessera.plan.problem.wishes import Wish, check_wishes, parse_wish, wishes_of

__all__ = [
    "MESSAGE_US", "Bools", "Column", "Floats", "Holdings", "Ints", "Kinds", "Labels", "Mix", "Problem",
    "Values", "Wish", "build", "check_wishes", "contract", "kinds_of", "parse_wish", "restricted", "rounded",
    "slot_counts", "slot_table", "spread_us", "wishes_of",
]  # fmt: skip
