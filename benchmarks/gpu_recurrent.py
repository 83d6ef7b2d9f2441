"""Time of the recurrent layers' operators on a GPU, at sizes of Mamba-Codestral 7B, Jamba and Qwen3-Next.

    python benchmarks/gpu_recurrent.py [--tiles]

Each line: operator, sequences x tokens, microseconds per call in a CUDA graph, and GB/s of inputs, results
and states (read and written). `--tiles` tries other tiles of `ssd_scan`.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

# Sequences, and tokens of each.
SHAPES = ((32, 1), (128, 1), (1, 2048), (4, 512), (32, 64))
# Tokens of a chunk, state rows of a program, warps; and state elements of a program of answers.
CHUNKS = tuple(itertools.product((32, 64), (32, 64), (4, 8)))
ELEMENTS = (1024, 2048, 4096, 8192)


def make_call(name: str, sequences: int, each: int) -> list[Any]:
    """Arguments of an operator in bfloat16."""
    import torch

    tokens = sequences * each
    starts = torch.arange(0, tokens + 1, each, dtype=torch.int32, device="cuda")
    tables = [starts, torch.arange(sequences, dtype=torch.int32, device="cuda")]

    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda").bfloat16()

    def state(*sizes: int) -> torch.Tensor:
        return torch.randn(sequences, *sizes, device="cuda")

    if name == "causal_conv":
        return [some(tokens, 10240), some(10240, 4), some(10240), state(3, 10240).bfloat16(), *tables, True]
    if name == "ssd_scan":
        inputs = [some(tokens, 128, 64), some(tokens, 128), -some(128).abs().float()]
        inputs += [some(tokens, 8, 128), some(tokens, 8, 128), some(128), some(128)]
        return [*inputs, state(128, 64, 128), *tables, True, 0.0, float("inf")]
    if name == "selective_scan":
        inputs = [some(tokens, 8192), some(tokens, 8192), -some(8192, 16).abs().float()]
        inputs += [some(tokens, 16), some(tokens, 16), some(8192), some(8192), some(tokens, 8192)]
        return [*inputs, state(8192, 16), *tables, True]
    inputs = [some(tokens, 32, 128) for _ in range(3)]
    return [
        *inputs,
        -some(tokens, 32, 1).abs(),
        some(tokens, 32).sigmoid(),
        state(32, 128, 128),
        *tables,
        True,
    ]


def line(name: str, sequences: int, each: int, note: str = "") -> None:
    import torch
    from benchmarks.gpu_choose import timed

    from tessera.kernels import recurrent

    call = make_call(name, sequences, each)
    operator = getattr(torch.ops.tessera, name)
    micros = timed(lambda: operator(*call))
    written = recurrent.SCHEMAS[name].split(", ").index("Tensor(a!) state")
    size = sum(t.nbytes for t in call if isinstance(t, torch.Tensor)) + call[0].nbytes + call[written].nbytes
    print(
        f"{name:15} {sequences:4} x {each:4} {micros:9.1f} us {size / micros / 1e3:7.0f} GB/s {note}",
        flush=True,
    )


def try_tiles() -> None:
    from triton.runtime.errors import OutOfResources

    from tessera.kernels import recurrent_triton as kernels

    names = ("_CHUNK_TOKENS", "_CHUNK_ROWS", "_CHUNK_WARPS", "_STATE_ELEMENTS")
    usual = [getattr(kernels, name) for name in names]
    tried = [((4, 512), (*chunk, usual[3])) for chunk in CHUNKS]
    tried += [((32, 1), (*usual[:3], elements)) for elements in ELEMENTS]
    for shape, values in tried:
        for name, value in zip(names, values, strict=True):
            setattr(kernels, name, value)
        try:
            line("ssd_scan", *shape, note=str(values))
        except OutOfResources as error:
            print(values, error)
    for name, value in zip(names, usual, strict=True):
        setattr(kernels, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of recurrent layers on a GPU.")
    parser.add_argument("--tiles", action="store_true", help="other tiles of ssd_scan too")
    args = parser.parse_args()

    from tessera.kernels import recurrent

    for name, (sequences, each) in itertools.product(recurrent.SCHEMAS, SHAPES):
        line(name, sequences, each)
    if args.tiles:
        try_tiles()


if __name__ == "__main__":
    main()
