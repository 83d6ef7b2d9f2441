"""tessera verify: the dependencies of a trace, proved by running it.

The model is built again from the trace's step and called as it is. Then, in one process and on one thread,
the trace's launches are replayed
  - in their own order for other requests, with inputs and state drawn afresh: they must give what the model
    itself gives for them, bit for bit, or the trace holds a value of the request that was recorded;
  - in random orders that the graph allows, on shared memory and with every version in its own: outputs and
    state must be those of the model, bit for bit;
  - in orders that break the graph on purpose: one class of edges (RAW, WAR or WAW) is taken away and a pair
    that it kept in order is turned round; and one edge of the reduced graph at a time is turned round. These
    must come out different, or the check above could not fail.
`differed` counts orders with other outputs or state, `damaged` also those that only leave other bytes in
memory. A class is `necessary` if some order without it did either; `implied` if the other classes already
keep all its pairs in order, so that none can be turned round; `absent` if no pair has it.
"""

import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.output import HIDDEN, Record, progress, shown
from tessera.cli.run import check_runnable
from tessera.errors import TesseraError
from tessera.ir import Trace, load


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
    # Orders without the class: tried, with other results, and with other bytes in memory.
    orders: int
    differed: int
    damaged: Annotated[int, HIDDEN]
    # Single edges turned round, likewise.
    reversed: int
    reversed_differed: Annotated[int, shown("reversed, differed")]
    reversed_damaged: Annotated[int, HIDDEN]
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
    seconds: Annotated[float, HIDDEN]

    def problem(self) -> TesseraError | None:
        """What does not hold, the gravest first."""
        if self.verified:
            return None
        is_stale = bool(self.legal.program_order_differs or self.fresh.differs)
        stale = "Capture the trace again; the model may have changed since."
        remedy = stale if is_stale else "Please report this trace."
        return TesseraError(self._failure(), remedy, self.file)

    def _failure(self) -> str:
        fresh, legal = self.fresh, self.legal
        if legal.program_order_differs:
            names = ", ".join(legal.program_order_differs)
            return f"in the trace's own order the launches do not give what the model gives: {names} differ"
        if fresh.differs:
            wrong, names = fresh.requests - fresh.equal, ", ".join(fresh.differs)
            return (
                f"{wrong} of {fresh.requests} other requests do not give what the model itself gives: {names}"
            )
        for equal, what in ((legal.equal, "orders"), (legal.renamed_equal, "orders with renamed buffers")):
            if equal < legal.orders:
                return f"{legal.orders - equal} of {legal.orders} {what} differ from the model's own run"
        bad = ", ".join(row.hazard for row in self.classes if row.necessary is Necessity.NOT_SHOWN)
        return f"no order without {bad} edges came out different: these edges are not shown to be needed"


def verify(
    file: Annotated[Path, typer.Argument(help="A trace, captured on the CPU.")],
    orders: Annotated[
        int, typer.Option(min=1, help="Orders to try: legal ones, and broken ones of each class.")
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the orders.")] = 0,
    requests: Annotated[
        int, typer.Option(min=1, help="Other requests to compare with the model itself.")
    ] = 3,
) -> Verified:
    """Try a trace's dependencies by running: legal orders agree bit for bit, broken ones do not."""
    trace = load(Trace, file)
    check_runnable(trace, str(file))
    with progress("building the model", 2 + 8 * orders + requests) as advance:
        return prove(trace, str(file), orders, seed, requests, advance)


def prove(
    trace: Trace, file: str, orders: int, seed: int, requests: int, advance: Callable[[str], None]
) -> Verified:
    import torch

    from tessera.analyze import build_graph
    from tessera.cli.trials import Trials

    started, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers
    try:
        trials = Trials(build_graph(trace), orders, seed, advance)
        fresh, legal, classes = trials.fresh(requests), trials.legal(), trials.classes()
    finally:
        torch.set_num_threads(threads)
    is_equal = legal.equal == legal.renamed_equal == orders and fresh.equal == requests
    is_shown = all(row.necessary is not Necessity.NOT_SHOWN for row in classes)
    return Verified(
        headline=f"{fresh.equal} of {requests} other requests, {legal.equal} of {orders} orders on shared "
        f"memory and {legal.renamed_equal} of {orders} with renamed buffers equal the model bit for bit.",
        verified=not legal.program_order_differs and not fresh.differs and is_equal and is_shown,
        file=file,
        model=trace.step.model,
        step=trace.step.kind,
        launches=len(trace.launches),
        fresh=fresh,
        legal=legal,
        classes=classes,
        seconds=round(time.perf_counter() - started, 3),
    )
