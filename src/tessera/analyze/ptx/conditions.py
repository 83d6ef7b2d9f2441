"""What must be true where an access happens: comparisons on the way to it.

The guard of the instruction and the branches that dominate its block are comparisons of integers. An
access under `i < n` reaches only the bytes of such `i`; `extent` uses that when it resolves.
"""

from typing import NamedTuple

from tessera.analyze.ptx.fixpoint import Flow
from tessera.analyze.ptx.values import Poly


class Condition(NamedTuple):
    """`left <relation> right` holds; relation is lt, le, gt, ge, eq or ne."""

    left: Poly
    relation: str
    right: Poly
    bits: int
    signed: bool


class Conditions:
    """Finds the conditions of accesses."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def want(self, index: int) -> tuple[object, ...]:
        """Asks for the values compared on the way to an instruction."""
        return ()

    def known(self, wanted: tuple[object, ...]) -> tuple[Condition, ...]:
        """The conditions, after the run."""
        return ()
