"""What overheads cost: index arithmetic, rows, floors and factors, added to bytes and operations.

    us = (t0 + sqrt((base - t0)^2 + overhead^2)) * factors + floors

`base` is what a table or the fitted model says, `overhead` the cycles of the launch's terms: some are shared
by all SMs, some run one after the other. The coefficients of `overheads.json` are cycles, fitted by
scripts/fit_overheads.py to launches measured on one GPU, with the error on families of models left out of the
fit. Other GPUs take the same cycles at their own number of SMs and clock, with a wider error.

The tables' attention kernels are those of serving stacks: FlashAttention 3 and newer from Hopper on,
FlashAttention 2 before, which is PyTorch's `flash` kernel everywhere. So PyTorch's `flash` is slower than the
tables on new GPUs and equal to them on old ones; this was measured on Hopper alone. Attention of a few
queries has a model of its own: keys and values stream through blocks, one for each sequence and key head.

    us = floor * t0 + sqrt(M^2 + S^2) + tail * row_us * blocks
    M  = bytes / (bandwidth * em * reach)
    S  = keys of a block * max(chain, wave * ceil(blocks / SMs))

Each kernel has its own numbers: `chain` is how many cycles one block takes for a key when it is alone on its
SM, `wave` how many a key takes when blocks share one. Few blocks leave SMs idle: kernels that split the keys
then give every SM a part (`splits`), the others wait for the longest block. `floor`, `reach` and `tail` are
ratios to the GPU's own fitted t0, em and row_us of decode attention, which are of serving stacks' kernels; on
other chips than the one that was measured no kernel is taken to reach more than those rows do.

`streams.json` is made by scripts/fit_streams.py from launches timed on one GPU.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import msgspec

from tessera.ir import Cost, Source
from tessera.profile.counts import OpClass, Work
from tessera.profile.fitted import Params, loads_of, model_of, peaks_of, predict
from tessera.profile.gpus import Gpu, clock_ghz, gpu
from tessera.profile.overheads import TERMS, Overhead, Scope

# Added on GPUs other than the one that was measured: an assumption.
OTHER_GPU_ERROR = 0.25
# Norm in which memory and index arithmetic are joined; 1 would be one after the other.
OVERLAP = 2.0
# From these on, serving stacks have faster attention kernels than PyTorch's `flash`.
NEW_ATTENTION = ("Hopper", "Blackwell")


@dataclass(frozen=True, slots=True)
class Overheads:
    """The fitted coefficients."""

    # Whose launches they were fitted to.
    gpu: str
    # Cycles for each amount, or factors; a term that is missing costs nothing.
    coefficients: Mapping[str, float]
    # Mean relative error of launches with that term, their family of models left out of the fit; where only
    # one family has such launches, an assumption.
    errors: Mapping[str, float]


# How overheads name the kernels that have numbers: "flash_stream".
SUFFIX = "_stream"
# A split has at least so many keys.
SPLIT_KEYS = 128
# Width of the heads that were timed; a key of wider ones takes longer.
FITTED_WIDTH = 128
# Of the data sheet's bandwidth; nothing streams faster.
MOST = 1.0


@dataclass(frozen=True, slots=True)
class Stream:
    """The numbers of one kernel."""

    floor: float
    reach: float
    tail: float
    # Cycles.
    chain: float
    wave: float
    splits: bool
    # Mean relative error on launches left out of the fit, one at a time.
    rel_error: float = 0.0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """Every kernel's numbers, and whose launches they were fitted to."""

    gpu: str
    kernels: Mapping[str, Stream]


@cache
def fitted_overheads() -> Overheads:
    """Those that come with the package."""
    text = files("tessera.profile").joinpath("overheads.json").read_text(encoding="utf-8")
    document = json.loads(text)
    terms = document["terms"]
    return Overheads(
        document["gpu"],
        {name: row["coefficient"] for name, row in terms.items()},
        {name: row["rel_error"] for name, row in terms.items()},
    )


def with_overhead(us: float, t0_us: float, overhead: Overhead, spec: Gpu, overheads: Overheads) -> float:
    """The time of a launch whose bytes and operations take `us`."""
    per_us = clock_ghz(spec) * 1e3
    cycles = dict.fromkeys(Scope, 0.0)
    factor = 1.0
    for term, amount in overhead:
        if term not in overheads.coefficients:
            continue
        scope = TERMS[term]
        if scope is Scope.FACTOR:
            factor *= _factor(term, spec, overheads)
        else:
            cycles[scope] += overheads.coefficients[term] * amount
    extra = (cycles[Scope.ALL] / spec.num_sms + cycles[Scope.ONE]) / per_us
    least = min(us, t0_us)
    return (least + _joined(us - least, extra)) * factor + cycles[Scope.FLOOR] / per_us


def _joined(first: float, second: float) -> float:
    """The time of two things that overlap, but not wholly."""
    longer, shorter = max(first, second), min(first, second)
    return longer * (1.0 + (shorter / longer) ** OVERLAP) ** (1.0 / OVERLAP) if shorter > 0 else longer


def _factor(term: str, spec: Gpu, overheads: Overheads) -> float:
    found = overheads.coefficients[term]
    if term not in ("flash", "efficient", "cudnn") or spec.arch in NEW_ATTENTION:
        return found
    return found / overheads.coefficients.get("flash", found) if term == "efficient" else 1.0


def add_overheads(
    works: Sequence[Work], costs: Sequence[Cost], gpu_name: str, overheads: Overheads | None = None
) -> list[Cost]:
    """The costs with the overheads of their launches added; those without an overhead are as they were."""
    spec, found = gpu(gpu_name), overheads or fitted_overheads()
    return [_applied(work, cost, spec, found) for work, cost in zip(works, costs, strict=True)]


def _applied(work: Work, cost: Cost, spec: Gpu, overheads: Overheads) -> Cost:
    stream = stream_of(work, fitted_streams())
    if stream is not None:
        if work.overhead[0][0] == "flash_stream" and spec.arch not in NEW_ATTENTION:
            return cost  # the kernel of the GPU's own rows
        return _streamed(work, cost, spec, stream)
    # A table of grouped GEMMs stands for them as it is.
    overhead = tuple(x for x in work.overhead if x[0] != "grouped" or cost.source is not Source.TABLE)
    known = [term for term, _ in overhead if term in overheads.coefficients]
    if not known:
        return cost
    us = with_overhead(cost.us, model_of(work, spec).params.t0_us, overhead, spec, overheads)
    elsewhere = OTHER_GPU_ERROR if spec.name != overheads.gpu else 0.0
    error = math.hypot(max(overheads.errors.get(term, 0.0) for term in known), elsewhere)
    # As far as bytes and operations decide, their error does.
    share = min(1.0, cost.us / us)
    rel_error = math.hypot(cost.rel_error * share, error * (1.0 - share)) if share < 1.0 else cost.rel_error
    scaled = f", at the SMs and clock of {spec.name}" if elsewhere else ""
    said = f"{', '.join(known)} as measured on {overheads.gpu}{scaled}"
    return replace(cost, us=us, rel_error=rel_error, detail=f"{cost.detail}; {said}" if cost.detail else said)


def _streamed(work: Work, cost: Cost, spec: Gpu, stream: Stream) -> Cost:
    """By the kernel's own model; where a table has the GPU's times, by their ratio to the fitted ones."""
    params, here = model_of(work, spec).params, spec.name == fitted_streams().gpu
    fitted = float(predict(params, loads_of([work]), peaks_of(spec, work.dtype))[0])
    is_same_chip = spec.chip == gpu(fitted_streams().gpu).chip
    us = streamed_us(stream, work, spec, params, is_same_chip) * cost.us / fitted
    added = 0.0 if here else OTHER_GPU_ERROR
    rel_error = stream.rel_error if here else math.hypot(cost.rel_error, stream.rel_error, added)
    kernel = next(term for term, _ in work.overhead)
    said = f"{kernel} as measured on {fitted_streams().gpu}"
    return replace(cost, us=us, rel_error=rel_error, detail=f"{cost.detail}; {said}" if cost.detail else said)


@cache
def fitted_streams() -> Streams:
    """Those that come with the package."""
    return msgspec.json.decode(files("tessera.profile").joinpath("streams.json").read_bytes(), type=Streams)


def stream_of(work: Work, streams: Streams) -> Stream | None:
    """The kernel's numbers, if this is attention of a few queries by a kernel that has some."""
    if work.op is not OpClass.DECODE or not work.shape or work.dtype not in ("bfloat16", "float16"):
        return None
    named = (term.removesuffix(SUFFIX) for term, _ in work.overhead if term.endswith(SUFFIX))
    return next((streams.kernels[name] for name in named if name in streams.kernels), None)


def streamed_us(stream: Stream, work: Work, spec: Gpu, params: Params, is_same_chip: bool) -> float:
    """The time of one launch; `params` are the GPU's own of decode attention."""
    batch, _, num_keys, _, kv_heads, width = work.shape[:6]
    per_us, blocks = clock_ghz(spec) * 1e3, batch * kv_heads
    keys = num_keys * width / FITTED_WIDTH
    if stream.splits and blocks < spec.num_sms:
        # Every SM gets a part of some block's keys.
        parts = max(1, min(spec.num_sms // blocks, num_keys // SPLIT_KEYS))
        blocks, keys = blocks * parts, keys / parts
    reach = stream.reach if is_same_chip else min(1.0, stream.reach)
    memory = work.num_bytes / (spec.memory_gbps * min(MOST, params.em * reach) * 1e3)
    waves = math.ceil(blocks / spec.num_sms)
    serial = keys * max(stream.chain, stream.wave * waves) / per_us
    return stream.floor * params.t0_us + math.hypot(memory, serial) + stream.tail * params.row_us * blocks
