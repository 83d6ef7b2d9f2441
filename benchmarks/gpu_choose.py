"""Time of tessera::choose on a GPU, beside torch's argmax, for each kind of row.

    python benchmarks/gpu_choose.py

Each line: rows x vocabulary, then microseconds per call in a CUDA graph, and the rows whose token is the
reference's (a CPU's).
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from choose_factory import KINDS, make_rows
from tessera.kernels import choose
from tessera.kernels.choice import Number

assert choose
SIZES = ((64, 128_256), (256, 151_936), (64, 256_000), (8, 128_256))
CALLS, REPEATS = 20, 5


def timed(call: Callable[[], object]) -> float:
    """Microseconds per call, the best of several graphs of calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    best = float("inf")
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) * 1000 / CALLS)
    return best


def of_kind(given: tuple[torch.Tensor, ...], kind: int) -> tuple[torch.Tensor, ...]:
    """All rows with the settings of one kind."""
    logits, last, settings, numbers, edits, masks = (t.clone() for t in given)
    settings[:], seeds = settings[kind], numbers[:, Number.SEED].clone()
    numbers[:] = numbers[kind]
    numbers[:, Number.SEED], numbers[:, Number.NUM_TOP] = seeds, 0
    if numbers[0, Number.MASK]:
        numbers[:, Number.MASK] = torch.arange(1, len(numbers) + 1)
    return logits, last, settings, numbers, edits, masks


def main() -> None:
    for rows, vocab in SIZES:
        given = make_rows(rows, vocab, dtype=torch.bfloat16)
        logits = given[0].cuda()
        times = {"argmax": timed(partial(torch.argmax, logits, -1))}
        for number, kind in enumerate(KINDS):
            own = tuple(t.cuda() for t in of_kind(given, number))
            times[kind] = timed(partial(torch.ops.tessera.choose, *own))
        own = tuple(t.cuda() for t in of_kind(given, 0))
        own[3][:, Number.NUM_TOP] = 21
        times["greedy, 20 logprobs"] = timed(partial(torch.ops.tessera.choose, *own))
        few = tuple(t[:16] if t.shape[0] == rows else t for t in given)
        same = (
            torch.ops.tessera.choose(*few)[0] == torch.ops.tessera.choose(*(t.cuda() for t in few))[0].cpu()
        )
        print(f"{rows} x {vocab}: {int(same.sum())} of {len(same)} rows as on a CPU")
        print("   ", ", ".join(f"{kind} {us:.1f}" for kind, us in times.items()), flush=True)


if __name__ == "__main__":
    main()
