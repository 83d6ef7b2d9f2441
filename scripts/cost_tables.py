"""Reads the public tables that scripts/fit_costs.py fits: one `Table` a GPU and class.

Each reader drops the rows that would mislead: tables known to be wrong, kernels of other libraries than
PyTorch, and kernels that ran from the L2 cache because they were timed alone, unless they can be marked as
such. The reason stands beside the rule.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.profile.counts import OpClass
from tessera.profile.fitted import Array, Loads
from tessera.profile.gpus import gpu

SMALL_BYTES = 1 << 20  # below this the constant term decides, wherever the bytes come from
# Tables of long kernels do not show the constant term; these are the medians of the tables that do.
LONG_GEMM = {"t0_us": 3.0}
LONG_MEMORY = {"t0_us": 1.8}
# NeuSight's linear layers are bound by computing alone; bf16 GEMMs stream weights at 0.7 to 0.9 of the peak.
COMPUTE_BOUND = {"t0_us": 3.0, "em": 0.8, "p": 2.0}

AIC = {"a100_sxm": "a100", "l40s": "l40s", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200",
       "rtx_pro_6000_server": "rtx-pro-6000"}  # fmt: skip
# sglang 0.5.10 covers all six with one grid; on the RTX PRO 6000 it differs from the later 0.5.14 by half.
AIC_GEMM = dict.fromkeys(AIC.values(), "sglang 0.5.10") | {"rtx-pro-6000": "sglang 0.5.14"}
# One version of vLLM for the four it covers. sglang's attention tables of this age are wrong or Triton's.
AIC_ATTENTION = dict.fromkeys(AIC.values(), "vllm 0.14.0") | {
    "b200": "vllm 0.24.0",
    "rtx-pro-6000": "vllm 0.24.0",
}
NEUSIGHT = {"NVIDIA A100 80GB PCIe": "a100-pcie", "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
            "NVIDIA L4": "l4", "NVIDIA H100 80GB HBM3": "h100", "Tesla T4": "t4",
            "Tesla V100-PCIE-32GB": "v100"}  # fmt: skip
KERNELBENCH = {"A100-80GB_modal": "a100", "L40S_modal": "l40s", "L40S_matx3": "l40s", "L40S_babel": "l40s",
               "A10G_modal": "a10g", "B200_together": "b200"}  # fmt: skip
# (batch, m, n, k) of level 1 as those results were taken; the sizes have since grown, and the results do not
# record them. Check: with these, the A100 computes at 11 to 19 of its 19.5 TFLOP/s in every problem.
KERNELBENCH_GEMM = {1: (1, 2048, 2048, 2048), 2: (1, 1024, 2048, 4096), 3: (128, 128, 512, 256),
                    6: (1, 256, 256, 131072), 7: (1, 16384, 16384, 32), 8: (1, 8205, 5921, 2949),
                    9: (1, 16384, 16384, 16), 10: (1, 16384, 768, 2048), 11: (1, 2097152, 768, 256),
                    13: (1, 4096, 4096, 4096), 16: (1, 1024, 2048, 4096), 17: (1, 1024, 2048, 4096),
                    18: (1, 1024, 2048, 4096)}  # fmt: skip
HELIX = {"l4": "l4", "t4": "t4", "v100": "v100"}
# Hidden, feed-forward and key-value width of one layer.
HELIX_LAYER = {"llama1_30b": (6656, 17920, 6656), "llama2_70b": (8192, 28672, 1024)}
# Below these the resolution of the table shows.
MIN_LAYER_MS = {"prompt": 3.0, "decode": 0.8}
LLAMA_8B = {
    "qkv_proj": (6144, 4096),
    "o_proj": (4096, 4096),
    "gate_up_proj": (28672, 4096),
    "down_proj": (4096, 14336),
}


def plain_loads(flops: Array, num_bytes: Array) -> Loads:
    """Without a GEMM's shape, rows of attention or hits in the cache."""
    zeros = np.zeros_like(num_bytes)
    return Loads(flops, num_bytes, np.zeros((4, len(zeros))), zeros, zeros)


def keep(loads: Loads, mask: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Loads:
    """The rows of the mask."""
    gemm = loads.gemm[:, mask]
    return Loads(loads.flops[mask], loads.num_bytes[mask], gemm, loads.rows[mask], loads.hit[mask])


@dataclass(frozen=True, slots=True)
class Table:
    """Measurements of one GPU and class."""

    gpu: str
    op: OpClass
    family: str
    dtype: str
    data: str
    loads: Loads
    us: Array
    # Rows of one group are fitted together or held out together.
    group: list[str]
    # Parameters on which the rows say nothing, and what they are set to.
    assumed: dict[str, float] = field(default_factory=dict)
    # Median difference of the same kernels in other stacks on the same GPU.
    spread: float = 0.0

    def keep(self, mask: npt.NDArray[np.bool_]) -> "Table":
        """The rows where the mask is set."""
        group = [g for g, kept in zip(self.group, mask, strict=True) if kept]
        return replace(self, loads=keep(self.loads, mask), us=self.us[mask], group=group)


def read(folder: Path, name: str) -> dict[str, npt.NDArray[Any]]:
    """The columns of one table as arrays."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / name)
    return {c: table[c].to_numpy(zero_copy_only=False) for c in table.column_names}


def labels(*columns: npt.NDArray[Any]) -> list[str]:
    """One group name a row."""
    return ["/".join(str(x) for x in row) for row in zip(*columns, strict=True)]


def gemm_loads(b: Any, m: Any, n: Any, k: Any, item_bytes: int) -> Loads:
    """Batched matrix products, from memory."""
    b, m, n, k = (np.asarray(x, dtype=np.float64) for x in np.broadcast_arrays(b, m, n, k))
    zeros = np.zeros(len(m))
    num_bytes = b * (m * k + k * n + m * n) * item_bytes
    return Loads(2 * b * m * n * k, num_bytes, np.array([b, m, n, k]), zeros, zeros)


def stack_spread(d: dict[str, npt.NDArray[Any]], system: str, src: str, shape: tuple[str, ...]) -> float:
    """Median |log ratio| of long kernels between one stack and each of the others, and of those the median.

    Versions of one stack are not compared: they share kernels, and mistakes.
    """
    here = d["system"] == system

    def times(name: str) -> dict[tuple[float, ...], float]:
        rows = here & (d["src"] == name)
        keys = zip(*(d[c][rows].tolist() for c in shape), strict=True)
        return dict(zip(keys, d["us"][rows].tolist(), strict=True))

    own, found = times(src), []
    for name in sorted(set(d["src"][here].astype(str))):
        if name.partition(" ")[0] != src.partition(" ")[0]:
            other = times(name)
            both = [(own[k], other[k]) for k in own.keys() & other.keys() if min(own[k], other[k]) >= 30.0]
            if len(both) >= 20:
                found.append(float(np.median([abs(np.log(a / b)) for a, b in both])))
    return float(np.median(found)) if found else 0.0


def only(d: dict[str, npt.NDArray[Any]], rows: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
    """The named rows of every column."""
    return {name: column[rows] for name, column in d.items()}


def aic_gemm(folder: Path) -> Iterator[Table]:
    """bf16 GEMMs; the collector goes round six copies of the weights: a cache that holds six serves them."""
    d = read(folder, "aic_gemm.parquet")
    d = only(d, d["gemm_dtype"] == "bfloat16")
    for system, name in AIC.items():
        rows = (d["system"] == system) & (d["src"] == AIC_GEMM[name])
        m, n, k, us = (d[c][rows].astype(np.float64) for c in ("m", "n", "k", "us"))
        loads = gemm_loads(1, m, n, k, 2)
        cached = (12 * n * k <= gpu(name).l2_bytes) & (loads.num_bytes >= SMALL_BYTES)
        loads = replace(loads, hit=cached.astype(np.float64))
        data = f"aiconfigurator-core, bf16 GEMM, {AIC_GEMM[name]}"
        table = Table(name, OpClass.GEMM, "f16", "bfloat16", data, loads, us, labels(n, k))
        yield replace(table, spread=stack_spread(d, system, AIC_GEMM[name], ("m", "n", "k")))


def aic_attention(folder: Path) -> Iterator[Table]:
    """bf16 attention, head width 128; the prompt's is causal, decode reads the whole KV cache.

    The kernels ran alone, so that a KV cache smaller than the L2 cache was read from there.
    """
    for op, file in ((OpClass.PREFILL, "context"), (OpClass.DECODE, "generation")):
        d = read(folder, f"aic_attention_{file}_hd128.parquet")
        d = only(d, (d["attn_dtype"] == "bfloat16") & (d["kv_cache_dtype"] == "bfloat16"))
        shape = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads")
        for system, name in AIC.items():
            rows = (d["system"] == system) & (d["src"] == AIC_ATTENTION[name])
            b, isl, step, heads, kv_heads, us = (d[c][rows].astype(np.float64) for c in (*shape, "us"))
            keys = isl + step
            pairs = isl * keys - isl * (isl - 1) / 2
            kv_bytes = 2 * b * keys * kv_heads * 128 * 2
            num_bytes = kv_bytes + 2 * b * isl * heads * 128 * 2
            data = f"aiconfigurator-core, bf16 {file} attention, {AIC_ATTENTION[name]}"
            decode = float(op is OpClass.DECODE)
            hit = decode / (1 + (kv_bytes / gpu(name).l2_bytes) ** 4)
            flops, shapes = 4 * b * heads * pairs * 128, np.zeros((4, len(b)))
            loads = Loads(flops, num_bytes, shapes, decode * b * kv_heads, hit)
            table = Table(name, op, "f16", "bfloat16", data, loads, us, labels(heads, kv_heads))
            spread = stack_spread(d, system, AIC_ATTENTION[name], shape)
            yield replace(table.keep(isl > 8 * (1 - decode)), spread=spread)


def neusight(folder: Path) -> Iterator[Table]:
    """fp32 without TF32, PyTorch's own kernels, large sizes."""
    d = read(folder, "neusight_test_fp32.parquet")
    two_inputs = np.isin(d["OPName"].astype(str), ["add", "mul", "pow", "div"])
    for device, name in NEUSIGHT.items():
        here = d["Device"] == device
        # Not bmm: thin batched products reach half of what the model says, and would spoil the rest.
        rows = here & (d["cls"] == "linear")
        b, m, n, k, ms = (d[c][rows].astype(np.float64) for c in ("B", "M", "N", "K", "Latency"))
        args = (gemm_loads(b, m, n, k, 4), ms * 1e3, labels(n, k))
        data = f"NeuSight, fp32 linear, {device}"
        yield Table(name, OpClass.GEMM, "f32", "float32", data, *args, COMPUTE_BOUND)
        for cls, op in (
            ("elementwise", OpClass.ELEMENTWISE),
            ("ln", OpClass.NORM),
            ("softmax", OpClass.SOFTMAX),
        ):
            rows = here & (d["cls"] == cls)
            if rows.sum() < 30:
                continue
            b, h, ms = (d[c][rows].astype(np.float64) for c in ("B", "H", "Latency"))
            num_bytes = b * h * 4 * np.where(two_inputs[rows], 3, 2)
            data, groups = f"NeuSight, fp32 {cls}, {device}", labels(d["OPName"][rows], h)
            args = (plain_loads(0 * b, num_bytes), ms * 1e3, groups)
            yield Table(name, op, "any", "float32", data, *args, LONG_MEMORY)


def vidur(folder: Path) -> Iterator[Table]:
    """fp16: `add`, which is PyTorch's kernel, and the A40's GEMMs.

    Norm and activation are another library's kernels, and PyTorch has since rewritten its embedding.
    """
    d = read(folder, "vidur_ops_a40_a100_h100.parquet")
    # phi-2 adds twice in one measurement.
    plain = d["model"] != "microsoft/phi-2"
    for name in ("a100", "h100", "a40"):
        rows = (d["gpu"] == name) & (d["op"] == "add") & (d["tp"] == 1) & plain
        tokens, width, us = (d[c][rows].astype(np.float64) for c in ("tokens", "n_embd", "us_med"))
        num_bytes = tokens * width * 6
        cold = (num_bytes > 2 * gpu(name).l2_bytes) | (num_bytes < SMALL_BYTES)
        args = (plain_loads(0 * us, num_bytes), us, labels(d["model"][rows], tokens))
        yield Table(name, OpClass.ELEMENTWISE, "any", "float16", "Vidur, fp16 add", *args).keep(cold)
    yield _vidur_gemm(d)


def _vidur_gemm(d: dict[str, npt.NDArray[Any]]) -> Table:
    rows = (d["gpu"] == "a40") & np.char.endswith(d["op"].astype(str), "_proj")
    c = {key: column[rows] for key, column in d.items()}
    tp, width, ffn = (c[key].astype(np.float64) for key in ("tp", "n_embd", "ffn"))
    qkv = (c["n_head"] + 2 * c["n_kv_head"]) * (width / c["n_head"]) / tp
    up = ffn * np.where(c["gated"].astype(bool), 2, 1) / tp
    shapes = {"attn_pre_proj": (qkv, width), "attn_post_proj": (width, width / tp),
              "mlp_up_proj": (up, width), "mlp_down_proj": (width, ffn / tp)}  # fmt: skip
    n = np.select([c["op"] == key for key in shapes], [value[0] for value in shapes.values()])
    k = np.select([c["op"] == key for key in shapes], [value[1] for value in shapes.values()])
    loads, us = gemm_loads(1, c["tokens"], n, k, 2), c["us_med"].astype(np.float64)
    return Table("a40", OpClass.GEMM, "f16", "float16", "Vidur, fp16 projections", loads, us, labels(n, k))


def llmservingsim(folder: Path) -> Iterator[Table]:
    """bf16 projections of Llama-3.1-8B on the RTX 4090; its small kernels ran from the L2 cache."""
    d = read(folder, "llmservingsim_rtx4090_rtxpro6000.parquet")
    dense = (d["table"] == "dense") & (d["tp"] == "tp1") & (d["model"] == "meta-llama/Llama-3.1-8B")
    here = dense & (d["gpu"] == "RTX4090") & np.isin(d["layer"].astype(str), list(LLAMA_8B))
    m, us = d["tokens"][here].astype(np.float64), d["time_us"][here].astype(np.float64)
    n, k = (np.array([LLAMA_8B[x][i] for x in d["layer"][here]], dtype=np.float64) for i in (0, 1))
    args = (gemm_loads(1, m, n, k, 2), us, labels(d["layer"][here], m))
    data = "LLMServingSim, bf16 projections of Llama-3.1-8B"
    yield Table("rtx-4090", OpClass.GEMM, "f16", "bfloat16", data, *args)


def kernelbench(folder: Path) -> Iterator[Table]:
    """fp32 products of PyTorch; the clock includes a launch, so the host's shortest time is taken off."""
    d = read(folder, "kernelbench_timing.parquet")
    number = np.array([int(str(x).split("_", maxsplit=1)[0]) for x in d["problem"]])
    eager = (d["mode"] == "eager") & (d["level"] == "level1")
    launch_ms = {src: float(d["min_ms"][eager & (d["src"] == src)].min()) for src in KERNELBENCH}
    eager &= np.isin(number, list(KERNELBENCH_GEMM))
    for name in dict.fromkeys(KERNELBENCH.values()):
        hosts = [src for src, found in KERNELBENCH.items() if found == name]
        rows = eager & np.isin(d["src"].astype(str), hosts)
        shapes = np.array([KERNELBENCH_GEMM[x] for x in number[rows]], dtype=np.float64).T
        loads = gemm_loads(shapes[0], shapes[1], shapes[2], shapes[3], 4)
        us = (d["min_ms"][rows] - np.array([launch_ms[x] for x in d["src"][rows]])).astype(np.float64) * 1e3
        data = f"KernelBench level 1, fp32 matrix products, {' and '.join(hosts)}"
        # Grouped by shape: four problems differ in transposition only.
        args = (loads, us, labels(*shapes))
        yield Table(name, OpClass.GEMM, "f32", "float32", data, *args, LONG_GEMM)


def helix(folder: Path) -> Iterator[Table]:
    """fp16, one whole layer taken as one GEMM, for GPUs without a kernel table; 0.1 to 1 ms resolution."""
    with open(folder / "helix_layer_times.csv", encoding="utf-8") as file:
        listed = [r for r in csv.DictReader(file) if float(r["ms_per_layer"]) >= MIN_LAYER_MS[r["phase"]]]
    for system, name in HELIX.items():
        rows = [r for r in listed if r["gpu"] == system and (r["phase"] == "prompt" or int(r["tokens"]) <= 4)]
        tokens = np.array([float(r["tokens"]) for r in rows])
        sizes = np.array([HELIX_LAYER[r["model"]] for r in rows], dtype=np.float64).T
        weights = sizes[0] * (2 * sizes[0] + 2 * sizes[2] + 3 * sizes[1])
        us = np.array([float(r["ms_per_layer"]) * 1e3 for r in rows])
        groups = [f"{r['model']}/{r['phase']}/{r['tokens']}" for r in rows]
        args = (plain_loads(2 * weights * tokens, 2 * weights), us, groups)
        data = "Helix, fp16 layer times of LLaMA 30B and 70B"
        yield Table(name, OpClass.GEMM, "f16", "float16", data, *args, LONG_GEMM)


def read_all(folder: Path) -> Iterator[Table]:
    """Every table, the best source of a GPU and class first."""
    for reader in (aic_gemm, aic_attention, kernelbench, neusight, vidur, llmservingsim, helix):
        yield from reader(folder)
