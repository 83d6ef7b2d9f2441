"""python -m benchmarks.paper: make the published evaluation again, a plot and JSON for each figure."""

import dataclasses
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.paper import FULL, QUICK, Figure, Library, chosen, evaluate, merged, narrowed, needed
from benchmarks.paper.plots import draw_all
from benchmarks.paper.summary import summary
from benchmarks.paper.tables import tables

from tessera.cli import run_app
from tessera.cli.output import JsonOption, console, progress, say
from tessera.errors import MissingExtra, TesseraError, extra_module
from tessera.ir.files import cache_folder

ONLY_HELP = (
    "One figure: heterogeneity, throughput, cost, online, sensitivity, scaling, links or regimes. Repeatable."
)


ModelsOption = Annotated[
    str, typer.Option(help="Other models, as llama-3-8b,tiny-llama.", show_default="five families")
]
PairsOption = Annotated[
    str, typer.Option(help="Other pairs of GPUs, as a100+l40s,h100+h20.", show_default="by the scale")
]
JobsOption = Annotated[
    int | None, typer.Option(min=1, help="Processes.", show_default="one for each core that may be used")
]
MinutesOption = Annotated[
    float | None,
    typer.Option(help="Begin no case after so long; the next run goes on.", show_default="until all is done"),
]
ArrivalsOption = Annotated[
    list[str] | None,
    typer.Option(help="A log of arrivals, BurstGPT's or Azure's, for the monitor. Repeatable."),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Folder for paper.json, paper.md and plots.")
]


DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be evaluated, and stop.")]
AsPublishedOption = Annotated[
    bool, typer.Option("--as-published", help="Every figure in the publication's own set-up, beside its own.")
]
app = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def paper(
    quick: Annotated[bool, typer.Option("--quick", help="A coarse grid, in minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=ONLY_HELP, show_default="all")] = None,
    models: ModelsOption = "",
    pairs: PairsOption = "",
    jobs: JobsOption = None,
    minutes: MinutesOption = None,
    arrivals: ArrivalsOption = None,
    output: OutputOption = None,
    dry_run: DryRunOption = False,
    as_published: AsPublishedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the published evaluation again on modelled GPUs: all baselines by the same code, no GPU needed.

    With -o, the document is written to FOLDER/paper.json, a page and each plot beside it; a document that
    is there keeps the figures that are not made again. What came out of every case is kept in the cache
    folder, so that a run which was ended goes on there.
    """
    if as_published:
        _as_published(quick, jobs, output, as_json)
        return
    if output is not None and not as_json:
        extra_module("matplotlib", "report")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is not about our flow
    figures = chosen(only or ())
    logs = [str(Path(log).resolve()) for log in arrivals or ()]
    named = [tuple(x.split("+")) for x in _words(pairs)]
    scale = narrowed(QUICK if quick else FULL, _words(models), named, logs)
    if dry_run:
        _print_json({"figures": [figure.name for figure in figures], "scale": dataclasses.asdict(scale)})
        return
    with shared_folder("paper") as folder:
        num = jobs or len(os.sched_getaffinity(0))
        with progress("looking at what is known"):
            steps, tasks = needed(figures, scale, library := Library(folder), num)
        with progress("evaluation", len(steps) + len(tasks)) as advance:
            found = evaluate(figures, scale, library, num, advance, minutes and 60 * minutes)
    files = _write(figures, found, output) if output is not None else []
    _print_json(found | {"files": files}) if as_json else _show_figures(figures, found, files)


def _as_published(quick: bool, jobs: int | None, output: Path | None, as_json: bool) -> None:
    from benchmarks.published import document
    from benchmarks.published.tables import markdown

    with progress("the publication's set-up", len(document.tasks(quick))) as advance:
        found = document.run(quick, jobs or len(os.sched_getaffinity(0)), advance)
    files = [str(path) for path in document.write(found, output)] if output is not None else []
    if as_json:
        _print_json(found | {"files": files})
    else:
        typer.echo(markdown(found))


@contextmanager
def shared_folder(name: str) -> Iterator[Path]:
    """A writable folder of the cache; a temporary one if the cache cannot be written."""
    folder = cache_folder(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        say(f"warning: {folder} cannot be written: {error.strerror}; it is done without")
        with tempfile.TemporaryDirectory() as other:
            yield Path(other)
        return
    yield folder


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _write(figures: Sequence[Figure], found: dict[str, Any], folder: Path) -> list[str]:
    """The document, with what was there before, a page of it, and the plots where there is matplotlib."""
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


def _show_figures(figures: Sequence[Figure], found: dict[str, Any], files: list[str]) -> None:
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


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:], "python -m benchmarks.paper"))
