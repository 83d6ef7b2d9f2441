"""tessera analyze: a trace -> its dependency graph."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.output import AsJson, console, print_json
from tessera.ir import BufferKind, Graph, Trace, load, save


def analyze(
    file: Annotated[Path, typer.Argument(help="A trace.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the graph here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find what depends on what: RAW, WAR and WAW between launches, and what state ties together."""
    from tessera.analyze import build_graph
    from tessera.report import graph_table

    graph = build_graph(load(Trace, file))
    if output is not None:
        save(graph, output)
    if as_json:
        print_json(summary(graph))
    else:
        console().print(graph_table(graph))


def summary(graph: Graph) -> dict[str, Any]:
    """The graph in figures."""
    trace = graph.trace
    hazards = Counter(edge.hazard.value for edge in graph.edges)
    return {
        "model": trace.step.model,
        "step": trace.step.kind,
        "launches": len(trace.launches),
        "views": trace.num_views,
        "edges": len(graph.edges),
        "hazards": {kind: hazards[kind] for kind in ("raw", "war", "waw")},
        "buffers": {kind.value: len(trace.buffers_of(kind)) for kind in BufferKind},
        "bytes": {
            kind.value: sum(trace.buffers[b].size_bytes for b in trace.buffers_of(kind))
            for kind in BufferKind
        },
        "state_groups": len(graph.groups),
        "immovable": [
            {"launch": i, "kernel": trace.kernel_of(i).name, "why": launch.immovable}
            for i, launch in enumerate(trace.launches)
            if launch.immovable
        ],
    }
