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
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.output import AsJson, console, print_json, progress
from tessera.cli.run import check_runnable
from tessera.errors import TesseraError
from tessera.ir import Trace, load


def verify(
    file: Annotated[Path, typer.Argument(help="A trace, captured on the CPU.")],
    orders: Annotated[
        int, typer.Option(help="Orders to try: legal ones, and broken ones of each class.")
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the orders.")] = 0,
    requests: Annotated[int, typer.Option(help="Other requests to compare with the model itself.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Try a trace's dependencies by running: legal orders agree bit for bit, broken ones do not."""
    if orders < 1:
        raise TesseraError(f"{orders} orders prove nothing", "Use at least one.", "--orders")
    if requests < 1:
        raise TesseraError(f"{requests} requests prove nothing", "Use at least one.", "--requests")
    trace = load(Trace, file)
    check_runnable(trace, str(file))
    started = time.perf_counter()
    with progress("building the model", 2 + 8 * orders + requests) as advance:
        found = prove(trace, orders, seed, requests, advance)
    found["seconds"] = round(time.perf_counter() - started, 3)
    print_json(found) if as_json else _show(found)
    if not found["verified"]:
        stale = (
            "Capture the trace again; the model may have changed since."
            if found["program_order_differs"] or found["fresh"]["differs"]
            else ""
        )
        raise TesseraError(_failure(found), stale or "Please report this trace.", str(file))


def prove(
    trace: Trace, orders: int, seed: int, requests: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Runs everything; the result is the JSON document less its time."""
    import torch

    from tessera.analyze import build_graph
    from tessera.cli.trials import Trials

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers
    try:
        trials = Trials(build_graph(trace), orders, seed, advance)
        fresh = trials.fresh(requests)
        legal = trials.legal()
        classes = trials.classes()
    finally:
        torch.set_num_threads(threads)
    equal = legal["equal"] == legal["renamed"]["equal"] == orders
    shown = all(row["necessary"] in (True, "implied", "absent") for row in classes.values())
    return {
        "verified": not legal["program_order_differs"] and not fresh["differs"] and equal and shown,
        "model": trace.step.model,
        "step": trace.step.kind,
        "launches": len(trace.launches),
        "fresh": fresh,
        **legal,
        "classes": classes,
    }


def _failure(found: dict[str, Any]) -> str:
    """What did not hold, the gravest first."""
    orders, renamed = found["orders"], found["renamed"]["equal"]
    if found["program_order_differs"]:
        names = ", ".join(found["program_order_differs"])
        return f"in the trace's own order the launches do not give what the model gives: {names} differ"
    if found["fresh"]["differs"]:
        num, names = found["fresh"]["requests"], ", ".join(found["fresh"]["differs"])
        wrong = num - found["fresh"]["equal"]
        return f"{wrong} of {num} other requests do not give what the model itself gives: {names}"
    if found["equal"] < orders:
        return f"{orders - found['equal']} of {orders} orders differ from the model's own run"
    if renamed < orders:
        return f"{orders - renamed} of {orders} orders with renamed buffers differ from the model's own run"
    bad = ", ".join(name.upper() for name, row in found["classes"].items() if row["necessary"] is False)
    return f"no order without {bad} edges came out different: these edges are not shown to be needed"


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        title=f"{found['model']}: {found['step']}, {found['launches']:,} launches", title_justify="left"
    )
    table.add_column("edges")
    for head in ("graph", "hazards", "implied", "without the class", "one edge turned round"):
        table.add_column(head, justify="right")
    table.add_column("necessary")
    for name, row in found["classes"].items():
        broken = f"{row['differed']} of {row['orders']} differ" if row["orders"] else ""
        single = f"{row['reversed_differed']} of {row['reversed']} differ" if row["reversed"] else ""
        counts = (f"{row[key]:,}" for key in ("edges", "hazards", "implied"))
        word = {True: "yes", False: "NOT SHOWN"}.get(row["necessary"], str(row["necessary"]))
        table.add_row(name.upper(), *counts, broken, single, word)
    out = console()
    out.print(table)
    fresh = found["fresh"]
    out.print(
        f"{fresh['equal']} of {fresh['requests']} other requests equal the model itself bit for bit; "
        f"inputs: {fresh['inputs']}"
    )
    renamed = found["renamed"]
    out.print(
        f"{found['equal']} of {found['orders']} orders on shared memory and {renamed['equal']} of "
        f"{renamed['orders']} with renamed buffers equal the model's own run bit for bit"
    )
