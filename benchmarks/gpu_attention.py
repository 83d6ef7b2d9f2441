"""Paged attention on one GPU, against what the card itself can copy and multiply.

    python benchmarks/gpu_attention.py --out benchmarks/results/attention_h200_202611.json

Heads of Llama 3 8B (32 query heads, 8 key heads of 128, bf16), pages in random order. In one run:

1. the card's copy bandwidth and its matrix peak (`gpu_http.card`);
2. decode, sequences x tokens they have: microseconds, GB/s of the keys and values really there, and the part
   of the copy bandwidth;
3. prompts: microseconds, TFLOP/s of the products that causality leaves, and the part of the matrix peak;
4. 2 and 3 again for other blocks, warps, stages and splits, with the largest difference from the first
   result, until `--seconds` are over. The best of each case is printed last.

Times are of CUDA graph replays: a graph has several calls, which take turns over several pools of pages, so
that no pool is in the cache when its turn comes. A variant that fails is listed with its error.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_http import card

from tessera.kernels import PAGE
from tessera.kernels.paged_triton import Tile, Tiles, attend, tiles_for

QUERY_HEADS, HEADS, SIZE = 32, 8, 128
# Bytes that all pools together have at least: several times any card's cache.
COLD_BYTES = 1 << 30
REPLAYS = 5


@dataclass(frozen=True)
class Case:
    """One step: (tokens a sequence has, those of them that are new) of each sequence."""

    name: str
    parts: tuple[tuple[int, int], ...]

    @property
    def one_each(self) -> bool:
        """No sequence has more than one new token."""
        return all(new <= 1 for _, new in self.parts)

    @property
    def held_bytes(self) -> int:
        """Keys and values of all sequences."""
        return sum(length for length, _ in self.parts) * 2 * HEADS * SIZE * 2

    @property
    def flops(self) -> int:
        """Both products over what every new token sees."""
        seen = sum(new * (length - new) + new * (new + 1) // 2 for length, new in self.parts)
        return 4 * QUERY_HEADS * SIZE * seen


DECODE = (
    *(
        Case(f"decode {rows} x {length}", ((length, 1),) * rows)
        for rows in (1, 8, 16, 32, 64, 128)
        for length in (576, 1088, 4096)
    ),
    # A step has as many places as its size; few of them are taken at a low load.
    *(
        Case(f"decode {rows} x {length} in 64 places", ((length, 1),) * rows + ((0, 0),) * (64 - rows))
        for rows, length in ((8, 576), (1, 576), (1, 8192))
    ),
)
PREFILL = (
    Case("prompt 2048", ((2048, 2048),) + ((0, 0),) * 63),
    Case("prompt 2048 behind 4096", ((6144, 2048),) + ((0, 0),) * 63),
    Case("4 prompts of 512", ((512, 512),) * 4 + ((0, 0),) * 60),
    Case("prompt 1024, 32 x 1088", ((1024, 1024),) + ((1088, 1),) * 32 + ((0, 0),) * 31),
)
DECODE_TILES = (
    (Tile(16, 64, 4, 3), 1),
    (Tile(16, 64, 4, 5), 1),
    (Tile(16, 128, 4, 3), 1),
    (Tile(16, 64, 4, 3), 2),
    (Tile(16, 128, 8, 3), 1),
    (Tile(16, 32, 4, 3), 1),
    (Tile(16, 64, 2, 3), 1),
    (Tile(16, 64, 4, 2), 1),
    (Tile(16, 32, 4, 5), 1),
    (Tile(16, 64, 4, 3), 4),
    (Tile(16, 64, 4, 2), 8),
    (Tile(16, 64, 4, 2), 16),
    (Tile(16, 64, 4, 5), 8),
    (Tile(16, 128, 4, 2), 1),
)
PREFILL_TILES = (
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 3, 128),
    Tile(128, 128, 8, 2),
    Tile(64, 64, 4, 3),
    Tile(128, 64, 8, 2),
    Tile(64, 64, 4, 3, 168),
    Tile(64, 128, 4, 2),
    Tile(128, 128, 8, 3),
    Tile(64, 64, 4, 2),
    Tile(128, 32, 8, 3, 128),
    Tile(128, 64, 4, 3),
)


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args(args)
    until = time.monotonic() + given.seconds
    peaks = card()
    card_of_run = {
        "name": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "copy_GB/s": round(peaks["bytes per s"] / 1e9),
        "matmul_TFLOP/s": round(peaks["operations per s"] / 1e12, 1),
    }
    print(json.dumps(card_of_run), flush=True)
    steps = [Run(case, card_of_run) for case in (*DECODE, *PREFILL)]
    rows = [step.measure(None) for step in steps]
    for decode, prefill in zip(DECODE_TILES, PREFILL_TILES, strict=True):
        for step in steps:
            if time.monotonic() < until:
                rows.append(step.measure(step.tiles_with(*decode, prefill)))
    report = {"card": card_of_run, "cases": rows, "best": best(rows)}
    for row in report["best"]:
        print("best", json.dumps(row))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The quickest row of every case."""
    names = dict.fromkeys(row["case"] for row in rows)
    timed = [row for row in rows if "us" in row]
    return [
        min(mine, key=lambda row: row["us"])
        for name in names
        if (mine := [row for row in timed if row["case"] == name])
    ]


class Run:
    """One step with its pools of pages on the GPU."""

    def __init__(self, case: Case, card: dict[str, Any]) -> None:
        self.case, self._card = case, card
        self._calls = _calls(case)
        self._wanted: torch.Tensor | None = None

    def tiles_with(self, decode: Tile, splits: int, prefill: Tile) -> Tiles:
        """This step divided in another way; what a step does not use stays as it is."""
        tiles = self._own_tiles()
        if self.case.one_each:
            return replace(tiles, decode=decode, splits=splits)
        return replace(tiles, prefill=prefill)

    def _own_tiles(self) -> Tiles:
        query, pages = self._calls[0][0], self._calls[0][3]
        card = torch.cuda.get_device_properties(0)
        shared = getattr(card, "shared_memory_per_block_optin", 99 << 10)
        sizes = (QUERY_HEADS, HEADS), (SIZE, SIZE)
        return tiles_for(query.shape[0], len(self.case.parts), *sizes, 2, pages.numel(), shared)

    def measure(self, tiles: Tiles | None) -> dict[str, Any]:
        """A row of the report; without tiles, as the operator runs."""
        row: dict[str, Any] = {"case": self.case.name, "tiles": _text(self.case, tiles or self._own_tiles())}
        if tiles is None:
            row["is_default"] = True
        try:
            row |= self._measured(tiles)
        except Exception as error:  # noqa: BLE001  one variant must not end the run
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        print(json.dumps(row), flush=True)
        return row

    def _measured(self, tiles: Tiles | None) -> dict[str, Any]:
        rest = (SIZE**-0.5, 0, 0.0, None, self.case.one_each)

        def call(step: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return attend(step, *rest, tiles or self._own_tiles())

        out = call(self._calls[0])
        torch.cuda.synchronize()
        if self._wanted is None:
            self._wanted = out
        difference = (out.float() - self._wanted.float()).abs().max().item()
        us = graph_us([lambda step=step: call(step) for step in self._calls])  # type: ignore[misc]
        gbps = self.case.held_bytes / us / 1e3
        tflops = self.case.flops / us / 1e6
        return {
            "us": round(us, 2),
            "GB/s": round(gbps),
            "of_copy": round(gbps / self._card["copy_GB/s"], 3),
            "TFLOP/s": round(tflops, 1),
            "of_matmul": round(tflops / self._card["matmul_TFLOP/s"], 3),
            "difference": difference,
        }


def _text(case: Case, tiles: Tiles) -> dict[str, Any]:
    if case.one_each:
        return {**asdict(tiles.decode), "splits": tiles.splits}
    return asdict(tiles.prefill)


def _calls(case: Case) -> list[tuple[torch.Tensor, ...]]:
    """The first seven arguments of `attend`, over as many pools as it takes to be cold."""
    counts = [-(-length // PAGE) for length, _ in case.parts]
    num_pages = sum(counts) + 1
    num_pools = min(8, 1 + COLD_BYTES // max(case.held_bytes, 1))
    starts = torch.tensor([0, *counts]).cumsum(0)
    firsts = torch.tensor([0, *(new for _, new in case.parts)]).cumsum(0)
    lengths = torch.tensor([length for length, _ in case.parts])
    numbers = [t.to(torch.int32).cuda() for t in (starts[:-1], lengths, firsts)]
    calls = []
    for _ in range(num_pools):
        held = torch.randn(2, num_pages, PAGE, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
        query = torch.randn(int(firsts[-1]), QUERY_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
        pages = torch.zeros(2 * num_pages, dtype=torch.int32, device="cuda")
        pages[: num_pages - 1] = torch.randperm(num_pages - 1, device="cuda").to(torch.int32) + 1
        calls.append((query, held[0], held[1], pages, *numbers))
    return calls


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one call among calls in one CUDA graph, run one after another; median of replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (2 * len(calls)))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
