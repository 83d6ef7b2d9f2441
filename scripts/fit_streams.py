"""Fits the kernels of `tessera.profile.corrections` to timed attention and writes them to corrections.json.

    python -m scripts.fit_streams [--results benchmarks/results] [--out .../corrections.json]

Kernels of PyTorch are in the rows that `launch_rows.py` made and in what was timed of sdpa with a mask, the
kernel over pages in what `gpu_attention.py` wrote. Loss: absolute log ratio. Errors are of launches left out
of the fit, one at a time.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scripts.launch_rows import read

from tessera.profile.corrections import SUFFIX, Stream, load, save, streamed_us
from tessera.profile.counts import OpClass, Work
from tessera.profile.fitted import model_of
from tessera.profile.gpus import gpu

Timed = tuple[Work, float]
Array = npt.NDArray[np.float64]

GPU = "h200"
# Kernels that give the keys of few sequences to several blocks.
SPLIT = ("cudnn", "flash", "paged")
# Where the search begins, and what a prior holds: floor, reach, tail, chain, wave. A kernel is taken to
# stream as the GPU's own rows do unless its launches say otherwise; cycles decide where those cannot.
START = np.log([1.0, 1.0, 1.0, 40.0, 5.0])
PRIOR = np.array([0.05, 0.5, 0.05, 0.02, 0.02])
# Nothing is believed to be known better than this.
LEAST_ERROR = 0.05


def timed(results: Path) -> dict[str, list[Timed]]:
    """Kernel -> its launches and their microseconds."""
    found: dict[str, list[Timed]] = {}
    for row in read(results / "launches_h200_202611.json"):
        if row.work.op is OpClass.DECODE:
            kernel = row.work.overhead[0][0].removesuffix(SUFFIX)
            found.setdefault(kernel, []).append((row.work, row.us))
    paged = json.loads((results / "attention_h200_202611.json").read_text())["cases"]
    defaults = (c for c in paged if c["case"].startswith("decode") and c.get("is_default"))
    found["paged"] = [(work_of(c["case"], "paged", 1), c["us"]) for c in defaults]
    masked = json.loads((results / "decode_sdpa_h200_202611.json").read_text())["cases"]
    found["masked"] += [(work_of(c["case"], "masked", 4), c["us"]) for c in masked]
    return found


def work_of(case: str, kernel: str, queries: int) -> Work:
    """`decode 32 x 1088` of Llama 3 8B: 32 query heads, 8 key heads, 128 wide, bf16."""
    batch, keys = (int(word) for word in case.split() if word.isdecimal())
    num_bytes = 2 * batch * 128 * (2 * 8 * keys + 2 * 32)
    heads = 32 // queries
    shape = (batch, queries, keys, heads, 8, 128, 0)
    return Work(
        OpClass.DECODE, "bfloat16", 4.0 * batch * 32 * keys * 128, num_bytes, shape, ((kernel + SUFFIX, 1.0),)
    )


def fit(rows: Sequence[Timed], splits: bool) -> Stream:
    """The numbers that price these launches best."""
    spec = gpu(GPU)
    params = model_of(rows[0][0], spec).params
    measured = np.array([us for _, us in rows])

    def off(theta: Array) -> Array:
        us = [streamed_us(_stream(theta, splits), work, spec, params, True) for work, _ in rows]
        return np.concatenate([np.log(np.array(us) / measured), PRIOR * (theta - START)])

    starts = (START + np.array([0, 0, 0, 0, wave]) for wave in (0.0, 1.5, 2.5))
    found = min((least_squares(off, x, loss="soft_l1", f_scale=0.1) for x in starts), key=lambda f: f.cost)
    return _stream(found.x, splits, digits=4)


def _stream(theta: Array, splits: bool, digits: int = 15) -> Stream:
    floor, reach, tail, chain, wave = (float(f"{x:.{digits}g}") for x in np.exp(theta))
    return Stream(floor, reach, tail, chain, wave, splits)


def errors(rows: Sequence[Timed], splits: bool) -> Iterator[float]:
    """Error of each launch, by a fit to the others."""
    spec = gpu(GPU)
    for i, (work, us) in enumerate(rows):
        others = fit([*rows[:i], *rows[i + 1 :]], splits)
        yield abs(streamed_us(others, work, spec, model_of(work, spec).params, True) / us - 1)


def main() -> None:
    """Reads, fits, writes."""
    parser = argparse.ArgumentParser(description="Fit attention of a few queries to timed launches.")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--out", type=Path, default=Path("src/tessera/profile/corrections.json"))
    options = parser.parse_args()
    kernels = {}
    for kernel, rows in timed(options.results).items():
        splits = kernel in SPLIT
        error = max(LEAST_ERROR, round(float(np.mean(list(errors(rows, splits)))), 4))
        kernels[kernel] = replace(fit(rows, splits), rel_error=error, num_rows=len(rows))
        print(kernel, kernels[kernel])
    save(replace(load(options.out), kernels=kernels), options.out)


if __name__ == "__main__":
    main()
