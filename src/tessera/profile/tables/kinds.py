"""The tables that are read: where a row stands, what work it timed, and which launches it can price.

A row's place is the logarithm to base 2 of its sizes, so that a distance of 1 is one doubling. Only 16-bit
rows are read, and fp8 ones of GEMMs. Attention is read by head width, without sliding windows. Of fused
mixtures of experts only rows of whole experts on one GPU with balanced routing are read; one grouped GEMM of
a trace is one of the two such a kernel does, so it is priced by how much slower than the model the fused
kernel is at that size.

The collectors run a kernel over and over. A GEMM has six copies of its weights, a mixture of experts has one;
rows whose weights all fit the L2 cache did not read memory, and are left out. Attention has one KV cache; its
rows say how much of it fits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.profile.counts import OpClass, Work
from tessera.profile.fitted import Array, Loads
from tessera.profile.gpus import Gpu

Columns = Mapping[str, Array]
Filter = list[tuple[str, str, Any]]
Mask = npt.NDArray[np.bool_]

# Copies of the weights that a collector of GEMMs goes round.
WEIGHT_COPIES = 6
# Below this the constant term decides, wherever the bytes come from.
SMALL_BYTES = 1 << 20
BF16, FP8 = "bfloat16", "fp8"
ITEM_BYTES = {BF16: 2, FP8: 1}
# The dtype whose peak counts for rows of a variant.
ARITHMETIC = {FP8: "float8_e4m3fn"}
HEAD_WIDTHS = ("64", "128", "192", "256")
# Rows a group up to which a grouped GEMM waits for its weights, whoever wrote it. Beyond, libraries differ:
# on one H200 PyTorch's took half as long as the tables' fused kernels at 256 rows, and about as long at 4.
MAX_EXPERT_ROWS = 64
# Which kernels of an attention table are prompts, in queries.
MIN_PROMPT = 9


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of table in the package."""

    op: OpClass
    # Folder and file below the system's folder; the stack and its version stand between them.
    family: str
    file: str
    # Whole numbers that place a row.
    columns: tuple[str, ...]
    # Tried in this order, newest version first.
    stacks: tuple[str, ...]
    # What one file holds apart: dtypes of GEMMs, head widths of attention.
    variants: tuple[str, ...]
    # Which rows belong to a variant; a column that a file lacks is not asked about.
    filters: Callable[[str], Filter]
    places: Callable[[Columns], Array]
    # The kernels of a row, whose times add up.
    loads: Callable[[Columns, str, Gpu], tuple[Loads, ...]]
    # Variant and place of a launch; None if no table of this kind can price it.
    query: Callable[[Work], tuple[str, tuple[float, ...]] | None]
    # Relative error of taking a row for a launch of another kind of kernel: an assumption.
    stand_in_error: float = 0.0


def arithmetic(variant: str) -> str:
    """The dtype in which rows of a variant compute."""
    return ARITHMETIC.get(variant, BF16)


def _log2(*sizes: Any) -> Array:
    return np.log2(np.maximum(np.stack([np.asarray(x, dtype=np.float64) for x in sizes], axis=-1), 1.0))


def _gemm_loads(columns: Columns, variant: str, spec: Gpu) -> tuple[Loads, ...]:
    m, n, k = (columns[c] for c in ("m", "n", "k"))
    item, zeros = ITEM_BYTES[variant], np.zeros(len(m))
    num_bytes = item * (m * k + k * n) + 2 * m * n
    fits = WEIGHT_COPIES * item * n * k <= spec.l2_bytes
    hit = np.where(fits & (num_bytes >= SMALL_BYTES), 1.0, 0.0)
    return (Loads(2 * m * n * k, num_bytes, np.stack([np.ones(len(m)), m, n, k]), zeros, hit),)


def _gemm_query(work: Work) -> tuple[str, tuple[float, ...]] | None:
    variant = {"bfloat16": BF16, "float16": BF16, "float8_e4m3fn": FP8}.get(work.dtype)
    if variant is None or not work.shape or work.shape[0] != 1 or 0 in work.shape:
        return None
    return variant, tuple(_log2(*work.shape[1:]).tolist())


def _attention_loads(columns: Columns, variant: str, spec: Gpu) -> tuple[Loads, ...]:
    batch, queries, step, heads, kv_heads = (
        columns[c] for c in ("batch_size", "isl", "step", "num_heads", "num_key_value_heads")
    )
    width, keys = float(variant), queries + step
    kv_bytes = 2.0 * 2.0 * width * batch * keys * kv_heads
    num_bytes = kv_bytes + 2.0 * 2.0 * width * batch * queries * heads
    flops = 4.0 * width * batch * heads * (queries * keys - queries * (queries - 1) / 2)
    rows = np.where(queries < MIN_PROMPT, batch * kv_heads, 0.0)
    hit = _hit(np.where(queries < MIN_PROMPT, kv_bytes, num_bytes), spec)
    return (Loads(flops, num_bytes, np.zeros((4, len(batch))), rows, hit),)


def _hit(working_set: Array, spec: Gpu) -> Array:
    """The share of the bytes that stays in the L2 cache from one run to the next."""
    return np.asarray(1.0 / (1.0 + (working_set / spec.l2_bytes) ** 4), dtype=np.float64)


def _attention_filters(variant: str) -> Filter:
    return [("head_dim", "=", int(variant)), ("attn_dtype", "=", BF16), ("kv_cache_dtype", "=", BF16),
            ("window_size", "=", 0)]  # fmt: skip


def _attention_query(work: Work) -> tuple[str, tuple[float, ...]] | None:
    if work.dtype not in ("bfloat16", "float16") or not work.shape or 0 in work.shape[:6]:
        return None
    batch, queries, keys, heads, kv_heads, width, causal = work.shape
    if str(width) not in HEAD_WIDTHS:
        return None
    if work.op is OpClass.DECODE:
        return str(width), tuple(_log2(batch, keys, heads, kv_heads).tolist())
    # The tables hold causal prompts only.
    return (str(width), tuple(_log2(batch, queries, keys, heads, kv_heads).tolist())) if causal else None


def cache_share(loads: Loads, op: OpClass, spec: Gpu) -> Array:
    """What share of these launches' bytes a table's run of the same shape found in the cache."""
    return _hit(loads.num_bytes, spec) if op is OpClass.DECODE else np.zeros(len(loads.num_bytes))


def _moe_loads(columns: Columns, variant: str, spec: Gpu) -> tuple[Loads, ...]:
    rows = columns["num_tokens"] * columns["topk"]
    hidden, inner = columns["hidden_size"], columns["inter_size"] / columns["moe_tp_size"]
    groups = np.minimum(columns["num_experts"], rows)
    item, zeros = ITEM_BYTES[variant], np.zeros(len(rows))
    hit = _hit(3 * item * groups * hidden * inner, spec)
    parts = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        num_bytes = item * (rows * k + groups * n * k + rows * n)
        shape = np.stack([groups, np.ceil(rows / groups), n, k])
        parts.append(Loads(2 * rows * n * k, num_bytes, shape, zeros, hit))
    return tuple(parts)


def _moe_query(work: Work) -> tuple[str, tuple[float, ...]] | None:
    if work.dtype != "bfloat16" or not work.shape or 0 in work.shape:
        return None
    groups, rows, n, k = work.shape
    if rows > MAX_EXPERT_ROWS * groups:
        return None
    # Wider than long: the first of the two, gate and up side by side. Else the second.
    hidden, inner = (k, n / 2) if n > k else (n, k)
    return BF16, tuple(_log2(rows, hidden, inner, groups).tolist())


def _moe_places(c: Columns) -> Array:
    inner = c["inter_size"] / c["moe_tp_size"]
    return _log2(c["num_tokens"] * c["topk"], c["hidden_size"], inner, c["num_experts"])


_ATTENTION_COLUMNS = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads")

KINDS: dict[OpClass, Kind] = {
    kind.op: kind
    for kind in (
        # All three call cuBLAS for 16 bits; sglang has the same 35,742 shapes on every GPU.
        Kind(
            OpClass.GEMM, "gemm", "gemm_perf.parquet", ("m", "n", "k"), ("sglang", "vllm", "trtllm"),
            (BF16, FP8), lambda variant: [("gemm_dtype", "=", variant)],
            lambda c: _log2(c["m"], c["n"], c["k"]), _gemm_loads, _gemm_query,
        ),
        # vLLM runs FlashAttention, as PyTorch does; sglang changes libraries from GPU to GPU.
        Kind(
            OpClass.PREFILL, "attention", "context_attention_perf.parquet", _ATTENTION_COLUMNS,
            ("vllm", "sglang", "trtllm"), HEAD_WIDTHS,
            lambda variant: [*_attention_filters(variant), ("isl", ">=", MIN_PROMPT)],
            lambda c: _log2(c["batch_size"], c["isl"], c["isl"] + c["step"], c["num_heads"],
                            c["num_key_value_heads"]),
            _attention_loads, _attention_query,
        ),
        Kind(
            OpClass.DECODE, "attention", "generation_attention_perf.parquet", _ATTENTION_COLUMNS,
            ("vllm", "sglang", "trtllm"), HEAD_WIDTHS, _attention_filters,
            lambda c: _log2(c["batch_size"], c["isl"] + c["step"], c["num_heads"], c["num_key_value_heads"]),
            _attention_loads, _attention_query,
        ),
        Kind(
            OpClass.GROUPED, "moe", "moe_perf.parquet",
            ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
            # sglang alone has balanced routing on every GPU.
            ("sglang", "vllm", "trtllm"), (BF16,),
            lambda variant: [("moe_dtype", "=", variant), ("distribution", "=", "balanced"),
                             ("moe_ep_size", "=", 1)],
            _moe_places, _moe_loads, _moe_query, stand_in_error=0.20,
        ),
    )
}  # fmt: skip


def usable(columns: Columns, loads: tuple[Loads, ...], wrong: Mask, op: OpClass) -> Mask:
    """The rows that may be used: weights from memory, and experts with a gate, as the loads have it.

    Experts without a gate do two thirds of the work and are not marked; what gives them away is a row that
    would be impossible with one. All rows of such a layer are left out.
    """
    if op not in (OpClass.GEMM, OpClass.GROUPED):
        return np.ones(len(wrong), dtype=np.bool_)
    from_memory = np.asarray(loads[0].hit < 0.5, dtype=np.bool_)
    if op is OpClass.GEMM:
        return from_memory
    layer = columns["hidden_size"] + 1j * columns["inter_size"]
    return from_memory & ~np.isin(layer, layer[wrong])
