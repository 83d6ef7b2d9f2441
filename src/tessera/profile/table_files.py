"""Reads measured tables of an installed `aiconfigurator-core`; never runs its code.

Layout: `<package>/systems/data/<system>/<family>/<stack>/<version>/<file>.parquet`. Stacks are tried in one
order for every GPU, newest version first. A row's place is log2 of its sizes. Rows are 16-bit, and fp8 for
GEMMs; attention is by head width, without sliding windows; experts have balanced routing on one GPU. A file's
most frequent kernel is kept; unreadable files, missing columns and other cards are refused.

Collectors repeat a kernel: rows with all weights in L2 are dropped, attention rows record the share in it.
Arrays are cached in `$XDG_CACHE_HOME/tessera/tables`.
"""

import hashlib
import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.errors import ArtifactError, extra_module, first_line
from tessera.ir.files import write_whole
from tessera.profile.counts import OpClass, Work
from tessera.profile.fitted import Array, Loads, l2_share
from tessera.profile.gpus import Gpu

Columns = Mapping[str, Array]
Filter = list[tuple[str, str, Any]]
Mask = npt.NDArray[np.bool_]
Arrays = dict[str, npt.NDArray[Any]]

# Copies that a GEMM collector rotates.
WEIGHT_COPIES = 6
# The constant term dominates.
SMALL_BYTES = 1 << 20
BF16, FP8 = "bfloat16", "fp8"
ITEM_BYTES = {BF16: 2, FP8: 1}
ARITHMETIC = {FP8: "float8_e4m3fn"}
HEAD_WIDTHS = ("64", "128", "192", "256")
# Rows per group up to which weights bind a grouped GEMM in every library. On one H200 PyTorch took half the
# fused kernels' time at 256 rows, about the same at 4.
MAX_EXPERT_ROWS = 64
# Queries from which attention rows are prompts.
MIN_PROMPT = 9
_ATTENTION_COLUMNS = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads")
PACKAGE = "aiconfigurator_core"
DISTRIBUTION = "aiconfigurator-core"
SYSTEMS = {
    "a100": "a100_sxm", "l40s": "l40s", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm",
    "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
# Increase when reading or derived data changes.
READER_VERSION = 2


@dataclass(frozen=True, slots=True)
class Kind:
    op: OpClass
    family: str
    file: str
    columns: tuple[str, ...]
    # By preference.
    stacks: tuple[str, ...]
    # Dtypes for GEMM, head widths for attention.
    variants: tuple[str, ...]
    # Absent columns are ignored.
    filters: Callable[[str], Filter]
    places: Callable[[Columns], Array]
    # Times of a row's kernels add up.
    loads: Callable[[Columns, str, Gpu], tuple[Loads, ...]]
    query: Callable[[Work], tuple[str, tuple[float, ...]] | None]
    # An assumption.
    kernel_error: float = 0.0


def arithmetic(variant: str) -> str:
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
    batch, queries, step, heads, kv_heads = (columns[c] for c in _ATTENTION_COLUMNS)
    width, keys = float(variant), queries + step
    kv_bytes = 2.0 * 2.0 * width * batch * keys * kv_heads
    num_bytes = kv_bytes + 2.0 * 2.0 * width * batch * queries * heads
    flops = 4.0 * width * batch * heads * (queries * keys - queries * (queries - 1) / 2)
    rows = np.where(queries < MIN_PROMPT, batch * kv_heads, 0.0)
    hit = l2_share(np.where(queries < MIN_PROMPT, kv_bytes, num_bytes), spec)
    return (Loads(flops, num_bytes, np.zeros((4, len(batch))), rows, hit),)


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
    # Tables have causal prompts only.
    return (str(width), tuple(_log2(batch, queries, keys, heads, kv_heads).tolist())) if causal else None


def cache_share(loads: Loads, op: OpClass, spec: Gpu) -> Array:
    """Share of the bytes that the collector read from L2."""
    return l2_share(loads.num_bytes, spec) if op is OpClass.DECODE else np.zeros(len(loads.num_bytes))


def _moe_loads(columns: Columns, variant: str, spec: Gpu) -> tuple[Loads, ...]:
    rows = columns["num_tokens"] * columns["topk"]
    hidden, inner = columns["hidden_size"], columns["inter_size"] / columns["moe_tp_size"]
    groups = np.minimum(columns["num_experts"], rows)
    item, zeros = ITEM_BYTES[variant], np.zeros(len(rows))
    hit = l2_share(3 * item * groups * hidden * inner, spec)
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
    # Wider than long: gate and up projection. Else the down projection.
    hidden, inner = (k, n / 2) if n > k else (n, k)
    return BF16, tuple(_log2(rows, hidden, inner, groups).tolist())


def _moe_places(c: Columns) -> Array:
    inner = c["inter_size"] / c["moe_tp_size"]
    return _log2(c["num_tokens"] * c["topk"], c["hidden_size"], inner, c["num_experts"])


KINDS: dict[OpClass, Kind] = {
    kind.op: kind
    for kind in (
        # All call cuBLAS at 16 bits; sglang has the same 35,742 shapes on every GPU.
        Kind(
            OpClass.GEMM, "gemm", "gemm_perf.parquet", ("m", "n", "k"), ("sglang", "vllm", "trtllm"),
            (BF16, FP8), lambda variant: [("gemm_dtype", "=", variant)],
            lambda c: _log2(c["m"], c["n"], c["k"]), _gemm_loads, _gemm_query,
        ),
        # vLLM runs FlashAttention, as PyTorch does; sglang uses other libraries by GPU.
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
            # Only sglang has balanced routing on every GPU.
            ("sglang", "vllm", "trtllm"), (BF16,),
            lambda variant: [("moe_dtype", "=", variant), ("distribution", "=", "balanced"),
                             ("moe_ep_size", "=", 1)],
            _moe_places, _moe_loads, _moe_query, kernel_error=0.20,
        ),
    )
}  # fmt: skip


def usable(columns: Columns, loads: tuple[Loads, ...], wrong: Mask, op: OpClass) -> Mask:
    """Rows with weights from memory and experts with a gate.

    Experts without a gate do two thirds of the work and are not marked. A row impossible with a gate reveals
    such a layer, whose rows are all dropped.
    """
    if op not in (OpClass.GEMM, OpClass.GROUPED):
        return np.ones(len(wrong), dtype=np.bool_)
    from_memory = np.asarray(loads[0].hit < 0.5, dtype=np.bool_)
    if op is OpClass.GEMM:
        return from_memory
    layer = columns["hidden_size"] + 1j * columns["inter_size"]
    return from_memory & ~np.isin(layer, layer[wrong])


class Unusable(ValueError):
    """The message is one sentence."""


class Absent(ValueError):
    """No rows of the variant."""


@dataclass(frozen=True, slots=True)
class TableFile:
    gpu: str
    op: OpClass
    stack: str
    version: str
    path: Path

    @property
    def name(self) -> str:
        return f"{self.stack} {self.version}"


@dataclass(frozen=True, slots=True)
class Rows:
    file: TableFile
    variant: str
    columns: Columns
    us: Array
    kernel: str
    num_without_time: int


def cached(folder: Path, files: Iterable[Path], words: Iterable[str], make: Callable[[], Arrays]) -> Arrays:
    """Arrays that `files` and `words` determine."""
    digest = hashlib.sha256(repr((READER_VERSION, tuple(words))).encode())
    for file in files:
        with suppress(OSError):  # reading reports a deleted file
            stat = file.stat()
            digest.update(repr((str(file), stat.st_size, stat.st_mtime_ns)).encode())
    path = folder / f"{digest.hexdigest()[:32]}.npz"
    with (
        suppress(OSError, ValueError, EOFError, zipfile.BadZipFile),
        np.load(path, allow_pickle=False) as entry,
    ):
        return {name: entry[name] for name in entry.files}
    arrays, packed = make(), io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    with suppress(OSError, ArtifactError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, [packed.getvalue()])
    return arrays


def read_rows(file: TableFile, variant: str, cache_to: Path) -> Rows:
    kind = KINDS[file.op]
    arrays = cached(cache_to, [file.path], ("rows", file.op, variant), lambda: _read(file, kind, variant))
    us = arrays["us"]
    if not us.size:
        raise Absent
    columns = {name: arrays[name] for name in kind.columns}
    timed = np.isfinite(us) & (us > 0)
    kept = {c: x[timed] for c, x in columns.items()}
    return Rows(file, variant, kept, us[timed], str(arrays["kernel"]), int((~timed).sum()))


def _read(file: TableFile, kind: Kind, variant: str) -> Arrays:
    parquet = extra_module("pyarrow.parquet", "tables", "pyarrow")
    try:
        present = set(parquet.read_schema(file.path).names)
        names = _column_names(kind, present)
        filters = [f for f in kind.filters(variant) if f[0] in present]
        table = parquet.read_table(file.path, columns=names, filters=filters)
    except (OSError, ValueError) as error:
        raise Unusable(f"it cannot be read: {first_line(error)}") from error
    _check_card(file, table)
    kernel, kept = _most_frequent(table["kernel_source"].to_pylist() if "kernel_source" in present else [])
    columns = {name: np.asarray(table[name].to_numpy(), dtype=np.float64)[kept] for name in kind.columns}
    latency_ms = np.asarray(table["latency"].to_numpy(), dtype=np.float64)[kept]
    return columns | {"us": latency_ms * 1e3, "kernel": np.array(kernel)}


def _column_names(kind: Kind, present: set[str]) -> list[str]:
    needed = [*kind.columns, "latency"]
    missing = [name for name in needed if name not in present]
    if missing:
        raise Unusable(f"it has no column {', '.join(missing)}")
    return needed + [name for name in ("device", "kernel_source") if name in present]


def _check_card(file: TableFile, table: Any) -> None:
    cards = set(table["device"].unique().to_pylist()) if "device" in table.column_names else set()
    words = file.gpu.replace("-", " ")
    foreign = sorted(str(card) for card in cards if words not in str(card).lower())
    if foreign:
        raise Unusable(f"its rows were timed on {foreign[0]}")


def _most_frequent(names: list[str]) -> tuple[str, Any]:
    if not names:
        return "", slice(None)
    ((most, _),) = Counter(names).most_common(1)
    return most, np.array([name == most for name in names])


@cache
def installed_root() -> Path | None:
    spec = find_spec(PACKAGE)
    for place in spec.submodule_search_locations or () if spec else ():
        root = Path(place) / "systems" / "data"
        if root.is_dir():
            return root
    return None


def files_of(root: Path, gpu_name: str, op: OpClass) -> tuple[TableFile, ...]:
    if gpu_name not in SYSTEMS or op not in KINDS:
        return ()
    kind, tables = KINDS[op], list[TableFile]()
    for stack in kind.stacks:
        folder = root / SYSTEMS[gpu_name] / kind.family / stack
        versions = sorted(folder.glob(f"*/{kind.file}"), key=_version_key, reverse=True)
        tables += [TableFile(gpu_name, op, stack, path.parent.name, path) for path in versions]
    return tuple(tables)


def _version_key(path: Path) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", path.parent.name))
