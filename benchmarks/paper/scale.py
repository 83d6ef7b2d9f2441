"""Scale: how much of the evaluation is worked out. `QUICK` is a coarse grid in minutes, `FULL` takes longer.

The loads are of the five families at their published sizes. Their lengths are choices of this evaluation and
not the publication's. The grid of the full run takes every load on some of the pairs, links and numbers of
devices, in an order in which any first part of it is a fair sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.paper.records import Case, Effort, Load, Shape, Wire

from tessera.errors import TesseraError

Pair = tuple[str, ...]

LLAMA = Load("llama-3-8b", 1024, 256)
LOADS = (
    LLAMA,
    Load("gpt-oss-20b", 512, 128),
    Load("mamba-codestral-7b", 512, 128),
    Load("qwen2.5-vl-7b", 512, 128),
    Load("sd3.5-medium", 1024, 0),
)
# The published pair, opposite strengths, and one GPU type beside a much faster one.
FIRST: Pair = ("a100", "l40s")
PAIRS: tuple[Pair, ...] = (FIRST, ("rtx-pro-6000", "h20"), ("h100", "l40s"))
MORE_PAIRS: tuple[Pair, ...] = (
    ("h20", "l40s"), ("h100", "h20"), ("h200", "l40s"), ("h100", "a100"), ("b200", "h100"),
    ("mi300x", "h100"), ("l40s", "a40"),
)  # fmt: skip
# Milliseconds per token, per denoising step, or until a prefill is done.
LIMITS_MS = {"llama-3-8b": 40.0, "gpt-oss-20b": 80.0, "mamba-codestral-7b": 300.0, "qwen2.5-vl-7b": 40.0}
STEP_LIMIT_MS, PREFILL_LIMIT_MS = 1000.0, 2000.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Grids of all figures."""

    name: str
    # Throughput, cost and the map of regimes; links and scaling are of the first load on the first pair.
    cases: tuple[Case, ...]
    # Kernels one by one.
    shapes: tuple[Shape, ...]
    first_pair: Pair
    first_load: Load
    effort: Effort
    # Serving: the shape, loads as shares of the best capacity, requests a load, seeds, logs of arrivals,
    # windows as multiples of the monitor's own, thresholds in standard errors.
    served: Shape
    microbatches: int
    loads: tuple[float, ...]
    bursts: tuple[float, ...]
    seeds: int
    logs: tuple[str, ...]
    num_requests: int
    windows: tuple[float, ...]
    thresholds: tuple[float, ...]
    # Numbers of GPUs.
    sizes: tuple[int, ...]
    # Bandwidths of the link.
    gbps: tuple[float, ...]


# Less effort than `tessera plan` takes, for every policy alike.
COARSELY = Effort((8, 32, 128, 512, 2048), "quick")


def quick_cases(loads: Sequence[Load], pairs: Sequence[Pair]) -> tuple[Case, ...]:
    """The first load on two pairs, each of the others on one in turn; all policies for the very first."""
    made = []
    for number, load in enumerate(loads):
        turned = [pairs[(number + at) % len(pairs)] for at in range(2 if number == 0 else 1)]
        for pair in dict.fromkeys(turned):
            is_first = (load, pair) == (loads[0], pairs[0])
            effort = replace(COARSELY, has_single=True, has_latency=is_first)
            made.append(Case(load, pair, Wire.preset("pcie4"), effort))
    return tuple(made)


def grid(loads: Sequence[Load], pairs: Sequence[Pair]) -> tuple[Case, ...]:
    """Rounds over all loads; in each a load has another pair, link and number of devices."""
    phases = [
        replace(load, phase=phase)
        for load in loads
        for phase in (("request", "decode", "prefill") if len(load.steps) > 1 else ("request",))
    ]
    wires = [Wire.preset(name) for name in ("pcie4", "nvlink", "ib100")]
    made: dict[Case, None] = {}
    for turn, number in product(range(len(SIZES)), range(len(phases))):
        load = phases[number]
        first, second = SIZES[(turn + number) % len(SIZES)]
        pair = pairs[(3 * number + 7 * turn) % len(pairs)]
        gpus = (pair[0],) * first + (pair[1],) * second
        asked = replace(load, limit_ms=_limit(load)) if (turn + number) % 2 else load
        made[Case(asked, gpus, wires[(number + turn) % len(wires)], COARSELY)] = None
    return tuple(made)


# Numbers of the two cards of a pair.
SIZES = ((1, 1), (1, 1), (2, 2), (1, 1), (4, 4), (1, 1), (3, 5), (8, 8))


def _limit(load: Load) -> float:
    if load.steps[-1].kind == "prefill":
        return PREFILL_LIMIT_MS
    return LIMITS_MS.get(load.model, STEP_LIMIT_MS)


# Whole requests of the first; of the others, whose eager steps are long, the decodes or a denoising step.
QUICK_LOADS = (LLAMA, *(replace(load, phase="decode") for load in LOADS[1:]))
QUICK = Scale(
    name="quick",
    cases=quick_cases(QUICK_LOADS, PAIRS),
    shapes=tuple(Shape(load, 16) for load in QUICK_LOADS),
    first_pair=FIRST,
    first_load=replace(LLAMA, phase="decode"),
    effort=COARSELY,
    served=Shape(LLAMA, 48),
    microbatches=4,
    loads=(0.2, 0.5, 0.65, 0.8, 0.95),
    bursts=(0.45,),
    seeds=1,
    logs=(),
    num_requests=1500,
    windows=(0.1, 1.0, 10.0),
    thresholds=(0.0, 1.0, 3.0),
    sizes=(2, 4, 8),
    gbps=(1.0, 25.0, 400.0),
)
FULL = replace(
    QUICK,
    name="full",
    cases=grid(LOADS, (*PAIRS, *MORE_PAIRS)),
    shapes=tuple(Shape(load, 16) for load in LOADS),
    loads=(0.2, 0.4, 0.55, 0.7, 0.8, 0.9),
    bursts=(0.3, 0.5, 0.7),
    seeds=20,
    num_requests=2000,
    windows=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    thresholds=(0.0, 0.5, 1.0, 2.0, 4.0),
    sizes=(2, 4, 6, 8, 12, 16),
    gbps=(0.5, 1.0, 2.5, 5.0, 11.2, 25.0, 50.0, 100.0, 286.0, 1000.0),
)


def narrowed(scale: Scale, models: Sequence[str], pairs: Sequence[Pair], logs: Sequence[str] = ()) -> Scale:
    """The same with other models or pairs; a model that the scale has no lengths for takes usual ones."""
    loads, all_pairs = LOADS if scale.name == "full" else QUICK_LOADS, PAIRS
    if scale.name == "full":
        all_pairs = (*PAIRS, *MORE_PAIRS)
    if models:
        known = {load.model: load for load in loads}
        loads = tuple(known.get(m, Load(m, 64, 16)) for m in models)
        for load in loads:
            _ = load.steps  # an unknown model is refused here
        whole = (replace(load, phase="request") for load in loads)
        answering = [load for load in whole if len(load.steps) > 1]
        scale = replace(
            scale,
            shapes=tuple(Shape(load, 16) for load in loads),
            first_load=loads[0],
            served=Shape(answering[0], 4) if answering else scale.served,
        )
    if pairs:
        for pair in pairs:
            if len(pair) < 2:
                message = f"'{'+'.join(pair)}' is no pair"
                raise TesseraError(message, "Write two GPUs, as a100+l40s.", "--pairs")
        all_pairs = tuple(pairs)
        scale = replace(scale, first_pair=all_pairs[0])
    if models or pairs:
        make = grid if scale.name == "full" else quick_cases
        scale = replace(scale, cases=make(loads, all_pairs))
    return replace(scale, logs=tuple(logs)) if logs else scale
