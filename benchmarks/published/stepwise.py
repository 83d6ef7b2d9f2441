"""Figure 6 for models that no service plan runs: Mamba (state by row) and Stable Diffusion (denoising steps).

Compiled steps at the published batch run one after the other: a request of Mamba is a prompt alone and its
share of decodes of 32 sequences, a picture of 1,024 x 1,024 pixels is 28 denoising steps. Policies: a card
alone, one copy on each card, prompts on one card and decodes on the other, and one placement of launches over
both cards with two steps in flight, simulated. Only the published batch is evaluated.
"""

from dataclasses import dataclass
from functools import cache

from benchmarks.published.offline import OfflineCase, Rated
from benchmarks.published.setup import PAIRS, SEQUENCES, cards, cluster

from tessera.analyze import build_graph
from tessera.capture import outlines
from tessera.errors import TesseraError
from tessera.flow import price, record_compiled
from tessera.ir import Cluster, Costs, Objective, Step, WorkUnit
from tessera.plan import QUICK, PlanConfig, solve
from tessera.simulate import SteadyRates

PLACEMENT = "single-placement"
MICROBATCHES = 2
PICTURE_STEPS = 28


@dataclass(frozen=True, slots=True)
class Stepwise:
    # Steps of a request, and runs of each.
    steps: tuple[Step, ...]
    runs: tuple[float, ...]
    # What one request counts as, in the figure's unit per second.
    result: float


_PROMPT, _OUTPUT = 1020, 128
STEPWISE = {
    "mamba_codestral_7b": Stepwise(
        (
            Step("mamba-codestral-7b", "prefill", 1, _PROMPT, 0, _OUTPUT),
            Step("mamba-codestral-7b", "decode", SEQUENCES, _PROMPT + _OUTPUT),
        ),
        (1.0, _OUTPUT / SEQUENCES),
        _OUTPUT,
    ),
    "stable_diffusion_3_5_medium": Stepwise(
        (Step("sd3.5-medium", "denoise", 1, 4096),), (float(PICTURE_STEPS),), 60.0
    ),
}
POLICIES = (
    "left_card_alone",
    "right_card_alone",
    "request_distribution",
    "prefill_decode",
    "kernel_disaggregation",
)


def is_known(model: str) -> bool:
    """True if the steps were compiled before."""
    return all(outlines.find(step) for step in STEPWISE[model].steps)


def cases(is_quick: bool) -> list[OfflineCase]:
    """Placements take longest: quick ones are of one pair."""
    known = [(model, how) for model, how in STEPWISE.items() if is_known(model)]
    return [
        OfflineCase(pair, model, policy, False)
        for pair in PAIRS
        for model, how in known
        for policy in POLICIES
        if not (policy == "prefill_decode" and len(how.steps) < 2)
        if not (is_quick and policy == "kernel_disaggregation" and pair != "a100_l40s")
    ]


@cache
def _unit(step: Step) -> WorkUnit:
    return WorkUnit((build_graph(outlines.find_or_make(step, record_compiled)),), (1,))


def priced(step: Step, devices: Cluster) -> Costs:
    """Costs of every launch of a step."""
    return price(_unit(step), devices)[0]


def rate(case: OfflineCase) -> Rated | None:
    how = STEPWISE[case.model]
    devices = cluster(cards(case.pair, case.policy))
    # [step][device]: seconds.
    alone = [
        [sum(row[d].us for row in priced(step, devices).costs) * 1e-6 for d in range(len(devices.devices))]
        for step in how.steps
    ]
    request_s = [
        sum(n * s[d] for n, s in zip(how.runs, alone, strict=True)) for d in range(len(devices.devices))
    ]
    if case.policy == "kernel_disaggregation":
        try:
            per_s = 1.0 / sum(
                n / _placed(step, case.pair) for n, step in zip(how.runs, how.steps, strict=True)
            )
        except TesseraError:
            return None
    elif case.policy == "prefill_decode":
        busy = [n * s[d] for n, s, d in zip(how.runs, alone, (1, 0), strict=True)]
        per_s = 1.0 / max(busy)
    else:
        per_s = sum(1.0 / s for s in request_s)
    step_ms = 1e3 * alone[-1][0]
    return Rated(
        per_s * how.result, step_ms, f"{SEQUENCES if len(how.steps) > 1 else 1} at a time, step by step"
    )


@cache
def _placed(step: Step, pair: str) -> float:
    """Steps per second of one placement over both cards."""
    devices, unit = cluster(PAIRS[pair]), _unit(step)
    config = PlanConfig(Objective.THROUGHPUT, MICROBATCHES, PLACEMENT, shown_microbatches=(), search=QUICK)
    plan = solve(unit, price(unit, devices), devices, config, SteadyRates(QUICK.long_window))
    return plan.simulated_per_s or plan.throughput_per_s
