"""What walks cost: index arithmetic, rows, floors and factors, on top of the time of bytes and operations.

    us = (t0 + sqrt((base - t0)^2 + walk^2)) * factors + floors

`base` is what a table or the fitted model says, `walk` the cycles of the launch's terms: some are shared by
all SMs, some run one after the other. The coefficients of `walks.json` are cycles, fitted by
scripts/fit_walks.py to launches measured on one GPU, with the error on families of models left out of the
fit. Other GPUs take the same cycles at their own number of SMs and clock, with a wider error.

The tables' attention kernels are those of serving stacks: FlashAttention 3 and newer from Hopper on,
FlashAttention 2 before, which is PyTorch's `flash` kernel everywhere. So PyTorch's `flash` is slower than the
tables on new GPUs and equal to them on old ones; this was measured on Hopper alone. Attention of a few
queries has a model of its own (`streams.py`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from tessera.ir import Cost, Source
from tessera.profile.counts import Work
from tessera.profile.fitted import model_of, peaks_of
from tessera.profile.gpus import Gpu, clock_ghz, gpu
from tessera.profile.model import loads_of, predict
from tessera.profile.streams import Stream, fitted_streams, stream_of, streamed_us
from tessera.profile.walks import TERMS, Scope, Walk

# Added on GPUs other than the one that was measured: an assumption.
OTHER_GPU_ERROR = 0.25
# Norm in which memory and index arithmetic are joined; 1 would be one after the other.
OVERLAP = 2.0
# From these on, serving stacks have faster attention kernels than PyTorch's `flash`.
NEW_ATTENTION = ("Hopper", "Blackwell")


@dataclass(frozen=True, slots=True)
class Walks:
    """The fitted coefficients."""

    # Whose launches they were fitted to.
    gpu: str
    # Cycles for each amount, or factors; a term that is missing costs nothing.
    coefficients: Mapping[str, float]
    # Mean relative error of launches with that term, their family of models left out of the fit; where only
    # one family has such launches, an assumption.
    errors: Mapping[str, float]


@cache
def fitted_walks() -> Walks:
    """Those that come with the package."""
    text = files("tessera.profile").joinpath("walks.json").read_text(encoding="utf-8")
    document = json.loads(text)
    terms = document["terms"]
    return Walks(
        document["gpu"],
        {name: row["coefficient"] for name, row in terms.items()},
        {name: row["rel_error"] for name, row in terms.items()},
    )


def walked(us: float, t0_us: float, walk: Walk, spec: Gpu, walks: Walks) -> float:
    """The time of a launch whose bytes and operations take `us`."""
    per_us = clock_ghz(spec) * 1e3
    cycles = dict.fromkeys(Scope, 0.0)
    factor = 1.0
    for term, amount in walk:
        if term not in walks.coefficients:
            continue
        scope = TERMS[term]
        if scope is Scope.FACTOR:
            factor *= _factor(term, spec, walks)
        else:
            cycles[scope] += walks.coefficients[term] * amount
    extra = (cycles[Scope.ALL] / spec.num_sms + cycles[Scope.ONE]) / per_us
    least = min(us, t0_us)
    return (least + _joined(us - least, extra)) * factor + cycles[Scope.FLOOR] / per_us


def _joined(first: float, second: float) -> float:
    """The time of two things that overlap, but not wholly."""
    longer, shorter = max(first, second), min(first, second)
    return longer * (1.0 + (shorter / longer) ** OVERLAP) ** (1.0 / OVERLAP) if shorter > 0 else longer


def _factor(term: str, spec: Gpu, walks: Walks) -> float:
    found = walks.coefficients[term]
    if term not in ("flash", "efficient", "cudnn") or spec.arch in NEW_ATTENTION:
        return found
    return found / walks.coefficients.get("flash", found) if term == "efficient" else 1.0


def apply_walks(
    works: Sequence[Work], costs: Sequence[Cost], gpu_name: str, walks: Walks | None = None
) -> list[Cost]:
    """The costs with the walks of their launches added; those without a walk are as they were."""
    spec, found = gpu(gpu_name), walks or fitted_walks()
    return [_applied(work, cost, spec, found) for work, cost in zip(works, costs, strict=True)]


def _applied(work: Work, cost: Cost, spec: Gpu, walks: Walks) -> Cost:
    stream = stream_of(work, fitted_streams())
    if stream is not None:
        if work.walk[0][0] == "flash_stream" and spec.arch not in NEW_ATTENTION:
            return cost  # the kernel of the GPU's own rows
        return _streamed(work, cost, spec, stream)
    # A table of grouped GEMMs stands for them as it is.
    walk = tuple(x for x in work.walk if x[0] != "grouped" or cost.source is not Source.TABLE)
    known = [term for term, _ in walk if term in walks.coefficients]
    if not known:
        return cost
    us = walked(cost.us, model_of(work, spec).params.t0_us, walk, spec, walks)
    elsewhere = OTHER_GPU_ERROR if spec.name != walks.gpu else 0.0
    error = math.hypot(max(walks.errors.get(term, 0.0) for term in known), elsewhere)
    # As far as bytes and operations decide, their error does.
    share = min(1.0, cost.us / us)
    rel_error = math.hypot(cost.rel_error * share, error * (1.0 - share)) if share < 1.0 else cost.rel_error
    scaled = f", at the SMs and clock of {spec.name}" if elsewhere else ""
    said = f"{', '.join(known)} as measured on {walks.gpu}{scaled}"
    return replace(cost, us=us, rel_error=rel_error, detail=f"{cost.detail}; {said}" if cost.detail else said)


def _streamed(work: Work, cost: Cost, spec: Gpu, stream: Stream) -> Cost:
    """By the kernel's own model; where a table has the GPU's times, by their ratio to the fitted ones."""
    params, here = model_of(work, spec).params, spec.name == fitted_streams().gpu
    fitted = float(predict(params, loads_of([work]), peaks_of(spec, work.dtype))[0])
    is_same_chip = spec.chip == gpu(fitted_streams().gpu).chip
    us = streamed_us(stream, work, spec, params, is_same_chip) * cost.us / fitted
    added = 0.0 if here else OTHER_GPU_ERROR
    rel_error = stream.rel_error if here else math.hypot(cost.rel_error, stream.rel_error, added)
    kernel = next(term for term, _ in work.walk)
    said = f"{kernel} as measured on {fitted_streams().gpu}"
    return replace(cost, us=us, rel_error=rel_error, detail=f"{cost.detail}; {said}" if cost.detail else said)
