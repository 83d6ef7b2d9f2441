"""A small folder in the layout of the public tables, with times that the test chooses."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.profile import gpu
from tessera.profile.counts import OpClass
from tessera.profile.fitted import Array, model_for, peaks_of, predict
from tessera.profile.table_files import KINDS, SYSTEMS
from tessera.profile.tables import Tables

_WIDTHS = [512, 1024, 2048, 3072, 4096, 8192, 12288, 16384]
GEMM_SIZES = ([1, 16, 64, 256, 1024, 4096], _WIDTHS, _WIDTHS)
_HEADS = ([16, 32, 48, 64], [4, 8, 16])
ATTENTION_SIZES = ([1, 2, 4, 8, 16], [512, 1024, 2048, 4096, 8192, 16384], [0], *_HEADS)
DECODE_SIZES = ([1, 4, 16, 64, 128, 256], [1], [255, 1023, 4095, 8191, 16383], *_HEADS)
# Tokens, hidden and inner width, experts a token visits, experts, and how they are divided: not at all.
_WHOLE = ([1], [1])
_INNER, _EXPERTS = [1024, 2048, 4096, 8192], [8, 16, 32, 64, 128]
EXPERT_SIZES = ([16, 64, 256, 1024, 4096], [2048, 4096, 8192], _INNER, [4], _EXPERTS, *_WHOLE)

# Columns -> factor on the model's time, one a row.
Factor = Callable[[dict[str, Array]], Any]


def one(_: dict[str, Array]) -> float:
    """Times exactly as modelled."""
    return 1.0


def write_table(
    root: Path,
    gpu_name: str,
    op: OpClass,
    stack: str = "",
    version: str = "1.0.0",
    factor: Factor = one,
    sizes: Sequence[Sequence[int]] | None = None,
    card: str = "",
    drop: str = "",
) -> Path:
    """One table of all products of the sizes, timed by the model times a factor."""
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    kind, spec = KINDS[op], gpu(gpu_name)
    variant = "bfloat16" if op in (OpClass.GEMM, OpClass.GROUPED) else "128"
    defaults = {
        OpClass.GEMM: GEMM_SIZES,
        OpClass.GROUPED: EXPERT_SIZES,
        OpClass.PREFILL: ATTENTION_SIZES,
        OpClass.DECODE: DECODE_SIZES,
    }
    rows = np.array(list(product(*(sizes or defaults[op]))), dtype=np.float64).T
    columns = dict(zip(kind.columns, rows, strict=True))
    params = model_for(gpu_name, op, "f16").params
    loads = kind.loads(columns, variant, spec)
    us = sum(predict(params, x, peaks_of(spec, "bfloat16")) for x in loads) * factor(columns)
    fixed = {"device": f"NVIDIA {card or gpu_name.replace('-', ' ').upper()}", "kernel_source": "made_up"}
    if op is OpClass.GEMM:
        fixed["gemm_dtype"] = variant
    elif op is OpClass.GROUPED:
        fixed |= {"moe_dtype": variant, "distribution": "balanced"}
    else:
        fixed |= {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    count = rows.shape[1]
    data: dict[str, Any] = {name: column.astype(np.int64) for name, column in columns.items()}
    data |= {name: [value] * count for name, value in fixed.items()} | {"latency": np.asarray(us) / 1e3}
    if variant == "128":
        data["head_dim"] = [128] * count
    data.pop(drop, None)
    folder = root / SYSTEMS[gpu_name] / kind.family / (stack or kind.stacks[0]) / version
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(data), folder / kind.file)
    return folder / kind.file


def made_tables(root: Path, cache: Path | None = None) -> Tables:
    """The tables of a hand-made folder."""
    return Tables(root, cache or root / "cache")
