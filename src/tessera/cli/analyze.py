"""tessera analyze: a trace -> its dependency graph; PTX -> what each kernel reads and writes."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tessera.analyze import build_graph
from tessera.cli.output import HIDDEN, Illustrated, Record, option, progress, shown
from tessera.errors import ArtifactError, TesseraError, check_known
from tessera.ir import BufferKind, Graph, Trace, load, save
from tessera.ir.files import cache_folder, read_file


class ImmovableLaunch(Record, frozen=True):
    launch: int
    kernel: str
    why: str


class GraphSummary(Record, frozen=True):
    """A dependency graph in figures."""

    model: str
    step: str
    launches: int
    views: int
    edges: int
    hazards: dict[str, int]
    buffers: dict[str, int]
    bytes: Annotated[dict[str, int], HIDDEN]
    # Launches that share state run on one device.
    state_groups: Annotated[int, shown("groups that share a device")]
    changed_state_bytes: Annotated[int, shown("state changed by this step")]
    state: Annotated[tuple[str, ...], HIDDEN]
    undeclared_aliases: dict[str, int]
    immovable: tuple[ImmovableLaunch, ...]
    notes: tuple[str, ...]


class PtxReport(Record, frozen=True):
    """What each kernel of a PTX file reads and writes."""

    kernels: Annotated[tuple[dict[str, Any], ...], HIDDEN]


def analyze(
    file: Annotated[Path, typer.Argument(help="A trace, or a file of PTX (NAME.ptx).")],
    output: Path | None = option(None, "Write a trace's graph here.", "-o", "--output"),
    explain: str | None = option(None, "PTX kernel whose accesses are shown by line."),
) -> GraphSummary | PtxReport | Illustrated[PtxReport]:
    """Find what depends on what in a trace, or in PTX kernels.

    Between the launches of a trace: RAW, WAR and WAW. In PTX: what each kernel reads and writes.
    """
    if file.suffix == ".ptx":
        if output is not None:
            remedy = "Leave it out; --json prints the accesses."
            raise TesseraError("PTX has no graph of launches to write", remedy, "--output")
        return _analyze_ptx(file, explain)
    if explain is not None:
        remedy = "Give a file of PTX; `tessera plan --explain` says what a launch costs where."
        raise TesseraError("only the code of a PTX kernel is explained line by line", remedy, "--explain")

    with progress(f"reading {file.name}") as advance:
        trace = load(Trace, file)
        advance("finding dependencies")
        graph = build_graph(trace)
    if output is not None:
        save(graph, output)
    return summary(graph)


def _analyze_ptx(file: Path, kernel: str | None) -> Illustrated[PtxReport]:
    import tessera_ptx
    from tessera_ptx.report import HEADINGS

    text = read_file(file)
    try:
        with progress(f"analyzing {file.name}"):
            reports = tessera_ptx.reports_for(text, str(file), cache_folder("ptx"))
    except tessera_ptx.ParseError as error:
        raise ArtifactError(str(error)) from error  # it shows the line, and a caret below the place
    if kernel is None:
        table = Table(*HEADINGS, title=str(file))
        for row in (row for report in reports for row in tessera_ptx.rows(report)):
            table.add_row(*(escape(cell) for cell in row))
        lines = tuple(str(report) for report in reports)
        pictures: tuple[Any, ...] = (table, *map(escape, lines))
    else:
        by_name = {report.name: report for report in reports}
        check_known("kernel", kernel, by_name)
        reports = (by_name[kernel],)
        pictures = tuple(map(escape, tessera_ptx.explain(reports[0], text.decode(errors="replace"))))
    return Illustrated(PtxReport(kernels=tuple(report.as_dict() for report in reports)), pictures)


def summary(graph: Graph) -> GraphSummary:
    trace = graph.trace
    hazards = Counter(edge.hazard.value for edge in graph.edges)
    written = {value.buffer for value in graph.values if value.producer is not None}
    changed = [buffer for buffer in trace.buffers_of(BufferKind.STATE) if buffer in written]
    immovable = tuple(
        ImmovableLaunch(launch=i, kernel=trace.kernel_of(i).name, why=launch.immovable)
        for i, launch in enumerate(trace.launches)
        if launch.immovable
    )
    by_kind = {kind.value: trace.buffers_of(kind) for kind in BufferKind}
    return GraphSummary(
        model=trace.step.model,
        step=trace.step.kind,
        launches=len(trace.launches),
        views=trace.num_views,
        edges=len(graph.edges),
        hazards={kind: hazards[kind] for kind in ("raw", "war", "waw")},
        buffers={kind: len(buffers) for kind, buffers in by_kind.items()},
        bytes={kind.value: trace.bytes_of(kind) for kind in BufferKind},
        state_groups=len(graph.groups),
        state=tuple(trace.buffers[b].name for b in by_kind[BufferKind.STATE.value]),
        undeclared_aliases=dict(trace.aliases),
        changed_state_bytes=sum(trace.buffers[b].size_bytes for b in changed),
        immovable=immovable,
        notes=() if immovable else ("Every launch may run on any device.",),
    )
