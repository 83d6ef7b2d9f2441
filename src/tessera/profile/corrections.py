"""Corrections of modelled costs by measured launches.

- terms: cycles and factors of the overheads in `overheads.py`;
- kernels: models of attention kernels with few queries;
- rows: launches measured on one GPU. Equal work takes the measured time; the rest of the class is
  scaled by the median ratio of measured to modelled.

Terms and kernels are in `corrections.json` (scripts/fit_overheads.py, scripts/fit_streams.py); `tessera
calibrate` writes rows to `$XDG_CACHE_HOME/tessera/calibrations`, one file per GPU.

    us = (t0 + sqrt((base - t0)^2 + overhead^2)) * factors + floors

Other GPUs scale cycles by SMs and clock, with a wider error. Tables have FlashAttention 3 since Hopper, so
PyTorch's `flash` has a factor there only. Attention kernels stream keys and values through a block per
sequence and KV head:

    us = floor * t0 + sqrt(M^2 + S^2) + tail * row_us * blocks
    M  = bytes / (bandwidth * em * reach)
    S  = keys of a block * max(chain, wave * ceil(blocks / SMs))

`chain` is cycles per key of a block alone on its SM, `wave` of blocks sharing an SM; `splits` divides keys
over idle SMs. `floor`, `reach` and `tail` are relative to decode attention's.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from tessera.errors import ArtifactError
from tessera.ir import Cost, Source, files
from tessera.ir.files import cache_folder, write_whole
from tessera.profile.counts import OpClass, Work
from tessera.profile.fitted import Params, loads_of, model_of, peaks_of, predict
from tessera.profile.gpus import Gpu, clock_ghz, gpu
from tessera.profile.overheads import TERMS, Overhead, Scope

# An assumption.
OTHER_GPU_ERROR = 0.25
# Serving stacks have faster attention kernels than PyTorch's `flash` here.
NEW_ATTENTION = ("Hopper", "Blackwell")
SUFFIX = "_stream"
SPLIT_KEYS = 128
# Wider heads take longer per key.
FITTED_WIDTH = 128
# Between machines with the same card.
MEASURED_ERROR = 0.03
MIN_RATIOS = 3
# For a class with few ratios.
LEAST_ERROR = 0.08


@dataclass(frozen=True, slots=True)
class Term:
    # Cycles per amount, or a factor.
    coefficient: float
    # Leaving out one model family; an assumption if only one has this term.
    rel_error: float = 0.0
    judged_by: str = ""


@dataclass(frozen=True, slots=True)
class Stream:
    floor: float
    reach: float
    tail: float
    # Cycles.
    chain: float
    wave: float
    splits: bool
    # Leaving out one model family.
    rel_error: float = 0.0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    work: Work
    us: float
    modelled_us: float


@dataclass(frozen=True)
class Corrections:
    gpu: str
    about: Mapping[str, str] = field(default_factory=dict)
    terms: Mapping[str, Term] = field(default_factory=dict)
    kernels: Mapping[str, Stream] = field(default_factory=dict)
    rows: tuple[MeasuredWork, ...] = ()
    format: Literal[1] = 1

    @cached_property
    def coefficients(self) -> dict[str, float]:
        return {name: term.coefficient for name, term in self.terms.items()}

    @cached_property
    def _measured_us(self) -> dict[Work, float]:
        return {row.work: row.us for row in self.rows}

    @cached_property
    def _ratios(self) -> dict[tuple[OpClass, str], list[float]]:
        ratios: dict[tuple[OpClass, str], list[float]] = defaultdict(list)
        for row in self.rows:
            if row.modelled_us > 0:
                ratios[row.work.op, row.work.dtype].append(row.us / row.modelled_us)
        return ratios

    def apply(self, work: Work, cost: Cost, spec: Gpu) -> Cost:
        cost = self._with_kernel(work, cost, spec) or self._with_terms(work, cost, spec)
        return self.apply_rows(work, cost)

    def apply_rows(self, work: Work, cost: Cost) -> Cost:
        if work in self._measured_us:
            detail = f"calibrated on {self.gpu}"
            return Cost(self._measured_us[work], Source.MEASURED, MEASURED_ERROR, detail)
        ratios = self._ratios.get((work.op, work.dtype), [])
        if len(ratios) < MIN_RATIOS or cost.us <= 0:
            return cost
        middle, spread = middle_and_spread(ratios)
        error = min(cost.rel_error, max(LEAST_ERROR, 1.5 * spread))
        text = f"times {middle:.2f}, as {len(ratios)} launches of its class measured on {self.gpu}"
        return _corrected(cost, cost.us * middle, error, text)

    def _with_kernel(self, work: Work, cost: Cost, spec: Gpu) -> Cost | None:
        name = self._kernel_of(work)
        if not name:
            return None
        if name == "flash" and spec.arch not in NEW_ATTENTION:
            return cost
        stream, params = self.kernels[name], model_of(work, spec).params
        fitted = float(predict(params, loads_of([work]), peaks_of(spec, work.dtype))[0])
        is_same_chip = spec.chip == gpu(self.gpu).chip
        us = streamed_us(stream, work, spec, params, is_same_chip) * cost.us / fitted
        error = stream.rel_error
        if spec.name != self.gpu:
            error = math.hypot(cost.rel_error, error, OTHER_GPU_ERROR)
        return _corrected(cost, us, error, f"{name}{SUFFIX} as measured on {self.gpu}")

    def _kernel_of(self, work: Work) -> str:
        if work.op is not OpClass.DECODE or not work.shape or work.dtype not in ("bfloat16", "float16"):
            return ""
        named = (term.removesuffix(SUFFIX) for term, _ in work.overhead if term.endswith(SUFFIX))
        return next((name for name in named if name in self.kernels), "")

    def _with_terms(self, work: Work, cost: Cost, spec: Gpu) -> Cost:
        # Tables of grouped GEMMs include the overhead.
        overhead = tuple(x for x in work.overhead if x[0] != "grouped" or cost.source is not Source.TABLE)
        present = [term for term, _ in overhead if term in self.terms]
        if not present:
            return cost
        us = with_overhead(cost.us, model_of(work, spec).params.t0_us, overhead, spec, self.coefficients)
        elsewhere = OTHER_GPU_ERROR if spec.name != self.gpu else 0.0
        added = math.hypot(max(self.terms[term].rel_error for term in present), elsewhere)
        share = min(1.0, cost.us / us)
        error = math.hypot(cost.rel_error * share, added * (1.0 - share)) if share < 1.0 else cost.rel_error
        scaled = f", at the SMs and clock of {spec.name}" if elsewhere else ""
        return _corrected(cost, us, error, f"{', '.join(present)} as measured on {self.gpu}{scaled}")


def middle_and_spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Median, and median deviation relative to it."""
    middle = median(ratios)
    return middle, median(abs(ratio - middle) for ratio in ratios) / middle


def _corrected(cost: Cost, us: float, rel_error: float, text: str) -> Cost:
    detail = f"{cost.detail}; {text}" if cost.detail else text
    return replace(cost, us=us, rel_error=rel_error, detail=detail)


def with_overhead(
    us: float, t0_us: float, overhead: Overhead, spec: Gpu, coefficients: Mapping[str, float]
) -> float:
    per_us = clock_ghz(spec) * 1e3
    cycles = dict.fromkeys(Scope, 0.0)
    factor = 1.0
    for term, amount in overhead:
        if term not in coefficients:
            continue
        scope = TERMS[term]
        if scope is Scope.FACTOR:
            factor *= _factor(term, spec, coefficients)
        else:
            cycles[scope] += coefficients[term] * amount
    extra = (cycles[Scope.ALL] / spec.num_sms + cycles[Scope.ONE]) / per_us
    least = min(us, t0_us)
    return (least + math.hypot(us - least, extra)) * factor + cycles[Scope.FLOOR] / per_us


def _factor(term: str, spec: Gpu, coefficients: Mapping[str, float]) -> float:
    factor = coefficients[term]
    if term not in ("flash", "efficient", "cudnn") or spec.arch in NEW_ATTENTION:
        return factor
    return factor / coefficients.get("flash", factor) if term == "efficient" else 1.0


def streamed_us(stream: Stream, work: Work, spec: Gpu, params: Params, is_same_chip: bool) -> float:
    batch, _, num_keys, _, kv_heads, width = work.shape[:6]
    per_us, blocks = clock_ghz(spec) * 1e3, batch * kv_heads
    keys = num_keys * width / FITTED_WIDTH
    if stream.splits and blocks < spec.num_sms:
        parts = max(1, min(spec.num_sms // blocks, num_keys // SPLIT_KEYS))
        blocks, keys = blocks * parts, keys / parts
    reach = stream.reach if is_same_chip else min(1.0, stream.reach)
    memory = work.num_bytes / (spec.memory_gbps * min(1.0, params.em * reach) * 1e3)
    waves = math.ceil(blocks / spec.num_sms)
    serial = keys * max(stream.chain, stream.wave * waves) / per_us
    return stream.floor * params.t0_us + math.hypot(memory, serial) + stream.tail * params.row_us * blocks


def chosen(works: Sequence[Work], costs: Sequence[Cost], num: int) -> list[Work]:
    """Works whose measurement removes most error, largest first: a class shares an error, so each further
    launch counts half of the previous one.
    """
    weight: dict[Work, float] = defaultdict(float)
    for work, cost in zip(works, costs, strict=True):
        if cost.us > 0 and cost.source is not Source.MEASURED:
            weight[work] += cost.us * cost.rel_error
    picked: list[Work] = []
    num_picked: Counter[tuple[OpClass, str]] = Counter()

    def gain(work: Work) -> float:
        return weight[work] * 0.5 ** max(0, num_picked[work.op, work.dtype] - MIN_RATIOS)

    while weight and len(picked) < num:
        best = max(weight, key=gain)
        picked.append(best)
        num_picked[best.op, best.dtype] += 1
        del weight[best]
    return picked


@cache
def packaged() -> Corrections:
    return files.packaged("profile", "corrections.json", Corrections)


@cache
def calibration_of(gpu_name: str) -> Corrections | None:
    path = cache_folder("calibrations") / f"{gpu_name}.json"
    return load(path) if path.is_file() else None


def save(corrections: Corrections, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.encode(corrections, enc_hook=str)  # versions may be str subclasses
    write_whole(path, [msgspec.json.format(text, indent=1), b"\n"])
    calibration_of.cache_clear()


def load(path: Path) -> Corrections:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Corrections)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        remedy = "Run `tessera calibrate` again, or delete it."
        raise ArtifactError(f"not a calibration: {error}", remedy, str(path)) from error
