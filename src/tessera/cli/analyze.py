"""tessera analyze: a trace -> its dependency graph; PTX -> what each kernel reads and writes."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tessera.cli.output import AsJson, cache_folder, console, print_json, progress
from tessera.errors import ArtifactError, TesseraError, UnknownName
from tessera.ir import BufferKind, Graph, Trace, kind_of, load, save


def analyze(
    file: Annotated[Path, typer.Argument(help="A trace, or a file of PTX.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a trace's graph here.")] = None,
    explain: Annotated[str | None, typer.Option(help="Of PTX: one kernel's accesses, line by line.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find what depends on what: between the launches of a trace, or in the code of PTX kernels."""
    if _is_ptx(file):
        if output is not None:
            remedy = "Leave it out, and use --json for what is found."
            raise TesseraError("PTX has no graph of launches to write", remedy, "--output")
        _analyze_ptx(file, explain, as_json)
        return
    if explain is not None:
        remedy = "Give a file of PTX; `tessera plan --explain` says what a launch costs where."
        raise TesseraError("only the code of a PTX kernel is explained line by line", remedy, "--explain")
    from tessera.analyze import build_graph
    from tessera.report import graph_table

    with progress(f"reading {file.name}") as advance:
        trace = load(Trace, file)
        advance("finding dependencies")
        graph = build_graph(trace)
    if output is not None:
        save(graph, output)
    if as_json:
        print_json(summary(graph))
    else:
        console().print(graph_table(graph))


def _is_ptx(file: Path) -> bool:
    """By its name, or by the directive that every PTX module starts with."""
    if file.suffix == ".ptx":
        return True
    try:
        with file.open("rb") as opened:
            return kind_of(file) is None and b".version" in opened.read(1 << 16)
    except OSError:
        return False  # loading it as a trace says what is wrong


def _analyze_ptx(file: Path, kernel: str | None, as_json: bool) -> None:
    import tessera_ptx
    from tessera_ptx.report import HEADINGS

    try:
        text = file.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot read: {error.strerror}", place=str(file)) from error
    try:
        with progress(f"analyzing {file.name}"):
            reports = tessera_ptx.reports_for(text, str(file), cache_folder() / "ptx")
    except tessera_ptx.ParseError as error:
        raise ArtifactError(str(error)) from error  # it shows the line, and a caret below the place
    out = console()
    if kernel is not None:
        known = {report.name: report for report in reports}
        if kernel not in known:
            raise UnknownName("kernel", kernel, known)
        reports = (known[kernel],)
    if as_json:
        typer.echo(tessera_ptx.to_json(reports))
    elif kernel is not None:
        for line in tessera_ptx.explain(reports[0], text.decode(errors="replace")):
            out.print(line, markup=False, soft_wrap=True)
    else:
        table = Table(*HEADINGS, title=str(file))
        for report in reports:
            for row in tessera_ptx.rows(report):
                table.add_row(*(escape(cell) for cell in row))
        out.print(table)
        for report in reports:
            out.print(str(report), markup=False, soft_wrap=True)


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
        "state": [trace.buffers[b].name for b in trace.buffers_of(BufferKind.STATE)],
        "undeclared_aliases": dict(trace.aliases),
        "immovable": [
            {"launch": i, "kernel": trace.kernel_of(i).name, "why": launch.immovable}
            for i, launch in enumerate(trace.launches)
            if launch.immovable
        ],
    }
