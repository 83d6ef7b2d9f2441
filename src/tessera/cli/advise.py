"""tessera advise: a model and a load -> which GPUs to rent, or what to do with those that are there."""

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tessera.cli.capture import MODEL_HELP, Launches, checked_launches
from tessera.cli.output import JsonOption, console, progress
from tessera.cli.plan import EffortOption
from tessera.cli.plan_text import plan_figures, sure
from tessera.errors import TesseraError
from tessera.ir import save

if TYPE_CHECKING:
    from tessera.advise import Advice, Choice, Load, OwnedAdvice, Way
    from tessera.report import AdviceBar, AdviceTable

# Recordings and batches that the bar is made for.
NUM_RECORDED, NUM_BATCHES = 2, 10
HAVE_HELP = "GPUs that are there, as h20,l40s: what to do with them, and which one to rent next."
PAGE_HELP = "Write the advice as an HTML page here."
REGIMES_HELP = "A folder of `python -m benchmarks.paper`, whose map of regimes goes on the page."


PromptOption = Annotated[
    int | None, typer.Option(help="Tokens of a prompt.", show_default="1024; of an image: 4096")
]
OutputOption = Annotated[
    int | None, typer.Option(help="Tokens to generate.", show_default="256; of an image: 40 steps")
]
ProviderOption = Annotated[
    str, typer.Option(help="Rent from this provider only, as RunPod.", show_default="any one")
]
MicrobatchesOption = Annotated[
    int | None, typer.Option(help="Microbatches in flight, at most.", show_default="chosen")
]
BatchesOption = Annotated[
    str, typer.Option(help="Batches to choose among, as 1,8,64.", show_default="2 to 1024")
]


def advise(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    rate: Annotated[float, typer.Option(help="Requests (of a diffusion model: images) per second to carry.")],
    prompt: PromptOption = None,
    output: OutputOption = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Milliseconds to the first token.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Milliseconds a token after it.")] = None,
    gpus: Annotated[str, typer.Option(help="GPUs to choose among, as a100,l40s.", show_default="all")] = "",
    max_devices: Annotated[int, typer.Option(help="The most GPUs to rent.")] = 4,
    provider: ProviderOption = "",
    link: Annotated[str, typer.Option(help="What would join the GPUs.")] = "pcie4",
    microbatches: MicrobatchesOption = None,
    batches: BatchesOption = "",
    margin: Annotated[float, typer.Option(help="Capacity to keep free, as a share of the rate.")] = 0.1,
    memory_share: Annotated[float, typer.Option(help="Share of the GPUs' memory to fill.")] = 0.9,
    launches: Launches = "",
    effort: EffortOption = "full",
    have: Annotated[str, typer.Option(help=HAVE_HELP)] = "",
    page: Annotated[Path | None, typer.Option(help=PAGE_HELP)] = None,
    regimes: Annotated[Path | None, typer.Option(metavar="DIR", help=REGIMES_HELP)] = None,
    folder: Annotated[Path | None, typer.Option("--save", help="Folder for the plans.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the cheapest GPUs, of one kind or of several, that carry a load. No GPU is needed.

    With --have: what to do with cards that are there (a copy on each, a split, or kernel by kernel), what
    that gains and costs, and which card to rent next.

    Batches, microbatches and placement are chosen as by `tessera plan MODEL`. Answers are shown as they come.
    """
    started = time.perf_counter()
    listed = _batches(batches)
    cells = _regimes(page, regimes)
    with progress("importing torch", None if have else NUM_RECORDED + NUM_BATCHES + 4) as advance:
        from tessera.advise import Market, use
        from tessera.advise import advise as search
        from tessera.plan import search_config

        logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is not about our flow
        load = _load(model, rate, prompt, output, slo_ttft_ms, slo_tpot_ms, margin)
        market = Market(
            _names(gpus), max_devices, provider, link, microbatches, listed, memory_share,
            checked_launches(launches), search_config(effort),
        )  # fmt: skip
        owned = use(load, market, _names(have), advance) if have else None
        found = search(load, market, advance, _say) if owned is None else None
    if found is not None:
        files, shown = _save(found, folder), _document(load, found)
    else:
        assert owned is not None
        files, shown = _save_owned(owned, folder), _owned_document(load, owned)
    if page is not None:
        _write_page(page, load, found, owned, cells)
        files.append(str(page))
    if as_json:
        typer.echo(json.dumps(shown | {"files": files, "seconds": time.perf_counter() - started}, indent=2))
    elif found is not None:
        _show(load, found, files)
    elif owned is not None:
        _show_owned(load, owned, files)


def _load(
    model: str,
    rate_per_s: float,
    prompt: int | None,
    output: int | None,
    ttft_ms: float | None,
    tpot_ms: float | None,
    margin: float,
) -> "Load":
    """What is to be carried, with the usual sizes of a chat or of an image where none were given."""
    from tessera.advise import Load
    from tessera.advise.search import IMAGE, TOKENS
    from tessera.capture import place_of
    from tessera.capture.models import steps_of_model

    is_image = "decode" not in steps_of_model(model)
    usual = IMAGE if is_image else TOKENS
    sizes = (usual[0] if prompt is None else prompt, usual[1] if output is None else output)
    return Load(place_of(model), rate_per_s, *sizes, ttft_ms, tpot_ms, margin, is_image)


def _say(text: str) -> None:
    """An answer as soon as it is known, while the search for a cheaper one goes on."""
    Console(stderr=True).print(f"so far: {text}", markup=False, highlight=False)


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _regimes(page: Path | None, folder: Path | None) -> list[dict[str, Any]]:
    """The cells of the map, read before anything takes long."""
    if folder is None:
        return []
    if page is None:
        raise TesseraError(
            "the map goes on a page", "Name it with --page, or leave the map out.", "--regimes"
        )
    from tessera.report.pages import read_paper

    path = folder / "paper.json"
    found = read_paper(path).get("regimes")
    if not isinstance(found, dict):
        remedy = "Make one: `python -m benchmarks.paper --only regimes -o DIR`."
        raise TesseraError("it has no map of regimes", remedy, str(path))
    cells: list[dict[str, Any]] = found["cells"]
    return cells


def _batches(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        return tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        raise TesseraError(f"'{text}' is no list of batches", "Write them as 1,4,16.", "--batches") from None


def _save(found: "Advice", folder: Path | None) -> list[str]:
    if folder is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("choice.plan", "runner-up.plan")][: len(found.choices)]
    for choice, path in zip(found.choices, paths, strict=True):
        save(choice.plan, path)
    return [str(path) for path in paths]


def _asked(load: "Load") -> dict[str, Any]:
    """What was asked for, as every answer repeats it."""
    return {
        "modelled": True,
        "model": load.model,
        "rate": load.rate_per_s,
        "prompt": load.prompt,
        "output": load.output,
        "unit": load.unit,
        "margin": load.margin,
        "slo": {"ttft_ms": load.ttft_ms, "tpot_ms": load.tpot_ms},
    }


def _document(load: "Load", found: "Advice") -> dict[str, Any]:
    first, second = (*map(_choice, found.choices), None)[:2]
    return {
        **_asked(load),
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
        "plan": msgspec.to_builtins(plan_figures(choice.plan), enc_hook=str),
    }


def _show(load: "Load", found: "Advice", files: list[str]) -> None:
    from tessera.advise.search import in_ms
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


# Cards that are there.

DO = {
    "one card": "Use the best card alone",
    "data-parallel": "Run a copy on each card",
    "split": "Split the model between them",
    "kernel level": "Divide it kernel by kernel",
}


def _save_owned(owned: "OwnedAdvice", folder: Path | None) -> list[str]:
    if folder is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "have.plan"
    save(owned.found.plan, path)
    return [str(path)]


def _owned_document(load: "Load", owned: "OwnedAdvice") -> dict[str, Any]:
    return {
        **_asked(load),
        "have": list(owned.cards),
        "advice": asdict(owned.advised) | {"gain_over_data_parallel": owned.gain},
        "answer": _answer(load, owned),
        "ways": [asdict(way) for way in owned.ways],
        "rel_error": owned.error,
        "by_tpot": [asdict(regime) for regime in owned.regimes],
        "next": [
            asdict(card) | {"usd_per_1k_requests": card.usd_per_1k_requests} for card in owned.next_cards
        ],
        "usd_per_hour": owned.usd_per_hour,
        "price_source": owned.price_source,
        "note": owned.note,
    }


def _answer(load: "Load", owned: "OwnedAdvice") -> list[str]:
    """What to do, what it gains, what it costs and what to rent next: a sentence each."""
    way, wanted = owned.advised, f"{load.rate_per_s:g} with {load.margin:.0%} to spare"
    enough = "enough for" if way.carries else "too little for"
    return [
        f"{DO[way.name]} ({_named(way)}): {way.requests_per_s:.4g} {load.unit}/s, {enough} {wanted}",
        _gained(owned),
        _cost(load, owned),
        _rent_next(load, owned),
    ]


def _named(way: "Way") -> str:
    return f"{way.name} ({way.policy})" if way.name == "split" else way.name


def _gained(owned: "OwnedAdvice") -> str:
    way, best = owned.advised, max(owned.ways, key=lambda w: w.tokens_per_s)
    text = f"The costs have an error of ±{owned.error:.0%}"
    if best is not way:
        more = f"{best.tokens_per_s / way.tokens_per_s:.2f}x"
        return f"{text}: {_named(best)} would give {more} of that, which is within it."
    others = [w for w in owned.ways if w is not way and w.name != "one card"]
    gains = [f"{way.tokens_per_s / w.tokens_per_s:.2f}x {_named(w)}" for w in others]
    if not gains or way.name == "data-parallel":
        return f"{text}; no finer way gives more."
    return f"{text}: {' and '.join(gains)} are beyond it."


def _cost(load: "Load", owned: "OwnedAdvice") -> str:
    if owned.usd_per_hour is None or owned.advised.usd_per_1k_requests is None:
        return f"What they cost is not known: nobody's price of {', '.join(owned.unpriced)} is."
    each = f"{owned.advised.usd_per_1k_requests:.3g} USD for 1,000 {load.unit} at full load"
    if not load.is_image:
        each += f", {1000 * owned.advised.usd_per_1k_requests / load.output:.3g} for a million output tokens"
    return f"Rented, the cards would cost {owned.usd_per_hour:.2f} USD an hour, {each}."


def _rent_next(load: "Load", owned: "OwnedAdvice") -> str:
    if not owned.next_cards:
        return "No card that can be rented keeps the limits by itself."
    card = owned.next_cards[0]
    what = f"{card.gpu} ({card.usd_per_hour:.2f} USD an hour, {card.provider})"
    adds = f"{card.adds_per_s:.4g} {load.unit}/s"
    if owned.advised.carries:
        return f"Rent nothing for this load. To grow, a request is cheapest on one more {what}: {adds}."
    end = "and that is enough" if card.carries else "which is not enough yet"
    return f"Rent one more {what}: it adds {adds} by itself, {end}."


def _show_owned(load: "Load", owned: "OwnedAdvice", files: list[str]) -> None:
    out = console()
    title = f"{load.rate_per_s:g} {load.unit}/s of {load.model}, {load.words}, on {', '.join(owned.cards)}"
    shown = Table("way", f"{load.unit}/s", "", title=f"{title} (simulated)")
    for bar in _bars(load, owned):
        style = "bold" if bar.is_advised else ""
        name = f"{bar.name}: {bar.about}" if bar.about else bar.name
        shown.add_row(name, f"{bar.value:.4g}", bar.facts, style=style)
    out.print(shown)
    for table in _tables(load, owned):
        shown = Table(*table.head, title=table.title)
        for row in table.rows:
            shown.add_row(*row)
        out.print(shown)
    for sentence in _answer(load, owned):
        out.print(sentence, markup=False)
    out.print(f"Prices: {owned.price_source}.", markup=False)
    if owned.note:
        out.print(f"Note: {owned.note}", markup=False)
    for path in files:
        out.print(f"{path}: written", markup=False)


def _bars(load: "Load", owned: "OwnedAdvice") -> list["AdviceBar"]:
    from tessera.report import AdviceBar

    return [
        AdviceBar(
            way.name,
            way.policy if way.name == "split" else "",
            way.requests_per_s,
            f"{load.unit}/s",
            _facts(load, way),
            way is owned.advised,
        )
        for way in owned.ways
    ]


def _facts(load: "Load", way: "Way") -> str:
    if load.is_image:
        parts = [f"{load.output * way.tpot_ms / 1e3:,.3g} s an image"]
    else:
        parts = [f"{way.tokens_per_s:,.0f} tokens/s", f"{way.tpot_ms:.3g} ms a token"]
    if way.usd_per_1k_requests is not None:
        parts.append(f"{way.usd_per_1k_requests:.3g} USD for 1,000 {load.unit}")
    return ", ".join(parts)


def _tables(load: "Load", owned: "OwnedAdvice") -> list["AdviceTable"]:
    from tessera.advise.owned import WAYS
    from tessera.report import AdviceTable

    word = "step" if load.is_image else "token"
    names = [name for name in WAYS if any(name in regime.tokens_per_s for regime in owned.regimes)]
    regimes = []
    for r in owned.regimes:
        rates = [_rate(r.tokens_per_s[name]) if name in r.tokens_per_s else "" for name in names]
        regimes.append([f"{r.tpot_ms:g} ms", *rates, r.best])
    cards = []
    for card in owned.next_cards:
        rent = f"{card.usd_per_hour:.2f} ({card.provider})"
        figures = (f"{card.adds_per_s:.4g}", f"{card.usd_per_1k_requests:.3g}")
        cards.append([card.gpu, rent, *figures, "yes" if card.carries else "no"])
    return [
        AdviceTable(
            f"What is best at which time per {word}",
            f"{word.capitalize()}s per second of each way within a time per {word}, by a quicker simulation; "
            "advised is the coarsest that is within the costs' error of the best.",
            ("at most", *names, "advised"),
            regimes,
        ),
        AdviceTable(
            "One more card",
            "Beside what is there, with requests of its own, at its best batch within the limits (modelled).",
            ("card", "USD an hour", f"adds {load.unit}/s", f"USD for 1,000 {load.unit}", "enough then"),
            cards,
        ),
    ]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _write_page(
    path: Path,
    load: "Load",
    found: "Advice | None",
    owned: "OwnedAdvice | None",
    cells: list[dict[str, Any]],
) -> None:
    from tessera.report import write_advice

    title = f"{load.rate_per_s:g} {load.unit}/s of {load.model}, {load.words}"
    if owned is not None:
        remarks = (sure(owned.found.plan).sentence, f"Prices: {owned.price_source}.", owned.note)
        bars, tables, plan = _bars(load, owned), _tables(load, owned), owned.found.plan
        title, answer = f"{title}, on {', '.join(owned.cards)}", _answer(load, owned)
    else:
        assert found is not None
        remarks = (sure(found.choices[0].plan).sentence, f"Prices: {found.price_source}.", found.note)
        bars, tables, plan = _choice_bars(load, found), [], found.choices[0].plan
        answer = _rent(load, found)
    write_advice(path, title, answer, bars, tables, plan, [text for text in remarks if text], cells)


def _rent(load: "Load", found: "Advice") -> list[str]:
    from tessera.plan import explain

    choice = found.choices[0]
    rent = f"{choice.basket.usd_per_hour:.2f} USD an hour at {choice.basket.provider}"
    carries = f"carries {choice.capacity_per_s:.4g} {load.unit}/s"
    lines = [f"Rent {choice.basket}: {rent}, {carries}", explain(choice.plan).verdict]
    return [*lines, *([f"{found.caveat}."] if found.caveat else [])]


def _choice_bars(load: "Load", found: "Advice") -> list["AdviceBar"]:
    from tessera.report import AdviceBar

    return [
        AdviceBar(
            str(choice.basket),
            choice.plan.policy,
            choice.capacity_per_s,
            f"{load.unit}/s",
            f"{choice.basket.usd_per_hour:.2f} USD an hour, {choice.usd_per_1k_requests:.3g} USD for 1,000",
            choice is found.choices[0],
        )
        for choice in found.choices
    ]
