"""Fits the cost model of tessera.profile.fitted to public measurements and writes fitted.json.

    python -m scripts.fit_costs TABLES [--out src/tessera/profile/fitted.json]

TABLES is a folder with extracts of these public data sets, times in microseconds unless said otherwise:

    aic_gemm.parquet                        aiconfigurator-core: system, src, gemm_dtype, m, n, k, us
    aic_attention_context_hd128.parquet     aiconfigurator-core: system, src, attn_dtype, kv_cache_dtype,
    aic_attention_generation_hd128.parquet      batch_size, isl, step, num_heads, num_key_value_heads, us
    neusight_test_fp32.parquet              NeuSight: cls, OPName, Device, B, M, N, K, H, Latency (ms)
    vidur_ops_a40_a100_h100.parquet         Vidur mlp profiles: gpu, model, tp, tokens, op, us_med, shapes
    llmservingsim_rtx4090_rtxpro6000.parquet    LLMServingSim: gpu, model, tp, table, layer, tokens, time_us
    kernelbench_timing.parquet              KernelBench results: src, mode, level, problem, min_ms
    helix_layer_times.csv                   Helix: model, gpu, phase, tokens, ms_per_layer

Licences: aiconfigurator-core and Helix Apache-2.0; NeuSight, Vidur, LLMServingSim and KernelBench MIT. The
tables themselves are not part of this repository. `cost_tables.py` reads them.

Rows are split by group (weight shape, head configuration, model), a fifth of the groups held out; the
parameters come from the rest, the errors from the held-out rows. With fewer than 30 groups each is held out
in turn.
"""

import argparse
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scripts import cost_tables
from scripts.cost_tables import Table

from tessera.profile.counts import OpClass
from tessera.profile.fitted import (
    LONG_US,
    Array,
    Fit,
    LeftOut,
    Loads,
    Params,
    average,
    peaks_of,
    predict,
    relatives,
)
from tessera.profile.gpus import gpu

MAX_ROWS = 4000  # more rows do not change the fit
HELD_OUT = 5  # one group in so many
# Whole layers hide how single kernels scatter around the model; fits to kernels show about this much.
HIDDEN_SCATTER = 0.12
# Boards whose power limits large products below their chip's other boards: best bf16 TFLOP/s of both in
# "ML Engineering" (S. Bekman), maximum achievable matmul FLOPS, A100 PCIe and SXM.
POWER_LIMITED = {"a100-pcie": ("a100", 253 / 271), "a100-pcie-40gb": ("a100", 253 / 271)}


# The parameters as the search sees them: logarithms, so that steps are ratios. Where the rows say nothing,
# the fit stays at PRIOR: t0 = 2.5 us, ec = 0.7, em = 0.8, p = 2, then tile, split_us, row_us and l2x - 1.
PRIOR = np.log([2.5, 1 / 0.7, 1 / 0.8, 1.0, 0.15, 1.0, 0.02, 1.0])
# Nothing computes faster than its peak, nor streams at quite all of it.
LOW = np.array([PRIOR[0] - 3, 0.0, -np.log(0.95), -3.0, -5.0, -3.0, -7.0, -3.0])
HIGH = np.array([PRIOR[0] + 3, PRIOR[1] + 1.5, PRIOR[2] + 2.5, 3.0, 1.0, 2.0, 0.0, 2.5])
STEPS = (np.full(8, 0.5), np.array([-0.5, -0.2, 0.3, -0.7, -0.7, 0.7, 0.7, -0.7]))


def to_params(theta: Array, table: Table) -> Params:
    """The model's own numbers, rounded to what a fit can tell; effects that the class lacks are left out."""
    t0, slow, thin_, p, tile, split, row, l2x = (float(x) for x in np.exp(theta))
    if not table.loads.flops.any():
        # Bound by memory: ec and p say nothing.
        return Params(round(t0, 3), 1.0, round(1 / thin_, 4), 2.0)
    params = Params(round(t0, 3), round(1 / slow, 4), round(1 / thin_, 4), round(1 + p, 3))
    if in_waves(table):
        params = replace(params, tile=round(tile, 4), split_us=round(split, 3))
    if table.op is OpClass.DECODE:
        params = replace(params, row_us=round(row, 5), l2x=round(1 + l2x, 3))
    return params


def in_waves(table: Table) -> bool:
    """True for 16-bit kernels of known shape; PyTorch's fp32 kernels have tiles that are not the model's."""
    return table.op is OpClass.GEMM and table.family == "f16" and bool(table.loads.gemm[0].all())


def _pinned(assumed: dict[str, float]) -> Iterator[tuple[int, float]]:
    """Which of theta are given, and their values."""
    if "t0_us" in assumed:
        yield 0, float(np.log(assumed["t0_us"]))
    if "em" in assumed:
        yield 2, -float(np.log(assumed["em"]))
    if "p" in assumed:
        yield 3, float(np.log(assumed["p"] - 1))


def fit_params(table: Table) -> Params:
    """All parameters. GEMMs from the L2 cache say how fast it is, and nothing else: no step has them."""
    cached = cached_gemms(table)
    params = fit_from_memory(table.keep(~cached))
    if not cached.any():
        return params
    tries = [replace(params, l2x=round(float(x), 3)) for x in np.geomspace(1.0, 8.0, 40)]
    rest = table.keep(cached)
    return min(tries, key=lambda p: float(np.mean(np.abs(np.log1p(relative(p, rest))))))


def cached_gemms(table: Table) -> npt.NDArray[np.bool_]:
    """The rows of GEMMs whose weights came from the L2 cache."""
    return (table.loads.hit > 0.5) & (table.op is OpClass.GEMM)


def fit_from_memory(table: Table) -> Params:
    """Least mean |log ratio|, a whisper of a prior, two starts."""
    low, high = LOW.copy(), HIGH.copy()
    for i, value in _pinned(table.assumed):
        low[i] = high[i] = value
    peaks = peaks_of(gpu(table.gpu), table.dtype)

    def loss(theta: Array) -> float:
        bounded = np.clip(theta, low, high)
        off = np.mean(np.abs(np.log(predict(to_params(bounded, table), table.loads, peaks) / table.us)))
        return float(off + 1e-4 * np.sum((theta - PRIOR) ** 2) + np.sum((theta - bounded) ** 2))

    best, least = PRIOR, np.inf
    for steps in STEPS:
        simplex = np.vstack([PRIOR, PRIOR + np.diag(steps)])
        found = minimize(
            loss,
            PRIOR,
            method="Nelder-Mead",
            options={"maxiter": 1500, "xatol": 1e-3, "fatol": 1e-5, "initial_simplex": simplex},
        )
        if float(found.fun) < least:
            best, least = np.asarray(found.x, dtype=np.float64), float(found.fun)
    return to_params(np.clip(best, low, high), table)


def held_out_mask(table: Table) -> npt.NDArray[np.bool_]:
    """A fifth of the groups, the same ones on every run and every GPU."""
    chosen = {g for g in set(table.group) if zlib.crc32(g.encode()) % HELD_OUT == 0}
    return np.array([g in chosen for g in table.group])


def thin(table: Table) -> Table:
    """At most MAX_ROWS rows, evenly."""
    step = max(1, -(-len(table.us) // MAX_ROWS))
    return table.keep(np.arange(len(table.us)) % step == 0)


def relative(params: Params, table: Table) -> Array:
    """Predicted over measured, less one."""
    us = predict(params, table.loads, peaks_of(gpu(table.gpu), table.dtype))
    return np.asarray(us / table.us - 1, dtype=np.float64)


def errors(params: Params, table: Table) -> Array:
    """Relative errors of the rounded parameters."""
    return np.abs(relative(params, table))


def fit_one(table: Table) -> Fit:
    """Parameters from four fifths of the groups, errors from the last fifth."""
    held = held_out_mask(table)
    if len(set(table.group)) < 30:
        params, off = _leave_one_group_out(table)
        rest, us = table, table.us
    else:
        rest, test = thin(table.keep(~held)), table.keep(held & ~cached_gemms(table))
        params = fit_params(rest)
        off, us = errors(params, test), test.us
    long = off[us >= LONG_US] if (us >= LONG_US).sum() >= 5 else off
    least = HIDDEN_SCATTER if table.data.startswith("Helix") else 0.0
    mean, median, at_length = (
        round(max(least, float(x)), 4) for x in (off.mean(), np.median(off), long.mean())
    )
    return Fit(
        table.gpu,
        table.op,
        table.family,
        params,
        mean_error=mean,
        median_error=median,
        long_error=at_length,
        num_fitted=len(rest.us),
        num_held_out=len(off),
        assumed=tuple(table.assumed),
        data=table.data,
        spread=round(table.spread, 4),
    )


def _leave_one_group_out(table: Table) -> tuple[Params, Array]:
    """With few groups, each is held out in turn and the parameters come from all."""
    groups, off = np.array(table.group), np.zeros(len(table.us))
    for group in dict.fromkeys(table.group):
        out = groups == group
        off[out] = errors(fit_params(table.keep(~out)), table.keep(out))
    return fit_params(table), off


def leave_one_gpu_out(tables: list[Table], fits: list[Fit]) -> Iterator[LeftOut]:
    """The class model of every GPU that has relatives, judged by that GPU's own rows."""
    for table, fit in zip(tables, fits, strict=True):
        alike = [f for f in fits if (f.op, f.family) == (fit.op, fit.family) and f.gpu != fit.gpu]
        if alike:
            kinship, nearest = relatives(gpu(fit.gpu), alike)
            off = errors(average([f.params for f in nearest]), thin(table.keep(~cached_gemms(table))))
            yield LeftOut(fit.gpu, fit.op, fit.family, kinship, round(float(off.mean()), 4))


def first_of_each(tables: Iterable[Table]) -> list[Table]:
    """One table a GPU, class and family: the first named wins, but the A100's two fp32 tables are joined.

    Its own has 13 rows; the PCIe card has the same chip and the same fp32 peak.
    """
    kept: dict[tuple[str, OpClass, str], Table] = {}
    for table in tables:
        kept.setdefault((table.gpu, table.op, table.family), table)
    own, pcie = kept["a100", OpClass.GEMM, "f32"], kept["a100-pcie", OpClass.GEMM, "f32"]
    kept["a100", OpClass.GEMM, "f32"] = replace(
        own,
        data=f"{own.data}; {pcie.data}",
        loads=joined(own.loads, pcie.loads),
        us=np.concatenate([own.us, pcie.us]),
        group=own.group + pcie.group,
        assumed=pcie.assumed,
    )
    return list(kept.values())


def joined(first: Loads, second: Loads) -> Loads:
    """The rows of both."""
    columns = (np.concatenate([getattr(x, f.name) for x in (first, second)], axis=-1) for f in fields(Loads))
    return Loads(*columns)


def with_own_floor(table: Table, fits: list[Fit]) -> Table:
    """Where a GEMM's floor must be assumed, that of 16-bit GEMMs on the same chip is the best guess."""
    seen = [f for f in fits if f.op is table.op and f.family == "f16" and "t0_us" not in f.assumed]
    same_chip = [f.params.t0_us for f in seen if gpu(f.gpu).chip == gpu(table.gpu).chip]
    if table.op is not OpClass.GEMM or "t0_us" not in table.assumed or not same_chip:
        return table
    own = next((f.params.t0_us for f in seen if f.gpu == table.gpu), same_chip[0])
    return replace(table, assumed=table.assumed | {"t0_us": own})


def power_limited(fits: list[Fit]) -> Iterator[Fit]:
    """Fits of 16-bit GEMMs for boards that cannot sustain their chip's rate."""
    for board, (chip, share) in POWER_LIMITED.items():
        f = next(f for f in fits if (f.gpu, f.op, f.family) == (chip, OpClass.GEMM, "f16"))
        params = replace(f.params, ec=round(f.params.ec * share, 4))
        data = f"{f.data}, on {chip}; sustained rate times {share:.3f} (ML Engineering, S. Bekman)"
        yield replace(f, gpu=board, params=params, assumed=("ec",), data=data)


def write(path: Path, fits: list[Fit], left: list[LeftOut]) -> None:
    """One row a line, so that a change reads well."""
    parts = [",\n".join("  " + json.dumps(asdict(row)) for row in rows) for rows in (fits, left)]
    path.write_text(
        f'{{\n "fits": [\n{parts[0]}\n ],\n "left_out": [\n{parts[1]}\n ]\n}}\n', encoding="utf-8"
    )


def main() -> None:
    """Reads the tables, fits, writes."""
    parser = argparse.ArgumentParser(description="Fit the cost model to public measurements.")
    parser.add_argument("tables", type=Path)
    parser.add_argument("--out", type=Path, default=Path("src/tessera/profile/fitted.json"))
    args = parser.parse_args()
    tables = first_of_each(cost_tables.read_all(args.tables))
    fits: list[Fit] = []
    for table in tables:
        f = fit_one(with_own_floor(table, fits))
        fits.append(f)
        print(
            f"{f.gpu:15s} {f.op:12s} {f.family:4s} held out: mean {f.mean_error:.1%}"
            f" median {f.median_error:.1%} long {f.long_error:.1%} (n={f.num_held_out})  {f.params}"
        )
    left = list(leave_one_gpu_out(tables, fits))
    for x in left:
        print(f"left out {x.gpu:15s} {x.op:12s} {x.family:4s} same {x.kinship:6s} mean {x.mean_error:.1%}")
    write(args.out, [*fits, *power_limited(fits)], left)


if __name__ == "__main__":
    main()
