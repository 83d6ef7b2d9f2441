"""tessera advise: a model and a load -> which GPUs to rent, or what to do with given ones."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tessera.advise import Advice, Candidate, Market, RentedLoad
from tessera.cli import plan_model
from tessera.cli.capture import MODEL_HELP, Launches
from tessera.cli.output import (
    HIDDEN,
    PER_TOKEN,
    TO_FIRST,
    Record,
    info,
    limit_ms,
    option,
    positive,
    progress,
    say,
    shown,
)
from tessera.cli.plan import PriceOption, prices_of
from tessera.cli.render import text_of
from tessera.ir import MEMORY_SHARE, Plan, ServicePlan, save
from tessera.plan import Comparison, search_config
from tessera.profile import gpu
from tessera.report import write_advice

# Steps of a search to rent: recordings, batches and plans.
NUM_STEPS = 16
# Prompt and output: tokens of a chat; tokens of an image of 1024 x 1024 pixels and denoising steps.
CHAT, IMAGE = (1024, 256), (4096, 40)
DO = {
    "one card": "Use the best card alone",
    "data-parallel": "Run a copy on each card",
    "split": "Split the model between the cards",
    "kernel level": "Divide the model kernel by kernel",
}


class AdviceRecord(Record, frozen=True):
    """Which cards carry the load; every figure is modelled."""

    advice: Annotated[Advice, shown("advice (modelled)")]
    plans: Annotated[tuple[plan_model.ModelPlanFigures, ...], HIDDEN]
    headline: str
    notes: tuple[str, ...]
    files: tuple[str, ...]
    seconds: Annotated[float, HIDDEN] = 0.0


def advise(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    rate: Annotated[
        float, info("Requests (diffusion models: images) per second to carry.", callback=positive)
    ],
    prompt: int | None = option(None, "Tokens per prompt.", shown="1024; images 4096", min=1),
    output: int | None = option(None, "Tokens per answer.", shown="256; images 40 steps", min=1),
    slo_ttft_ms: float | None = limit_ms(TO_FIRST),
    slo_tpot_ms: float | None = limit_ms(PER_TOKEN),
    gpus: str = option("", "GPUs to choose from, such as a100,l40s.", shown="all"),
    max_devices: int = option(4, "Maximum number of GPUs to rent.", min=1),
    provider: str = option("", "The only provider to rent from.", shown="any one"),
    price: PriceOption = None,
    link: str = option("pcie4", "Link between the GPUs: pcie4, pcie5, nvlink, ib100, ib200 or ib400."),
    margin: float = option(0.1, "Capacity to keep free, as a share of the rate.", min=0),
    memory_share: plan_model.MemoryShareOption = MEMORY_SHARE,
    launches: Launches = None,
    effort: plan_model.EffortOption = "full",
    have: str = option("", "GPUs you have, such as h20,l40s: how to use them, and which one to rent next."),
    page: Path | None = option(None, "Write the advice as an HTML page."),
    folder: Path | None = option(None, "Folder for the plans.", "--save"),
) -> AdviceRecord:
    """Find the cheapest GPUs that carry a load.

    No GPU is needed. With --have: how to use given cards (one, a copy on each, a split, or kernel by
    kernel), what that gains and costs, and which card to rent next.
    """
    with progress("importing torch", None if have else NUM_STEPS) as advance:
        from tessera.advise.search import advise as search
        from tessera.capture import place_of
        from tessera.capture.models import steps_of_model

        logging.getLogger("transformers").setLevel(logging.ERROR)
        is_image = "decode" not in steps_of_model(model)
        usual = IMAGE if is_image else CHAT
        sizes = (prompt or usual[0], output or usual[1])
        load = RentedLoad(place_of(model), rate, *sizes, slo_ttft_ms, slo_tpot_ms, margin, is_image)
        market = Market(
            _names(gpus), max_devices, provider, prices_of(price or ()), link, memory_share,
            launches or "", search_config(effort),
        )  # fmt: skip
        advice, planned = search(load, market, _names(have), advance, lambda text: say(f"so far: {text}"))
    return _record(advice, planned, page, folder)


def _record(
    advice: Advice,
    planned: Sequence[tuple[ServicePlan | Plan, Comparison]],
    page: Path | None,
    folder: Path | None,
) -> AdviceRecord:
    plans = tuple(plan for plan, _ in planned)
    files = _save(plans, bool(advice.have), folder) if folder else ()
    models = (plan_model.PlannedModel(plan, comparison, advice.is_compiled) for plan, comparison in planned)
    figures = tuple(map(plan_model.model_figures, models))
    answer = _use(advice) if advice.have else _rent(advice, figures[0])
    remarks = (*advice.notes, f"Costs: {figures[0].costs.sentence}")
    if page is not None:
        parts = plans[0].plans if isinstance(plans[0], ServicePlan) else plans[:1]
        divided = next((part for part in parts if isinstance(part, Plan) and len(part.used) > 1), None)
        write_advice(page, advice, answer, divided, (*remarks, f"Prices: {advice.price_source}."))
        files = (*files, str(page))
    return AdviceRecord(
        advice=advice, plans=figures, headline=answer[0], notes=(*answer[1:], remarks[-1]), files=files
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _save(plans: Sequence[ServicePlan | Plan], is_have: bool, folder: Path) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("have.plan",) if is_have else ("choice.plan", "runner-up.plan")
    paths = [folder / name for name in names[: len(plans)]]
    for plan, path in zip(plans, paths, strict=True):
        save(plan, path)
    return tuple(map(str, paths))


def _rent(advice: Advice, plan: plan_model.ModelPlanFigures) -> list[str]:
    choice, load = advice.advised, advice.load
    rate = f"{text_of(choice.requests_per_s)} {load.unit}/s ±{choice.error:.0%}"
    cards = f"{', '.join(choice.gpus)} ({choice.policy}, {text_of(choice.batch.values())} sequences)"
    place = "your price" if choice.provider == "--price" else choice.provider
    return [
        f"Rent {cards}: {choice.usd_per_hour:.2f} USD an hour ({place}), carries {rate}{_times(choice)}",
        plan.headline,
        *_doubts(advice),
    ]


def _times(way: Candidate) -> str:
    if way.ttft_ms is None or way.tpot_ms is None:
        return ""
    return f"; first token after {text_of(way.ttft_ms, 'ms')}, then {text_of(way.tpot_ms, 'ms')} a token"


def _doubts(advice: Advice) -> Iterator[str]:
    choice, load = advice.advised, advice.load
    least = choice.requests_per_s / (1 + choice.error)
    if least < load.rate_per_s:
        yield (
            f"The error of the costs is larger than the margin: {text_of(least)} {load.unit}/s if every "
            "launch takes that much longer. Raise --margin, or name cards that were measured with --gpus."
        )
    if any(gpu(name).vendor != "NVIDIA" for name in choice.gpus):
        yield "Tessera prices AMD cards but does not run on them; leave them out with --gpus."


def _use(advice: Advice) -> list[str]:
    way, load = advice.advised, advice.load
    enough = "enough" if way.is_enough else "too little"
    rate = f"{text_of(way.requests_per_s)} {load.unit}/s ±{way.error:.0%}, {enough} for "
    rate += f"{load.rate_per_s:g} + {load.margin:.0%}{_times(way)}"
    return [f"{DO[way.way]} ({way.policy}): {rate}", _gain(advice), _cost(advice), _next(advice)]


def _gain(advice: Advice) -> str:
    way, best = advice.advised, max(advice.candidates, key=lambda c: c.requests_per_s)
    error = f"The prices have an error of ±{way.error:.0%}"
    if best is not way:
        gain = best.requests_per_s / way.requests_per_s
        return f"{error}; {best.way} ({best.policy}) would give {gain:.2f}x, within the error."
    gains = [
        f"{way.requests_per_s / other.requests_per_s:.2f}x {other.way}"
        for other in advice.candidates
        if other is not way and other.way != "one card"
    ]
    if not gains or way.way == "data-parallel":
        return f"{error}; no finer way gives more."
    return f"{error}; the gain is beyond it: {' and '.join(gains)}."


def _cost(advice: Advice) -> str:
    way, load = advice.advised, advice.load
    if way.usd_per_hour is None or way.usd_per_1k_requests is None:
        return "The cost is not known: some of the cards have no known price."
    each = f"{text_of(way.usd_per_1k_requests)} USD per 1,000 {load.unit} at full load"
    if not load.is_image:
        each += f", {text_of(1000 * way.usd_per_1k_requests / load.output)} per million output tokens"
    return f"Rented, the cards cost {way.usd_per_hour:.2f} USD an hour, {each}."


def _next(advice: Advice) -> str:
    if not advice.next_cards:
        return "No card that can be rented keeps the limits by itself."
    card, unit = advice.next_cards[0], advice.load.unit
    what = f"{card.gpus[0]} ({card.usd_per_hour:.2f} USD an hour, {card.provider})"
    adds = f"{text_of(card.requests_per_s)} {unit}/s"
    if advice.advised.is_enough:
        return f"Rent nothing for this load. To grow, {what} is the cheapest per request: it adds {adds}."
    return f"Rent {what}: it adds {adds}, {'enough' if card.is_enough else 'not enough yet'}."
