"""tessera capture: a model's step -> a trace."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.output import AsJson, console, print_json, progress
from tessera.errors import UnknownName
from tessera.ir import BufferKind, Step, Trace, save


def capture(
    model: Annotated[str, typer.Argument(help="Name of a built-in model, such as tiny-llama.")],
    step: Annotated[str, typer.Option(help="What to run: prefill or decode.")] = "decode",
    batch: Annotated[int, typer.Option(help="Rows of the batch.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens a row: read by a prefill, held for a decode.")] = 128,
    reserve: Annotated[int, typer.Option(help="Of a prefill: tokens a row that decodes may add.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    device: Annotated[str, typer.Option(help="Where to run the step while it is recorded: cpu.")] = "cpu",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The trace to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Record the launches of one step of a model."""
    if device != "cpu":
        raise UnknownName("capture device", device, ["cpu"])
    started = time.perf_counter()
    with progress("importing torch", 3) as advance:
        from tessera import analyze
        from tessera.capture import build, record

        advance(f"building {model}")
        workload = build(Step(model, step, batch, context, seed, reserve))
        advance("recording")
        trace = record(workload)
        advance("analyzing")
        num_edges = len(analyze.build_graph(trace).edges)
    path = output or Path(f"{step}.trace")
    save(trace, path)
    summary = {
        "output": str(path),
        "model": model,
        "step": step,
        "launches": len(trace.launches),
        "views": trace.num_views,
        "buffers": len(trace.buffers),
        "edges": num_edges,
        "state_bytes": _bytes(trace, BufferKind.STATE),
        "weight_bytes": _bytes(trace, BufferKind.WEIGHT),
        "seconds": round(time.perf_counter() - started, 3),
    }
    if as_json:
        print_json(summary)
    else:
        console().print(
            f"{path}: {step} of {model}, {summary['launches']} launches, {summary['views']} views, "
            f"{summary['buffers']} buffers, {summary['edges']} dependencies"
        )


def _bytes(trace: Trace, kind: BufferKind) -> int:
    return sum(trace.buffers[b].size_bytes for b in trace.buffers_of(kind))
