"""tessera bench paper: the published evaluation made again, a plot and JSON for each figure."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera.cli.output import AsJson, console, print_json, progress, shared_folder
from tessera.errors import MissingExtra, TesseraError

if TYPE_CHECKING:
    from benchmarks.paper import Figure

# The repository, where this is run from a clone.
ROOT = Path(__file__).resolve().parents[3]
ONLY_HELP = (
    "One figure: heterogeneity, throughput, cost, online, sensitivity, scaling, links or regimes. Repeatable."
)


def paper(
    quick: Annotated[bool, typer.Option("--quick", help="A coarse grid, in minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=ONLY_HELP, show_default="all")] = None,
    models: Annotated[
        str, typer.Option(help="Other models, as llama-3-8b,tiny-llama.", show_default="five families")
    ] = "",
    pairs: Annotated[
        str, typer.Option(help="Other pairs of GPUs, as a100+l40s,h100+h20.", show_default="by the scale")
    ] = "",
    jobs: Annotated[
        int | None, typer.Option(help="Processes.", show_default="one for each core that may be used")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Begin no case after so long; the next run goes on.", show_default="until all is done"
        ),
    ] = None,
    arrivals: Annotated[
        list[str] | None,
        typer.Option(help="A log of arrivals, BurstGPT's or Azure's, for the monitor. Repeatable."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for paper.json, paper.md and plots.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the published evaluation again on modelled GPUs: all baselines by the same code, no GPU needed.

    With -o, the document is written to FOLDER/paper.json, a page and each plot beside it; a document that
    is there keeps the figures that are not made again. What came out of every case is kept in the cache
    folder, so that a run which was ended goes on there.
    """
    _find()
    if jobs is not None and jobs < 1:
        raise TesseraError(f"{jobs} processes are none", "Use at least one.", "--jobs")
    if output is not None and not as_json:
        from tessera.report.ratios import check_matplotlib

        check_matplotlib()
    with progress("importing torch", 1):
        from benchmarks.paper import FULL, QUICK, Library, chosen, evaluate, narrowed, needed

    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is not about our flow
    figures = chosen(only or ())
    logs = [str(Path(log).resolve()) for log in arrivals or ()]
    named = [tuple(x.split("+")) for x in _words(pairs)]
    scale = narrowed(QUICK if quick else FULL, _words(models), named, logs)
    with shared_folder("paper") as folder:
        num = jobs or len(os.sched_getaffinity(0))
        with progress("looking at what is known"):
            steps, tasks = needed(figures, scale, library := Library(folder), num)
        with progress("evaluation", len(steps) + len(tasks)) as advance:
            found = evaluate(figures, scale, library, num, advance, minutes and 60 * minutes)
    files = _write(figures, found, output) if output is not None else []
    print_json(found | {"files": files}) if as_json else _show(figures, found, files)


def _find() -> None:
    """Makes the evaluation, which is beside the package in its repository, importable."""
    if not (ROOT / "benchmarks" / "paper" / "__init__.py").is_file():
        raise TesseraError(
            "the evaluation is not in the installed package",
            "Clone the repository, `pip install -e .` there, and run `tessera bench paper` again.",
            "bench paper",
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _write(figures: "Sequence[Figure]", found: dict[str, Any], folder: Path) -> list[str]:
    """The document, with what was there before, a page of it, and the plots where there is matplotlib."""
    from benchmarks.paper.plots import draw_all
    from benchmarks.paper.summary import summary

    path = folder / "paper.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole = _with_old(path, found)
        path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
        (folder / "paper.md").write_text(summary(whole))
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise TesseraError(message, "Choose another place.", str(path)) from error
    try:
        plots = draw_all(figures, found, folder)
    except MissingExtra as error:  # a document is whole without pictures; who asked for JSON is told
        _remark(str(error))
        plots = []
    return [str(path), str(folder / "paper.md"), *map(str, plots)]


def _with_old(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.paper import merged

    if not path.exists():
        return found
    try:
        old = json.loads(path.read_text())
        return merged(old, found)
    except (ValueError, TypeError, AttributeError, KeyError):
        remedy = "Move it away, or choose another folder."
        raise TesseraError("is there and no document of this command", remedy, str(path)) from None


def _remark(text: str) -> None:
    """A remark that must not be in the way of JSON."""
    typer.echo(f"note: {text}", err=True)


def _show(figures: "Sequence[Figure]", found: dict[str, Any], files: list[str]) -> None:
    from benchmarks.paper.tables import tables

    out = console()
    for figure in (figure for figure in figures if figure.name in found):
        out.rule(f"{figure.title}: {figure.label}", align="left")
        out.print(tables(figure.name, found[figure.name]))
        beside = found["published"][figure.name]
        out.print(f"Published ({beside['cited']}): {beside['reports']}", markup=False)
        out.print(f"Why ours differs: {beside['why_ours_differs']}", markup=False)
    if found["num_missing"]:
        out.print(f"{found['num_missing']} cases are missing: run the command again.", markup=False)
    for path in files:
        out.print(f"{path}: written", markup=False)
