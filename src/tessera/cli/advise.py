"""tessera advise: a model and a load -> which GPUs to rent."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tessera.cli.capture import MODEL_HELP
from tessera.cli.launches import Launches, checked_launches
from tessera.cli.output import AsJson, console, print_json, progress
from tessera.cli.plan_text import document
from tessera.errors import TesseraError
from tessera.ir import save

if TYPE_CHECKING:
    from tessera.advise import Advice, Choice, Load

# Recordings and batches that the bar is made for.
NUM_RECORDED, NUM_BATCHES = 2, 10


def advise(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    rate: Annotated[float, typer.Option(help="Requests (of a diffusion model: images) per second to carry.")],
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of a prompt.", show_default="1024; of an image: 4096")
    ] = None,
    output: Annotated[
        int | None, typer.Option(help="Tokens to generate.", show_default="256; of an image: 40 steps")
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Milliseconds to the first token.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Milliseconds a token after it.")] = None,
    gpus: Annotated[str, typer.Option(help="GPUs to choose among, as a100,l40s.", show_default="all")] = "",
    max_devices: Annotated[int, typer.Option(help="The most GPUs to rent.")] = 4,
    provider: Annotated[
        str, typer.Option(help="Rent from this provider only, as RunPod.", show_default="any one")
    ] = "",
    link: Annotated[str, typer.Option(help="What would join the GPUs.")] = "pcie4",
    slots: Annotated[
        int | None, typer.Option(help="Microbatches in flight, at most.", show_default="chosen")
    ] = None,
    batches: Annotated[
        str, typer.Option(help="Batches to choose among, as 1,8,64.", show_default="2 to 1024")
    ] = "",
    margin: Annotated[float, typer.Option(help="Capacity to keep free, as a share of the rate.")] = 0.1,
    memory_share: Annotated[float, typer.Option(help="Share of the GPUs' memory to fill.")] = 0.9,
    launches: Launches = "",
    folder: Annotated[Path | None, typer.Option("--save", help="Folder for the plans.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest GPUs, of one kind or of several, that carry a load. No GPU is needed.

    Batches, microbatches and placement are chosen as by `tessera plan MODEL`. Answers are shown as they come.
    """
    started = time.perf_counter()
    listed = _batches(batches)
    with progress("importing torch", NUM_RECORDED + NUM_BATCHES + 4) as advance:
        from tessera.advise import Load, Market
        from tessera.advise import advise as search
        from tessera.advise.records import IMAGE, TOKENS
        from tessera.capture import place_of
        from tessera.capture.models import steps_of_model

        logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is not about our flow
        is_image = "decode" not in steps_of_model(model)
        usual = IMAGE if is_image else TOKENS
        sizes = (usual[0] if prompt is None else prompt, usual[1] if output is None else output)
        load = Load(place_of(model), rate, *sizes, slo_ttft_ms, slo_tpot_ms, margin, is_image)
        names = tuple(word.strip() for word in gpus.split(",") if word.strip())
        market = Market(
            names, max_devices, provider, link, slots, listed, memory_share, checked_launches(launches)
        )
        found = search(load, market, advance, _say)
    files = _save(found, folder) if folder else []
    if as_json:
        seconds = round(time.perf_counter() - started, 3)
        print_json(_document(load, found) | {"files": files, "seconds": seconds})
    else:
        _show(load, found, files)


def _say(text: str) -> None:
    """An answer as soon as it is known, while the search for a cheaper one goes on."""
    Console(stderr=True).print(f"so far: {text}", markup=False, highlight=False)


def _batches(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        return tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        raise TesseraError(f"'{text}' is no list of batches", "Write them as 1,4,16.", "--batches") from None


def _save(found: "Advice", folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("choice.plan", "runner-up.plan")][: len(found.choices)]
    for choice, path in zip(found.choices, paths, strict=True):
        save(choice.plan, path)
    return [str(path) for path in paths]


def _document(load: "Load", found: "Advice") -> dict[str, Any]:
    first, second = (*map(_choice, found.choices), None)[:2]
    return {
        "modelled": True,
        "model": load.model,
        "rate": load.rate_per_s,
        "prompt": load.prompt,
        "output": load.output,
        "unit": load.unit,
        "margin": load.margin,
        "slo": {"ttft_ms": load.ttft_ms, "tpot_ms": load.tpot_ms},
        "choice": first,
        "runner_up": second,
        "skipped": [{"gpu": name, "why": why} for name, why in found.skipped],
        "sets": found.num_baskets,
        "planned": found.num_planned,
        "price_source": found.price_source,
        "caveat": found.caveat,
        "note": found.note,
        "launches": "compiled" if found.is_compiled else "eager",
    }


def _choice(choice: "Choice") -> dict[str, Any]:
    return {
        "gpus": list(choice.basket.gpus),
        "provider": choice.basket.provider,
        "usd_per_hour": choice.basket.usd_per_hour,
        "usd_per_1k_requests": choice.usd_per_1k_requests,
        "batch": choice.plan.batch,
        "batches": choice.batch,
        "microbatches": choice.microbatches,
        "capacity": choice.capacity_per_s,
        "ttft_ms": choice.ttft_ms,
        "tpot_ms": choice.tpot_ms,
        "plan": document(choice.plan),
    }


def _show(load: "Load", found: "Advice", files: list[str]) -> None:
    from tessera.advise.records import in_ms
    from tessera.plan import explain

    title = f"{load.rate_per_s:g} {load.unit}/s of {load.model}, {load.words} (modelled)"
    table = Table("", "GPUs", "USD an hour", "carries", "batch", "first token", "a token", title=title)
    for name, choice in zip(("choice", "runner-up"), found.choices, strict=False):
        times = ("n/a" if ms is None else in_ms(ms) for ms in choice.times_ms)
        rent = f"{choice.basket.usd_per_hour:.2f} ({choice.basket.provider})"
        carries = f"{choice.capacity_per_s:.4g}/s"
        rows = ", ".join(str(n) for n in dict.fromkeys(choice.batch.values()))
        table.add_row(name, str(choice.basket), rent, carries, rows, *times)
    out = console()
    out.print(table)
    for name, choice in zip(("choice", "runner-up"), found.choices, strict=False):
        out.print(f"{name}: {explain(choice.plan).verdict}", markup=False)
    out.print(f"Prices: {found.price_source}.", markup=False)
    if found.skipped:
        listed = "; ".join(f"{gpu} ({why})" for gpu, why in found.skipped)
        out.print(f"Not considered: {listed}.", markup=False)
    if found.caveat:
        out.print(f"Note: {found.caveat}.", markup=False)
    if found.note:
        out.print(f"Note: {found.note}", markup=False)
    for path in files:
        out.print(f"{path}: written", markup=False)
