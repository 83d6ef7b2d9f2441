"""The record of `tessera verify`: which orders of a trace's launches agree with the model."""

from enum import StrEnum
from typing import Annotated

from tessera.cli.output import HIDDEN, Record, shown
from tessera.errors import TesseraError


class Necessity(StrEnum):
    """Whether orders without a class of edges come out different."""

    SHOWN = "yes"
    NOT_SHOWN = "not shown"
    # The other classes keep all pairs of this one in order.
    IMPLIED = "implied"
    # No pair of launches has a hazard of this class.
    ABSENT = "absent"


class FreshRequests(Record, frozen=True):
    """Requests with inputs drawn afresh, compared with the model itself."""

    requests: int
    equal: int
    differs: tuple[str, ...]
    inputs: str


class LegalOrders(Record, frozen=True):
    """Random orders that the graph allows, on shared memory and with renamed buffers."""

    orders: int
    equal: int
    renamed_equal: int
    program_order_differs: tuple[str, ...]


class ClassTrial(Record, frozen=True):
    """Orders that break one class of edges."""

    hazard: Annotated[str, shown("edges")]
    edges: Annotated[int, shown("graph")]
    hazards: int
    implied: int
    # Orders without the class: tried, and with other results or other bytes in memory.
    orders: int
    differed: int
    necessary: Necessity


class Verified(Record, frozen=True):
    """Whether the dependencies of a trace hold, and how many orders showed it."""

    headline: str
    verified: bool
    file: Annotated[str, HIDDEN]
    model: str
    step: str
    launches: int
    fresh: FreshRequests
    legal: LegalOrders
    classes: tuple[ClassTrial, ...]
    seconds: Annotated[float, HIDDEN] = 0.0

    def problem(self) -> TesseraError | None:
        if self.verified:
            return None
        is_stale = bool(self.legal.program_order_differs or self.fresh.differs)
        stale = "Capture the trace again; the model may have changed since."
        remedy = stale if is_stale else "Please report this trace."
        return TesseraError(failure_of(self.fresh, self.legal, self.classes), remedy, self.file)


def failure_of(fresh: FreshRequests, legal: LegalOrders, classes: tuple[ClassTrial, ...]) -> str:
    """Empty: all holds."""
    if legal.program_order_differs:
        names = ", ".join(legal.program_order_differs)
        return f"in the trace's own order the launches do not give what the model gives: {names} differ"
    if wrong := fresh.requests - fresh.equal:
        names = ", ".join(fresh.differs)
        return f"{wrong} of {fresh.requests} other requests do not give what the model itself gives: {names}"
    for equal, what in ((legal.equal, "orders"), (legal.renamed_equal, "orders with renamed buffers")):
        if equal < legal.orders:
            return f"{legal.orders - equal} of {legal.orders} {what} differ from the model's own run"
    if bad := ", ".join(row.hazard for row in classes if row.necessary is Necessity.NOT_SHOWN):
        return f"no order without {bad} edges came out different: these edges are not shown to be needed"
    return ""
