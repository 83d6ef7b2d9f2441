"""tessera advise: a model and a load -> which GPUs to rent."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tessera.cli.capture import MODEL_HELP
from tessera.cli.output import AsJson, console, print_json, progress
from tessera.cli.plan_text import document
from tessera.errors import TesseraError
from tessera.ir import save

if TYPE_CHECKING:
    from tessera.advise import Advice, Choice, Load


def advise(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    rate: Annotated[float, typer.Option(help="Requests per second to carry.")],
    prompt: Annotated[
        int, typer.Option(help="Tokens of a prompt (of a diffusion model: of an image).")
    ] = 1024,
    output: Annotated[int, typer.Option(help="Tokens to generate (of a diffusion model: steps).")] = 256,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Milliseconds to the first token.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Milliseconds a token after it.")] = None,
    gpus: Annotated[str, typer.Option(help="GPUs to choose among, as a100,l40s.", show_default="all")] = "",
    max_devices: Annotated[int, typer.Option(help="The most GPUs to rent.")] = 4,
    provider: Annotated[
        str, typer.Option(help="Rent from this provider only, as RunPod.", show_default="any one")
    ] = "",
    link: Annotated[str, typer.Option(help="What would join the GPUs.")] = "pcie4",
    slots: Annotated[int, typer.Option(help="Batches in flight.")] = 4,
    batches: Annotated[str, typer.Option(help="Batches to choose among.")] = "1,8,64",
    margin: Annotated[float, typer.Option(help="Capacity to keep free, as a share of the rate.")] = 0.1,
    memory_share: Annotated[float, typer.Option(help="Share of the GPUs' memory to fill.")] = 0.9,
    folder: Annotated[Path | None, typer.Option("--save", help="Folder for the plans.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest GPUs, of one kind or of several, that carry a load. No GPU is needed."""
    started = time.perf_counter()
    listed = _batches(batches)
    with progress("importing torch", 2 * len(listed) + 4) as advance:
        from tessera.advise import Load, Market
        from tessera.advise import advise as search
        from tessera.capture import place_of

        logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is not about our flow
        load = Load(place_of(model), rate, prompt, output, slo_ttft_ms, slo_tpot_ms, margin)
        names = tuple(word.strip() for word in gpus.split(",") if word.strip())
        market = Market(names, max_devices, provider, link, slots, listed, memory_share)
        found = search(load, market, advance)
    files = _save(found, folder) if folder else []
    if as_json:
        seconds = round(time.perf_counter() - started, 3)
        print_json(_document(load, found) | {"files": files, "seconds": seconds})
    else:
        _show(load, found, files)


def _batches(text: str) -> tuple[int, ...]:
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
        "margin": load.margin,
        "slo": {"ttft_ms": load.ttft_ms, "tpot_ms": load.tpot_ms},
        "choice": first,
        "runner_up": second,
        "skipped": [{"gpu": name, "why": why} for name, why in found.skipped],
        "sets": found.num_baskets,
        "planned": found.num_planned,
        "price_source": found.price_source,
        "caveat": found.caveat,
    }


def _choice(choice: "Choice") -> dict[str, Any]:
    return {
        "gpus": list(choice.basket.gpus),
        "provider": choice.basket.provider,
        "usd_per_hour": choice.basket.usd_per_hour,
        "usd_per_1k_requests": choice.usd_per_1k_requests,
        "batch": choice.batch,
        "slots": choice.plan.slots,
        "capacity": choice.capacity_per_s,
        "ttft_ms": choice.ttft_ms,
        "tpot_ms": choice.tpot_ms,
        "plan": document(choice.plan),
    }


def _show(load: "Load", found: "Advice", files: list[str]) -> None:
    from tessera.advise.records import in_ms
    from tessera.plan import explain

    title = f"{load.rate_per_s:g} requests/s of {load.model}, {load.prompt} + {load.output} tokens (modelled)"
    table = Table("", "GPUs", "USD an hour", "carries", "batch", "first token", "a token", title=title)
    for name, choice in zip(("choice", "runner-up"), found.choices, strict=False):
        times = ("n/a" if ms is None else in_ms(ms) for ms in choice.times_ms)
        rent = f"{choice.basket.usd_per_hour:.2f} ({choice.basket.provider})"
        carries = f"{choice.capacity_per_s:.4g}/s"
        table.add_row(name, str(choice.basket), rent, carries, str(choice.batch), *times)
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
    for path in files:
        out.print(f"{path}: written", markup=False)
