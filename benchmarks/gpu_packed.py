"""Products with packed weights on one GPU, against the same products in bf16 and the card's copies.

    python benchmarks/gpu_packed.py --out benchmarks/results/packed_h200_202611.json

The four products of a layer of Llama 3 8B, or Qwen3 8B (`--model`; query/key/value, output, gate/up, down) at
several numbers of rows, and the experts of gpt-oss 20B. In one run: microseconds of each format, GB/s of its
codes and scales, the part of the card's copy bandwidth, and the ratio to bf16 (`linear`, `_grouped_mm`). Then
other tiles, until `--seconds` are over; the best of each format are printed last.

Times are of CUDA graph replays over several copies of the weights, so that none is in the cache.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_http import card

from tessera.kernels.packed_triton import ProductTile, multiply
from tessera.kernels.packing import BITS, can_tile, tile

# Outputs and inputs of a layer.
LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = {"llama-3-8b": LAYER, "qwen3-8b": LAYER | {"gate_up": (24576, 4096), "down": (4096, 12288)}}
# Experts, outputs and inputs of gpt-oss 20B; rows per token.
EXPERTS, EXPERT_LAYER, ROWS_EACH = 32, {"gate_up": (5760, 2880), "down": (2880, 2880)}, 4
BLOCKS = {"int4": (1, 128), "int8": (1, 1 << 20), "fp8": (128, 128), "mxfp4": (1, 32)}
COLD_BYTES = 1 << 30
# Columns, splits, warps and stages.
TILES = (
    (128, 1, 4, 4), (128, 2, 4, 4), (128, 4, 4, 4), (64, 2, 4, 4), (64, 4, 4, 4), (64, 1, 4, 4),
    (128, 2, 4, 6), (64, 4, 4, 6), (128, 8, 4, 4), (128, 2, 8, 4), (32, 2, 4, 5), (64, 2, 2, 5),
)  # fmt: skip
REPLAYS = 7


def make_weight(form: str, experts: int, outputs: int, inputs: int) -> tuple[Any, ...]:
    """Codes, scales, zeros, format and block; a plain weight for bf16."""
    if form == "bf16":
        return (torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16),)
    rows, width = BLOCKS[form]
    width = min(width, inputs)
    size = (experts, outputs, inputs * BITS[form] // 8)
    codes = torch.randint(0, 120, size, dtype=torch.uint8, device="cuda")
    codes = codes.view({"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(form, torch.uint8))
    blocks = (experts, -(-outputs // rows), inputs // width)
    scales = torch.full(blocks, 0.01, dtype=torch.bfloat16, device="cuda")
    if form == "mxfp4":
        scales = torch.full(blocks, 120, dtype=torch.uint8, device="cuda")
    zeros = torch.full(blocks, 7, dtype=torch.int8, device="cuda") if form == "int4" else None
    if can_tile(codes, scales, form, (rows, width)):  # as folders are read
        codes, scales, stored, block = tile(codes, scales, zeros, form, (rows, width))
        return codes, scales, None, stored, block
    return codes, scales, zeros, form, (rows, width)


def num_bytes(weight: Sequence[Any]) -> int:
    return sum(part.nbytes for part in weight if isinstance(part, torch.Tensor))


def call(
    form: str, weight: Sequence[Any], x: torch.Tensor, offsets: Any, given_tile: ProductTile | None = None
) -> torch.Tensor:
    if form == "bf16" and offsets is None:
        return torch.nn.functional.linear(x, weight[0][0])
    if form == "bf16":
        return torch._grouped_mm(x, weight[0].transpose(1, 2), offs=offsets)
    codes, scales, zeros, stored, block = weight
    return multiply(x, codes, scales, zeros, None, offsets, stored, block, given_tile)


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of one call, in a graph of all."""
    for each in calls:
        each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in calls:
            each()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times))


def measure(
    form: str, experts: int, size: tuple[int, int], rows: int, given_tile: ProductTile | None = None,
    uneven: float = 0.0,
) -> tuple[float, int]:  # fmt: skip
    """Microseconds, and bytes of the weight that the rows need; `uneven`: see `--uneven`."""
    first = make_weight(form, experts, *size)
    copies = [first]
    while num_bytes(first) * len(copies) < COLD_BYTES and len(copies) < 64:
        copies.append(make_weight(form, experts, *size))
    x = torch.randn(rows, size[1], device="cuda", dtype=torch.bfloat16)
    offsets = None
    if experts > 1:
        offsets = (torch.arange(1, experts + 1, device="cuda") * rows // experts).int()
    if experts > 1 and uneven:
        torch.manual_seed(0)
        chosen = torch.multinomial(torch.softmax(uneven * torch.randn(experts), 0), rows, True)
        offsets = torch.bincount(chosen, minlength=experts).cumsum(0).int().cuda()
    used = min(rows, experts) / experts
    calls = [lambda w=w: call(form, w, x, offsets, given_tile) for w in copies]
    return time_us(calls), int(num_bytes(first) * used)


def layers(
    model: str, forms: Sequence[str], all_rows: Sequence[int], gbps: float, uneven: float
) -> dict[str, Any]:
    """Figures by format and rows."""
    found: dict[str, Any] = {}
    for rows in all_rows:
        plain_us = 0.0
        for form in ("bf16", *forms):
            pairs = [measure(form, 1, size, rows) for size in LAYERS[model].values()]
            total_us, total = sum(us for us, _ in pairs), sum(size for _, size in pairs)
            plain_us = plain_us or total_us
            found[f"{model} {form} {rows}"] = row(total_us, total, plain_us, gbps, [us for us, _ in pairs])
    for tokens in (8, 64):
        plain_us = 0.0
        for form in ("bf16", "mxfp4"):
            num = tokens * ROWS_EACH
            pairs = [measure(form, EXPERTS, size, num, uneven=uneven) for size in EXPERT_LAYER.values()]
            total_us, total = sum(us for us, _ in pairs), sum(size for _, size in pairs)
            plain_us = plain_us or total_us
            found[f"gpt-oss {form} {tokens}"] = row(total_us, total, plain_us, gbps, [us for us, _ in pairs])
    return found


def row(us: float, size: int, plain_us: float, gbps: float, each: Sequence[float]) -> dict[str, Any]:
    figures = {
        "us": round(us, 1), "gbps": round(size / us / 1e3), "of_copy": round(size / us / 1e3 / gbps, 3),
        "times_bf16": round(plain_us / us, 2), "each_us": [round(x, 1) for x in each],
    }  # fmt: skip
    print(figures, flush=True)
    return figures


def sweep(forms: Sequence[str], seconds: float) -> dict[str, Any]:
    """Other tiles: output and gate/up at 8 rows, gate/up at 64; experts for MXFP4."""
    began = time.monotonic()
    best: dict[str, Any] = {}
    cases = [
        (form, experts, size, rows)
        for form in forms
        for experts, size, rows in (
            ((EXPERTS, EXPERT_LAYER["gate_up"], 32), (EXPERTS, EXPERT_LAYER["gate_up"], 256))
            if form == "mxfp4"
            else ((1, LAYER["gate_up"], 8), (1, LAYER["o"], 8), (1, LAYER["gate_up"], 64))
        )
    ]
    for number, (form, experts, size, rows) in enumerate(cases):
        found: list[tuple[float, str]] = []
        for columns, splits, warps, stages in TILES:
            for tile_rows in (16,) if rows < 64 else (16, 32, 64):
                if time.monotonic() - began > seconds * (number + 1) / len(cases):
                    break
                trial = ProductTile(tile_rows, columns, splits, warps, stages)
                try:
                    found.append((measure(form, experts, size, rows, trial)[0], str(trial)[11:]))
                except Exception as error:  # noqa: BLE001 - one tile must not stop the others
                    found.append((float("inf"), f"{trial}: {str(error)[:80]}"))
        found.sort()
        key = f"{form} {experts}x{size} {rows} rows, {len(found)} tiles"
        best[key] = [(round(us, 1), words) for us, words in found[:4]]
        print(key, best[key], flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="llama-3-8b", choices=LAYERS)
    parser.add_argument("--formats", default="int4,fp8,int8,mxfp4")
    parser.add_argument("--rows", default="1,8,32,64,512")
    parser.add_argument("--seconds", type=float, default=0.0, help="seconds for other tiles")
    parser.add_argument(
        "--uneven", type=float, default=0.0,
        help="rows choose experts by a softmax of so many times normal numbers; 0: evenly",
    )  # fmt: skip
    given = parser.parse_args()
    forms, rows = given.formats.split(","), [int(number) for number in given.rows.split(",")]
    figures = card()
    print(figures, flush=True)
    found = {"card": figures, **layers(given.model, forms, rows, figures["bytes per s"] / 1e9, given.uneven)}
    if given.seconds:
        found["tiles"] = sweep(forms, given.seconds)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
