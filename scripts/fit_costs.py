"""Fits the cost model of tessera.profile.fitted to public measurements and writes fitted.json.

    python scripts/fit_costs.py TABLES [--out src/tessera/profile/fitted.json]

TABLES is a folder with extracts of these public data sets, times in microseconds unless said otherwise:

    aic_gemm.parquet                        aiconfigurator-core: system, src, gemm_dtype, m, n, k, us
    aic_attention_context_hd128.parquet     aiconfigurator-core: system, src, attn_dtype, kv_cache_dtype,
    aic_attention_generation_hd128.parquet      batch_size, isl, step, num_heads, num_key_value_heads, us
    neusight_test_fp32.parquet              NeuSight test set: cls, OPName, Device, B, M, N, K, H, Latency (ms)
    vidur_ops_a40_a100_h100.parquet         Vidur mlp profiles: gpu, model, tp, tokens, op, us_med, shapes
    llmservingsim_rtx4090_rtxpro6000.parquet   LLMServingSim: gpu, model, tp, table, layer, tokens, time_us
    kernelbench_timing.parquet              KernelBench results: src, mode, level, problem, min_ms
    helix_layer_times.csv                   Helix: model, gpu, phase, tokens, ms_per_layer

Their licences: aiconfigurator-core and Helix Apache-2.0; NeuSight, Vidur, LLMServingSim, KernelBench MIT. The
tables themselves are not part of this repository.

Rows are split by group (weight shape, head configuration, model), a fifth of the groups held out; the
parameters come from the rest, the errors from the held-out rows. Isolated kernels that fit in the L2 cache run
from it, which they would not in a model: rows whose streamed bytes fit are dropped unless they are so small
that the constant term decides. Tables known to be wrong are not read (see `AIC_ATTENTION`, `AIC_GEMM`).
"""

import argparse
import csv
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from scipy.optimize import minimize

from tessera.profile.counts import OpClass
from tessera.profile.fitted import Fit, LeftOut, Params, average, peak_tflops, relatives
from tessera.profile.gpus import gpu

Array = npt.NDArray[np.float64]

MAX_ROWS = 3000  # more rows do not change the fit
HELD_OUT = 5  # one group in so many
SMALL_BYTES = 1 << 20  # below this the constant term decides, wherever the bytes come from
LONG_US = 30.0

AIC = {"a100_sxm": "a100", "l40s": "l40s", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200",
       "rtx_pro_6000_server": "rtx-pro-6000"}  # fmt: skip
# sglang 0.5.10 covers all six with one grid; on the RTX PRO 6000 it differs from 0.5.14 by half, so take that.
AIC_GEMM = {name: "sglang 0.5.10" for name in AIC.values()} | {"rtx-pro-6000": "sglang 0.5.14"}
# One version of vLLM for the four it covers. sglang's attention tables of this age are wrong or Triton's.
AIC_ATTENTION = {name: "vllm 0.14.0" for name in AIC.values()} | {"b200": "vllm 0.24.0", "rtx-pro-6000": "vllm 0.24.0"}
NEUSIGHT = {"NVIDIA A100 80GB PCIe": "a100-pcie", "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb", "NVIDIA L4": "l4",
            "NVIDIA H100 80GB HBM3": "h100", "Tesla T4": "t4", "Tesla V100-PCIE-32GB": "v100"}  # fmt: skip
KERNELBENCH = {"A100-80GB_modal": "a100", "L40S_modal": "l40s", "L40S_matx3": "l40s", "L40S_babel": "l40s",
               "A10G_modal": "a10g", "B200_together": "b200"}  # fmt: skip
# (batch, m, n, k) of level 1 as those results were taken; the sizes have since grown.
KERNELBENCH_GEMM = {1: (1, 2048, 2048, 2048), 2: (1, 1024, 2048, 4096), 3: (128, 128, 512, 256),
                    6: (1, 256, 256, 131072), 7: (1, 16384, 16384, 32), 8: (1, 8205, 5921, 2949),
                    9: (1, 16384, 16384, 16), 10: (1, 16384, 768, 2048), 11: (1, 2097152, 768, 256),
                    13: (1, 4096, 4096, 4096), 16: (1, 1024, 2048, 4096), 17: (1, 1024, 2048, 4096),
                    18: (1, 1024, 2048, 4096)}  # fmt: skip
HELIX = {"a100": "a100-40gb", "l4": "l4", "t4": "t4", "v100": "v100"}
# Hidden, feed-forward and key-value width of one layer.
HELIX_LAYER = {"llama1_30b": (6656, 17920, 6656), "llama2_70b": (8192, 28672, 1024)}
LLAMA_8B = {"qkv_proj": (6144, 4096), "o_proj": (4096, 4096), "gate_up_proj": (28672, 4096), "down_proj": (4096, 14336)}


@dataclass(frozen=True, slots=True)
class Table:
    """Measurements of one GPU and class."""

    gpu: str
    op: OpClass
    family: str
    dtype: str
    data: str
    flops: Array
    num_bytes: Array
    us: Array
    # Rows of one group are fitted together or held out together.
    group: list[str]

    def keep(self, mask: npt.NDArray[np.bool_]) -> "Table":
        """The rows where the mask is set."""
        group = [g for g, kept in zip(self.group, mask, strict=True) if kept]
        arrays = (self.flops[mask], self.num_bytes[mask], self.us[mask])
        return Table(self.gpu, self.op, self.family, self.dtype, self.data, *arrays, group)


def read(folder: Path, name: str, columns: list[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The columns of one table as arrays."""
    table = pq.read_table(folder / name, columns=columns)
    return {c: table[c].to_numpy(zero_copy_only=False) for c in table.column_names}


def labels(*columns: npt.NDArray[Any]) -> list[str]:
    """One group name a row."""
    return ["/".join(str(x) for x in row) for row in zip(*columns, strict=True)]


def gemm_work(b: Any, m: Any, n: Any, k: Any, item_bytes: int) -> tuple[Array, Array]:
    """Operations and bytes of batched matrix products."""
    b, m, n, k = (np.asarray(x, dtype=np.float64) for x in (b, m, n, k))
    return 2 * b * m * n * k, b * (m * k + k * n + m * n) * item_bytes


def aic_gemm(folder: Path) -> Iterator[Table]:
    """bf16 GEMMs; the collector rotates six copies of the weights, so six of them must exceed the cache."""
    d = read(folder, "aic_gemm.parquet")
    for system, name in AIC.items():
        rows = (d["system"] == system) & (d["src"] == AIC_GEMM[name]) & (d["gemm_dtype"] == "bfloat16")
        m, n, k, us = (d[c][rows].astype(np.float64) for c in ("m", "n", "k", "us"))
        flops, num_bytes = gemm_work(1, m, n, k, 2)
        cold = (12 * n * k > gpu(name).l2_bytes) | (num_bytes < SMALL_BYTES)
        data = f"aiconfigurator-core, bf16 GEMM, {AIC_GEMM[name]}"
        yield Table(name, OpClass.GEMM, "f16", "bfloat16", data, flops, num_bytes, us, labels(n, k)).keep(cold)


def aic_attention(folder: Path) -> Iterator[Table]:
    """bf16 attention, head width 128; the prompt's is causal, decode reads the whole KV cache."""
    for op, file in ((OpClass.PREFILL, "context"), (OpClass.DECODE, "generation")):
        d = read(folder, f"aic_attention_{file}_hd128.parquet")
        sixteen = (d["attn_dtype"] == "bfloat16") & (d["kv_cache_dtype"] == "bfloat16")
        for system, name in AIC.items():
            rows = sixteen & (d["system"] == system) & (d["src"] == AIC_ATTENTION[name])
            fields = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "us")
            b, isl, step, heads, kv_heads, us = (d[c][rows].astype(np.float64) for c in fields)
            keys = isl + step
            pairs = isl * keys - isl * (isl - 1) / 2
            kv_bytes = 2 * b * keys * kv_heads * 128 * 2
            num_bytes = kv_bytes + 2 * b * isl * heads * 128 * 2
            data = f"aiconfigurator-core, bf16 {file} attention, {AIC_ATTENTION[name]}"
            args = (4 * b * heads * pairs * 128, num_bytes, us, labels(heads, kv_heads))
            table = Table(name, op, "f16", "bfloat16", data, *args)
            cold = (kv_bytes > 256e6) | (num_bytes < 2 * SMALL_BYTES)
            yield table.keep(cold if op is OpClass.DECODE else isl > 8)


def neusight(folder: Path) -> Iterator[Table]:
    """fp32 without TF32, PyTorch's own kernels, large sizes."""
    d = read(folder, "neusight_test_fp32.parquet")
    two_inputs = np.isin(d["OPName"].astype(str), ["add", "mul", "pow", "div"])
    for device, name in NEUSIGHT.items():
        here = d["Device"] == device
        rows = here & np.isin(d["cls"].astype(str), ["linear", "bmm"])
        b, m, n, k, ms = (d[c][rows].astype(np.float64) for c in ("B", "M", "N", "K", "Latency"))
        flops, num_bytes = gemm_work(b, m, n, k, 4)
        data = f"NeuSight, fp32 linear and bmm, {device}"
        yield Table(name, OpClass.GEMM, "f32", "float32", data, flops, num_bytes, ms * 1e3, labels(n, k))
        for cls, op in (("elementwise", OpClass.ELEMENTWISE), ("ln", OpClass.NORM), ("softmax", OpClass.SOFTMAX)):
            rows = here & (d["cls"] == cls)
            if rows.sum() < 30:
                continue
            b, h, ms = (d[c][rows].astype(np.float64) for c in ("B", "H", "Latency"))
            num_bytes = b * h * 4 * np.where(two_inputs[rows], 3, 2)
            data, groups = f"NeuSight, fp32 {cls}, {device}", labels(d["OPName"][rows], h)
            yield Table(name, op, "any", "float32", data, 0 * b, num_bytes, ms * 1e3, groups)


def vidur(folder: Path) -> Iterator[Table]:
    """fp16; `add` and the embedding are PyTorch's kernels (norm and activation are not), and the A40's GEMMs."""
    d = read(folder, "vidur_ops_a40_a100_h100.parquet")
    # phi-2 adds twice in one measurement.
    plain = d["model"] != "microsoft/phi-2"
    for name in ("a100", "h100", "a40"):
        for operator, op, passes in (("add", OpClass.ELEMENTWISE, 3), ("emb", OpClass.GATHER, 2)):
            rows = (d["gpu"] == name) & (d["op"] == operator) & (d["tp"] == 1) & plain
            tokens, width, us = (d[c][rows].astype(np.float64) for c in ("tokens", "n_embd", "us_med"))
            num_bytes = tokens * width * 2 * passes
            cold = (num_bytes > 2 * gpu(name).l2_bytes) | (num_bytes < SMALL_BYTES)
            data = f"Vidur, fp16 {operator}"
            args = (0 * us, num_bytes, us, labels(d["model"][rows], tokens))
            yield Table(name, op, "any", "float16", data, *args).keep(cold if operator == "add" else us > 0)
    yield _vidur_gemm(d)


def _vidur_gemm(d: dict[str, npt.NDArray[Any]]) -> Table:
    rows = (d["gpu"] == "a40") & np.char.endswith(d["op"].astype(str), "_proj")
    c = {key: column[rows] for key, column in d.items()}
    tp, width, ffn = (c[key].astype(np.float64) for key in ("tp", "n_embd", "ffn"))
    qkv = (c["n_head"] + 2 * c["n_kv_head"]) * (width / c["n_head"]) / tp
    up = ffn * np.where(c["gated"].astype(bool), 2, 1) / tp
    shapes = {"attn_pre_proj": (qkv, width), "attn_post_proj": (width, width / tp), "mlp_up_proj": (up, width),
              "mlp_down_proj": (width, ffn / tp)}  # fmt: skip
    n = np.select([c["op"] == key for key in shapes], [value[0] for value in shapes.values()])
    k = np.select([c["op"] == key for key in shapes], [value[1] for value in shapes.values()])
    flops, num_bytes = gemm_work(1, c["tokens"], n, k, 2)
    us = c["us_med"].astype(np.float64)
    return Table("a40", OpClass.GEMM, "f16", "float16", "Vidur, fp16 projections", flops, num_bytes, us, labels(n, k))


def llmservingsim(folder: Path) -> Iterator[Table]:
    """bf16 projections of Llama-3.1-8B on the RTX 4090, and PyTorch's embedding on both cards."""
    d = read(folder, "llmservingsim_rtx4090_rtxpro6000.parquet")
    dense = (d["table"] == "dense") & (d["tp"] == "tp1") & (d["model"] == "meta-llama/Llama-3.1-8B")
    here = dense & (d["gpu"] == "RTX4090") & np.isin(d["layer"].astype(str), list(LLAMA_8B))
    m, us = d["tokens"][here].astype(np.float64), d["time_us"][here].astype(np.float64)
    n, k = (np.array([LLAMA_8B[x][i] for x in d["layer"][here]], dtype=np.float64) for i in (0, 1))
    flops, num_bytes = gemm_work(1, m, n, k, 2)
    data = "LLMServingSim, bf16 projections of Llama-3.1-8B"
    yield Table("rtx-4090", OpClass.GEMM, "f16", "bfloat16", data, flops, num_bytes, us, labels(d["layer"][here], m))
    for system, name in (("RTX4090", "rtx-4090"), ("RTXPRO6000", "rtx-pro-6000")):
        rows = dense & (d["gpu"] == system) & (d["layer"] == "embedding")
        m, us = d["tokens"][rows].astype(np.float64), d["time_us"][rows].astype(np.float64)
        data = "LLMServingSim, bf16 embedding of Llama-3.1-8B"
        yield Table(name, OpClass.GATHER, "any", "bfloat16", data, 0 * m, m * 4096 * 4, us, labels(m))


def kernelbench(folder: Path) -> Iterator[Table]:
    """fp32 matrix products of PyTorch, wall clock with the launch: long ones only. Each problem is a group."""
    d = read(folder, "kernelbench_timing.parquet")
    number = np.array([int(str(x).split("_", maxsplit=1)[0]) for x in d["problem"]])
    eager = (d["mode"] == "eager") & (d["level"] == "level1") & np.isin(number, list(KERNELBENCH_GEMM))
    for name in dict.fromkeys(KERNELBENCH.values()):
        hosts = [src for src, found in KERNELBENCH.items() if found == name]
        rows = eager & np.isin(d["src"].astype(str), hosts)
        shapes = np.array([KERNELBENCH_GEMM[x] for x in number[rows]], dtype=np.float64).T
        flops, num_bytes = gemm_work(*shapes, 4)
        us = d["min_ms"][rows].astype(np.float64) * 1e3
        data = f"KernelBench level 1, fp32 matrix products, {' and '.join(hosts)}"
        yield Table(name, OpClass.GEMM, "f32", "float32", data, flops, num_bytes, us, labels(number[rows]))


def helix(folder: Path) -> Iterator[Table]:
    """fp16, one whole layer taken as one GEMM, for GPUs without a kernel table; 0.1 to 1 ms resolution."""
    with open(folder / "helix_layer_times.csv", encoding="utf-8") as file:
        listed = [r for r in csv.DictReader(file) if r["gpu"] in HELIX and float(r["ms_per_layer"]) >= 3.0]
    for system, name in HELIX.items():
        rows = [r for r in listed if r["gpu"] == system and (r["phase"] == "prompt" or int(r["tokens"]) <= 4)]
        tokens = np.array([float(r["tokens"]) for r in rows])
        sizes = np.array([HELIX_LAYER[r["model"]] for r in rows], dtype=np.float64).T
        weights = sizes[0] * (2 * sizes[0] + 2 * sizes[2] + 3 * sizes[1])
        us = np.array([float(r["ms_per_layer"]) * 1e3 for r in rows])
        groups = [f"{r['model']}/{r['phase']}/{r['tokens']}" for r in rows]
        args = (2 * weights * tokens, 2 * weights, us, groups)
        yield Table(name, OpClass.GEMM, "f16", "float16", "Helix, fp16 layer times of LLaMA 30B and 70B", *args)


def predict(theta: Array, table: Table) -> Array:
    """The model on every row; theta holds the logarithms of t0, 1/ec, 1/em and p - 1."""
    spec = gpu(table.gpu)
    compute = table.flops / (peak_tflops(spec, table.dtype) * 1e6) * np.exp(theta[1])
    memory = table.num_bytes / (spec.memory_gbps * 1e3) * np.exp(theta[2])
    p = 1 + np.exp(theta[3])
    longer = np.maximum(np.maximum(compute, memory), 1e-9)
    joined = longer * ((compute / longer) ** p + (memory / longer) ** p) ** (1 / p)
    return np.asarray(np.exp(theta[0]) + joined, dtype=np.float64)


# Where the rows say nothing (a constant term from millisecond kernels), the fit stays here: 2.5 us, 70 %, 80 %, p = 2.
PRIOR = np.array([np.log(2.5), -np.log(0.7), -np.log(0.8), 0.0])


def fit_theta(table: Table) -> Array:
    """Least mean |log ratio|, a whisper of a prior, three starts."""

    def loss(theta: Array) -> float:
        bounded = np.clip(theta, PRIOR - [3, 1.5, 2.5, 3], PRIOR + [3, 1.5, 2.5, 3])
        off = float(np.mean(np.abs(np.log(predict(bounded, table) / table.us))))
        return off + 1e-4 * float(np.sum((theta - PRIOR) ** 2)) + float(np.sum((theta - bounded) ** 2))

    starts = [PRIOR, PRIOR + [1.5, 0.3, 0.5, 0.5], PRIOR + [0.5, -0.3, 0.0, -1.0]]
    options = {"maxiter": 1500, "xatol": 1e-3, "fatol": 1e-5}
    found = [minimize(loss, start, method="Nelder-Mead", options=options) for start in starts]
    return np.asarray(min(found, key=lambda x: float(x.fun)).x, dtype=np.float64)


def held_out_mask(table: Table) -> npt.NDArray[np.bool_]:
    """A fifth of the groups, the same ones on every run and every GPU."""
    chosen = {g for g in set(table.group) if zlib.crc32(g.encode()) % HELD_OUT == 0}
    return np.array([g in chosen for g in table.group])


def thin(table: Table) -> Table:
    """At most MAX_ROWS rows, evenly."""
    step = max(1, -(-len(table.us) // MAX_ROWS))
    return table.keep(np.arange(len(table.us)) % step == 0)


def to_params(theta: Array, memory_bound: bool) -> Params:
    """The model's own numbers, rounded to what the fit can tell. Without operations, ec says nothing."""
    ec = 1.0 if memory_bound else float(np.exp(-theta[1]))
    t0, em, p = np.exp(theta[0]), np.exp(-theta[2]), 1 + np.exp(theta[3])
    return Params(round(float(t0), 3), round(ec, 4), round(float(em), 4), 2.0 if memory_bound else round(float(p), 3))


def errors(params: Params, table: Table) -> Array:
    """Relative errors of the rounded parameters."""
    spec = gpu(table.gpu)
    peaks = (peak_tflops(spec, table.dtype), spec.memory_gbps)
    times = [params.us(f, b, *peaks) for f, b in zip(table.flops, table.num_bytes, strict=True)]
    return np.asarray(np.abs(np.array(times) / table.us - 1), dtype=np.float64)


def fit_one(table: Table) -> Fit:
    """Parameters from four fifths of the groups, errors from the last fifth."""
    held = held_out_mask(table)
    memory_bound = not table.flops.any()
    if len(set(table.group)) < 30:
        params, off = _leave_one_group_out(table, memory_bound)
        rest, us = table, table.us
    else:
        rest, test = thin(table.keep(~held)), table.keep(held)
        params = to_params(fit_theta(rest), memory_bound)
        off, us = errors(params, test), test.us
    long = off[us >= LONG_US] if (us >= LONG_US).sum() >= 5 else off
    figures = (round(float(x), 4) for x in (off.mean(), np.median(off), long.mean()))
    return Fit(table.gpu, table.op, table.family, params, *figures, len(rest.us), len(off), table.data)


def _leave_one_group_out(table: Table, memory_bound: bool) -> tuple[Params, Array]:
    """With few groups, each is held out in turn and the parameters come from all."""
    groups, off = np.array(table.group), np.zeros(len(table.us))
    for group in dict.fromkeys(table.group):
        out = groups == group
        off[out] = errors(to_params(fit_theta(table.keep(~out)), memory_bound), table.keep(out))
    return to_params(fit_theta(table), memory_bound), off


def leave_one_gpu_out(tables: list[Table], fits: list[Fit]) -> Iterator[LeftOut]:
    """The class model of every GPU that has relatives, judged by that GPU's own rows."""
    for table, fit in zip(tables, fits, strict=True):
        alike = [f for f in fits if (f.op, f.family) == (fit.op, fit.family) and f.gpu != fit.gpu]
        if alike:
            kinship, nearest = relatives(gpu(fit.gpu), alike)
            off = errors(average([f.params for f in nearest]), thin(table))
            yield LeftOut(fit.gpu, fit.op, fit.family, kinship, round(float(off.mean()), 4))


def first_of_each(tables: Iterable[Table]) -> list[Table]:
    """One table a GPU, class and family: the first named wins."""
    kept: dict[tuple[str, OpClass, str], Table] = {}
    for table in tables:
        kept.setdefault((table.gpu, table.op, table.family), table)
    return list(kept.values())


def write(path: Path, fits: list[Fit], left: list[LeftOut]) -> None:
    """One row a line, so that a change reads well."""
    parts = [",\n".join("  " + json.dumps(asdict(row)) for row in rows) for rows in (fits, left)]
    path.write_text(f'{{\n "fits": [\n{parts[0]}\n ],\n "left_out": [\n{parts[1]}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    """Reads the tables, fits, writes."""
    parser = argparse.ArgumentParser(description="Fit the cost model to public measurements.")
    parser.add_argument("tables", type=Path)
    parser.add_argument("--out", type=Path, default=Path("src/tessera/profile/fitted.json"))
    args = parser.parse_args()
    readers = (aic_gemm, aic_attention, kernelbench, neusight, vidur, llmservingsim, helix)
    tables = first_of_each(table for reader in readers for table in reader(args.tables))
    fits = []
    for table in tables:
        fits.append(fit_one(table))
        f = fits[-1]
        print(f"{f.gpu:15s} {f.op:12s} {f.family:4s} held out: mean {f.mean_error:.1%} median {f.median_error:.1%} "
              f"long {f.long_error:.1%} (n={f.num_held_out})  {f.params}")  # fmt: skip
    left = list(leave_one_gpu_out(tables, fits))
    for x in left:
        print(f"left out {x.gpu:15s} {x.op:12s} {x.family:4s} same {x.kinship:6s} mean {x.mean_error:.1%}")
    write(args.out, fits, left)


if __name__ == "__main__":
    main()
