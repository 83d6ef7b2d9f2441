"""Cost model and its fitted parameters.

`fitted.json` has a row per GPU, class and dtype family (scripts/fit_costs.py), with its error on held-out
rows. A GPU without a row takes the geometric mean of its nearest relatives' with its own data sheet, a class
without rows a related one's, with a wider error.

    us = t0 + (C^p + M^p)^(1/p)
    C  = operations / (peak * ec) + groups * row_us
    M  = bytes / (bandwidth * em) * (1 - hit + hit / l2x)

t0 is the class's shortest time, ec and em are efficiencies of long kernels, p the overlap of compute and
memory. GEMMs take the best of several tilings and k splits. `tile` is the extra cost of small tiles,
`split_us` of each halving of k. `hit` is the share read from L2, `l2x` times faster.

Inside a step, kernels that only move memory read the previous launch's results from L2 as far as they fit,
weights and KV caches from memory. Their shortest time is in clock cycles (`FLOOR_CYCLES`): small launches are
faster on an L40S than on an A100. Not modelled: throttling.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np
import numpy.typing as npt

from tessera.ir import Cost, Source
from tessera.ir.files import packaged
from tessera.profile.counts import OpClass, Work
from tessera.profile.gpus import Gpu, clock_ghz, gpu

LONG_US = 30.0

# Class to borrow from, and the error added: assumptions.
KIN: dict[OpClass, tuple[OpClass, float]] = {
    OpClass.GROUPED: (OpClass.GEMM, 0.20),
    OpClass.COPY: (OpClass.ELEMENTWISE, 0.10),
    OpClass.REDUCTION: (OpClass.ELEMENTWISE, 0.25),
    OpClass.GATHER: (OpClass.ELEMENTWISE, 0.30),
    OpClass.SCATTER: (OpClass.ELEMENTWISE, 0.30),
    OpClass.SAMPLING: (OpClass.SOFTMAX, 0.50),
    OpClass.SCAN: (OpClass.SOFTMAX, 0.50),
    # On one H200 depthwise and patch convolutions took ten times the model.
    OpClass.CONV: (OpClass.GEMM, 0.90),
    OpClass.OTHER: (OpClass.ELEMENTWISE, 0.50),
}
OTHER_DTYPE_ERROR = 0.30
OTHER_VENDOR_ERROR = 0.30
# Parameters that were set, not fitted: t0 below LONG_US, em when bound by memory.
ASSUMED_FLOOR_ERROR = 0.25
ASSUMED_MEMORY_ERROR = 0.15

FAMILIES = {
    "bfloat16": "f16", "float16": "f16", "float32": "f32", "float64": "f64",
    "float8_e4m3fn": "f8", "float8_e5m2": "f8", "float8_e4m3fnuz": "f8", "float8_e5m2fnuz": "f8",
    "int8": "f8",
}  # fmt: skip
ANY = "any"
FAMILY_WORDS = {ANY: "any", "f16": "16 bits", "f32": "fp32", "f64": "fp64", "f8": "8 bits"}
# Up to 0.5 MB on an H200 (launches_h200_202611.json), one-token steps on A100 and L40S
# (benchmarks/published). Row reductions take two passes.
FLOOR_CYCLES, ROW_FLOOR_CYCLES = 2600.0, 4500.0
ROW_CLASSES = (OpClass.NORM, OpClass.REDUCTION, OpClass.SOFTMAX)
# 5.3 TB/s on A100, 10 on H200, 5.2 on L40 (gpu-benches).
L2_BYTES_PER_CYCLE = {"hbm": 36.0, "gddr": 15.0}
Array = npt.NDArray[np.float64]
# Tiles of one SM.
TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64))
SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Params:
    t0_us: float
    ec: float
    em: float
    p: float
    tile: float = 0.0
    split_us: float = 0.0
    row_us: float = 0.0
    l2x: float = 1.0


@dataclass(frozen=True, slots=True)
class Peaks:
    tflops: float
    gbps: float
    num_sms: int


@dataclass(frozen=True, slots=True)
class Loads:
    flops: Array
    num_bytes: Array
    # [batch, m, n, k; launch], 0 if unknown.
    gemm: Array
    # Decode attention: sequences times KV heads, else 0.
    rows: Array
    hit: Array


@dataclass(frozen=True, slots=True)
class Fit:
    gpu: str
    op: OpClass
    # "f16" (bf16 and fp16), "f32" (no TF32), or "any".
    family: str
    params: Params
    # On held-out rows: mean, median, mean of long kernels.
    mean_error: float
    median_error: float
    long_error: float
    num_fitted: int
    num_held_out: int
    # Set for lack of data.
    assumed: tuple[str, ...]
    # Public table and row filter.
    data: str
    # Median difference to other stacks; 0 if unknown.
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Error for a GPU without its own row."""

    gpu: str
    op: OpClass
    family: str
    # "chip", "arch", "memory" or "any".
    kinship: str
    mean_error: float


@dataclass(frozen=True, slots=True)
class Model:
    params: Params
    source: Source
    # Below and above LONG_US.
    short_error: float
    long_error: float
    why: str
    # Added for kernels bound by memory.
    memory_error: float = 0.0
    lenders: tuple[str, ...] = ()

    def wider(self, added: float, why: str) -> "Model":
        return replace(
            self,
            source=Source.CLASS,
            short_error=self.short_error + added,
            long_error=self.long_error + added,
            why=f"{why}; {self.why}",
        )


@dataclass(frozen=True, slots=True)
class FittedRows:
    fits: tuple[Fit, ...]
    left_out: tuple[LeftOut, ...]


@cache
def fitted_rows() -> FittedRows:
    return packaged("profile", "fitted.json", FittedRows)


def family_of(op: OpClass, dtype: str) -> str:
    if op in (OpClass.GEMM, OpClass.GROUPED, OpClass.PREFILL, OpClass.DECODE, OpClass.CONV):
        return FAMILIES.get(dtype, "f32")
    return ANY


def peak_tflops(spec: Gpu, dtype: str) -> float:
    """The next wider dtype's rate if the hardware lacks it."""
    family = FAMILIES.get(dtype, "f32")
    if family == "f64":
        # Half the fp32 rate on data-centre chips, 1/64 on others.
        return spec.fp32_tflops / (2 if spec.memory_kind == "hbm" else 64)
    if family == "f8" and spec.fp8_tflops:
        return spec.fp8_tflops
    if family in ("f8", "f16") and dtype != "bfloat16":
        return spec.fp16_tflops
    return spec.bf16_tflops if dtype == "bfloat16" and spec.bf16_tflops else spec.fp32_tflops


@cache
def model_for(gpu_name: str, op: OpClass, family: str) -> Model:
    model = _nearest(gpu_name, op, family)
    is_timed = any(f.gpu == gpu_name and f.op is op and "t0_us" not in f.assumed for f in fitted_rows().fits)
    if family != ANY or is_timed:
        return model
    cycles = ROW_FLOOR_CYCLES if op in ROW_CLASSES else FLOOR_CYCLES
    return replace(model, params=replace(model.params, t0_us=cycles / clock_ghz(gpu(gpu_name)) / 1e3))


def _nearest(gpu_name: str, op: OpClass, family: str) -> Model:
    rows = [f for f in fitted_rows().fits if f.op is op and f.family == family]
    if rows:
        fit = next((f for f in rows if f.gpu == gpu_name), None)
        if fit is None:
            return _of_relatives(gpu(gpu_name), rows)
        why = f"fitted to {fit.num_fitted} rows of {fit.data}"
        return _model([fit], Source.FITTED, fit.mean_error, fit.long_error, why)
    families = [f.family for f in fitted_rows().fits if f.op is op]
    if families:
        other = "f16" if "f16" in families else families[0]
        return model_for(gpu_name, op, other).wider(OTHER_DTYPE_ERROR, f"{op} was measured in {other} only")
    kin, added = KIN[op]
    borrowed = model_for(gpu_name, kin, family if kin is OpClass.GEMM else ANY)
    return borrowed.wider(added, f"{op} is priced like {kin}")


def _of_relatives(spec: Gpu, rows: list[Fit]) -> Model:
    kinship, nearest = relatives(spec, rows)
    errors = [x for x in fitted_rows().left_out if x.op is rows[0].op]
    same = [x for x in errors if x.kinship == kinship]
    # Lenders for each other, else others as near, else the worst case.
    lenders = [x.mean_error for x in same if x.gpu in {f.gpu for f in nearest}]
    worst = max((x.mean_error for x in errors), default=1.0)
    error = fmean(lenders or [x.mean_error for x in same] or [worst])
    error = max(error, *(f.mean_error for f in nearest))
    if all(gpu(f.gpu).vendor != spec.vendor for f in nearest):
        error += OTHER_VENDOR_ERROR
    alike = "" if kinship == "any" else f", same {kinship},"
    why = f"{spec.name} has no rows: {', '.join(f.gpu for f in nearest)}{alike} on its data sheet"
    return replace(_model(nearest, Source.CLASS, error, error, why), lenders=tuple(f.gpu for f in nearest))


def _model(rows: list[Fit], source: Source, error: float, long_error: float, why: str) -> Model:
    assumed = {name for f in rows for name in f.assumed}
    short = error + (ASSUMED_FLOOR_ERROR if "t0_us" in assumed else 0.0)
    memory = ASSUMED_MEMORY_ERROR if "em" in assumed else 0.0
    # Model error and difference between stacks are independent.
    spread = fmean(f.spread or usual_spread(f.op) for f in rows)
    errors = (math.hypot(short, spread), math.hypot(long_error, spread))
    return Model(average([f.params for f in rows]), source, *errors, why, memory)


@cache
def usual_spread(op: OpClass) -> float:
    spreads = [f.spread for f in fitted_rows().fits if f.op is op and f.spread > 0]
    return fmean(spreads) if spreads else 0.0


def relatives(spec: Gpu, rows: list[Fit]) -> tuple[str, list[Fit]]:
    """Kinship and rows of the nearest relatives. A row with an assumed `ec` lends nothing."""
    donors = [(f, gpu(f.gpu)) for f in rows if f.gpu != spec.name and "ec" not in f.assumed]
    same_arch = [(f, g) for f, g in donors if g.arch == spec.arch and g.memory_kind == spec.memory_kind]
    for kinship, nearest in (
        ("chip", [f for f, g in donors if g.chip == spec.chip]),
        ("arch", [f for f, _ in same_arch]),
        ("memory", [f for f, g in donors if g.memory_kind == spec.memory_kind]),
    ):
        if nearest:
            return kinship, nearest
    return "any", [f for f, _ in donors]


def average(params: list[Params]) -> Params:
    """Geometric means; a value missing in some rows comes from the others."""
    if len(params) == 1:
        return params[0]
    return Params(*(_mean(column) for column in zip(*(astuple(x) for x in params), strict=True)))


def _mean(values: Iterable[float]) -> float:
    present = [v for v in values if v > 0]
    return math.exp(fmean(math.log(v) for v in present)) if present else 0.0


def price_many(works: Sequence[Work], gpu_name: str) -> list[Cost]:
    spec = gpu(gpu_name)
    costs = [Cost(0.0, Source.FITTED, 0.0)] * len(works)
    alike: dict[tuple[OpClass, str], list[int]] = {}
    for i, work in enumerate(works):
        if work.op is not OpClass.ALLOCATION:
            alike.setdefault((work.op, work.dtype), []).append(i)
    for places in alike.values():
        group = [works[i] for i in places]
        model = model_of(group[0], spec)
        for i, cost in zip(places, _priced(group, model, spec), strict=True):
            costs[i] = cost
    return costs


def _priced(works: Sequence[Work], model: Model, spec: Gpu) -> Iterable[Cost]:
    peaks, loads, params = peaks_of(spec, works[0].dtype), loads_of(works), model.params
    if family_of(works[0].op, works[0].dtype) == ANY:
        l2_gbps = L2_BYTES_PER_CYCLE[spec.memory_kind] * clock_ghz(spec) * spec.num_sms
        params = replace(params, l2x=max(1.0, l2_gbps / (spec.memory_gbps * params.em)))
        loads = replace(loads, hit=l2_share(loads.num_bytes, spec))
    for work, us in zip(works, predict(params, loads, peaks).tolist(), strict=True):
        error = model.long_error if us >= LONG_US else model.short_error
        compute = work.flops / (peaks.tflops * model.params.ec * 1e6)
        if work.num_bytes / (peaks.gbps * model.params.em * 1e3) > compute:
            error += model.memory_error
        yield Cost(us, model.source, error)


def l2_share(working_set: Array, spec: Gpu) -> Array:
    return np.asarray(1.0 / (1.0 + (working_set / spec.l2_bytes) ** 4), dtype=np.float64)


def peaks_of(spec: Gpu, dtype: str) -> Peaks:
    return Peaks(peak_tflops(spec, dtype), spec.memory_gbps, spec.num_sms)


def model_of(work: Work, spec: Gpu) -> Model:
    family = family_of(work.op, work.dtype)
    if family == "f16" and work.dtype == "bfloat16" and spec.bf16_tflops is None:
        # Computed as fp32 by unmeasured kernels.
        model = model_for(spec.name, work.op, "f32")
        return model.wider(OTHER_DTYPE_ERROR, f"{spec.name} has no bf16 units")
    return model_for(spec.name, work.op, family)


def loads_of(works: Sequence[Work]) -> Loads:
    flops = np.array([w.flops for w in works], dtype=np.float64)
    num_bytes = np.array([w.num_bytes for w in works], dtype=np.float64)
    gemm = np.array([_gemm_shape(w) for w in works], dtype=np.float64).reshape(-1, 4).T
    rows = [w.shape[0] * w.shape[4] if w.op is OpClass.DECODE and w.shape else 0 for w in works]
    return Loads(flops, num_bytes, gemm, np.array(rows, dtype=np.float64), np.zeros(len(works)))


def _gemm_shape(work: Work) -> tuple[float, ...]:
    if work.op is OpClass.GEMM and work.shape:
        return work.shape
    if work.op is OpClass.GROUPED and work.shape:
        groups, rows, n, k = work.shape
        visited = max(1, min(groups, rows))
        return (visited, -(-rows // visited), n, k)
    return (0, 0, 0, 0)


def predict(params: Params, loads: Loads, peaks: Peaks) -> Array:
    compute = _compute_us(params, loads, peaks) + params.row_us * loads.rows
    cached = 1.0 - loads.hit * (1.0 - 1.0 / params.l2x)
    memory = loads.num_bytes / (peaks.gbps * params.em * 1e3) * cached
    # Powers do not overflow.
    longer = np.maximum(np.maximum(compute, memory), 1e-12)
    joined = (compute / longer) ** params.p + (memory / longer) ** params.p
    return np.asarray(params.t0_us + longer * joined ** (1.0 / params.p), dtype=np.float64)


def _compute_us(params: Params, loads: Loads, peaks: Peaks) -> Array:
    per_us = peaks.tflops * params.ec * 1e6
    plain = np.asarray(loads.flops / per_us, dtype=np.float64)
    shaped = loads.gemm[0] > 0
    if params.tile <= 0.0 or not shaped.any():
        return plain
    batch, m, n, k = loads.gemm[:, shaped]
    rows, columns = np.array(TILES).T[:, :, None, None]
    split = np.array(SPLITS)[:, None]
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
    dearer = 1.0 + params.tile * (128 / rows + 128 / columns - 1.5)
    in_waves = np.ceil(tiles * split / peaks.num_sms) * peaks.num_sms
    us = in_waves * (2.0 * rows * columns) * (k / split) * dearer / per_us
    best = (us + params.split_us * np.log2(split)).min(axis=(0, 1))
    plain[shaped] = np.maximum(best, plain[shaped])
    return plain
