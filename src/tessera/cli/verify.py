"""tessera verify: the dependencies of a trace, proved by running it.

The model is built from the trace's step and called as it is. Then the launches are replayed
  - in their own order for other requests: results must equal the model's bit for bit, else the trace holds a
    value of the recorded request;
  - in random orders that the graph allows, on shared memory and with renamed buffers: likewise;
  - in orders that break one class of edges (RAW, WAR or WAW): some must differ, in results or bytes left in
    memory, else the class is not shown to be `necessary`.
"""

from pathlib import Path
from typing import Annotated

import typer

from tessera.analyze import build_graph
from tessera.cli.output import option, progress
from tessera.cli.run import check_runnable
from tessera.cli.verification import Verified, failure_of
from tessera.ir import Trace, load


def verify(
    file: Annotated[Path, typer.Argument(help="A trace, captured on the CPU.")],
    orders: int = option(20, "Orders to try: legal ones, and broken ones of each class.", min=1),
    seed: int = option(0, "Seed of the orders."),
    requests: int = option(3, "Other requests to compare with the model itself.", min=1),
) -> Verified:
    """Try a trace's dependencies by running it in other orders.

    Legal orders agree bit for bit, broken ones do not.
    """
    trace = load(Trace, file)
    check_runnable(trace, str(file))
    with progress("building the model", 2 + 5 * orders + requests) as advance:
        from tessera.cli.trials import Trials
        from tessera.execute.timing import threads

        with threads(1):
            trials = Trials(build_graph(trace), orders, seed, advance)
            fresh, legal, classes = trials.fresh(requests), trials.legal(), trials.classes()
    return Verified(
        headline=f"{fresh.equal} of {requests} other requests, {legal.equal} of {orders} orders on shared "
        f"memory and {legal.renamed_equal} of {orders} with renamed buffers equal the model bit for bit.",
        verified=not failure_of(fresh, legal, classes),
        file=str(file),
        model=trace.step.model,
        step=trace.step.kind,
        launches=len(trace.launches),
        fresh=fresh,
        legal=legal,
        classes=classes,
    )
