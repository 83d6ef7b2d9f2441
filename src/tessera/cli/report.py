"""tessera report: everything a folder holds on one page."""

from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.output import HIDDEN, Record, progress, written
from tessera.errors import ArtifactError, TesseraError
from tessera.ir import Plan, Timeline, load
from tessera.ir.files import kind_of
from tessera.report import write_report
from tessera.simulate import simulate

SIMULATED_REQUESTS = 64
PAGE = "report.html"


class WrittenPage(Record, frozen=True):
    page: str
    plans: Annotated[tuple[str, ...], HIDDEN]
    bytes: Annotated[int, HIDDEN]


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with plans.")],
    output: Path | None = written("page", "DIR/report.html"),
) -> WrittenPage:
    """Write one self-contained HTML page about what is in a folder.

    A summary of its plans, best first; then each plan with its rate, the comparison and a layer's placement,
    and folded away timeline, utilisation, dependencies and lanes. The timeline is NAME.timeline beside
    NAME.plan, else a simulated run.
    """
    if not folder.is_dir():
        what = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        raise TesseraError(what, "Give the folder that holds the plans.", str(folder))
    plans = sorted(p for p in folder.iterdir() if p.is_file() and kind_of(p) == "plan")
    if not plans:
        remedy = f"Make one: `tessera plan ... -o {folder}/NAME.plan`."
        raise ArtifactError("it holds no plan", remedy, str(folder))
    page = output or folder / PAGE
    with progress("reading", len(plans)) as advance:
        shown = []
        for path in plans:
            advance(f"simulating {path.name}")
            shown.append((path.stem, *_shown(path)))
    write_report(folder, shown, page)
    names = tuple(path.name for path in plans)
    return WrittenPage(page=str(page), plans=names, bytes=page.stat().st_size)


def _shown(path: Path) -> tuple[Plan, Timeline]:
    plan = load(Plan, path)
    beside = path.with_suffix(".timeline")
    is_recorded = kind_of(beside) == "timeline"
    return plan, load(Timeline, beside) if is_recorded else simulate(plan, SIMULATED_REQUESTS)
