"""Mechanical checks of a table; each failed one is a sentence that says why the table is not used.

A few rows faster than the GPU could compute or read memory are left out; a table with many of them is refused
as a whole, since whatever made those wrong touched the others. So is one with few rows, one in which
attention does not grow with the square of the prompt, and one that differs from every other table of the same
chip. Not found: a table that is wrong by less than SAME_CHIP_FACTOR, or on which all stacks agree.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tessera.profile.counts import OpClass
from tessera.profile.gpus import Gpu
from tessera.profile.model import Array, Loads, Peaks
from tessera.profile.tables.read import Rows

MIN_ROWS = 300
# Clocks above the data sheet's and sizes that are not quite those timed, before a row is called impossible.
ALLOWANCE = 1.10
MAX_IMPOSSIBLE = 0.02
# Prompts from this length on are bound by the square; half way between linear and square is not square.
LONG_PROMPT = 4096
MIN_EXPONENT = 1.5
SAME_CHIP_FACTOR = 2.5
# Kernels shorter than this are mostly launch, and say little about a chip.
LONG_US = 30.0


def impossible(us: Array, loads: tuple[Loads, ...], peaks: Peaks) -> npt.NDArray[np.bool_]:
    """Rows faster than the data sheet allows, counting only bytes that cannot have come from the L2 cache."""
    compute = sum(x.flops for x in loads) / (peaks.tflops * 1e6)
    memory = sum(x.num_bytes * (x.hit < 0.01) for x in loads) / (peaks.gbps * 1e3)
    return np.asarray(us * ALLOWANCE < np.maximum(compute, memory), dtype=np.bool_)


def too_few(rows: Rows) -> str:
    """A table this small was cut short."""
    count = len(rows.us)
    return f"it has {count} rows, fewer than {MIN_ROWS}" if count < MIN_ROWS else ""


def too_fast(rows: Rows, wrong: npt.NDArray[np.bool_], spec: Gpu) -> str:
    """Many impossible rows spoil the others."""
    share = float(wrong.mean()) if wrong.size else 0.0
    if share <= MAX_IMPOSSIBLE:
        return ""
    return f"{share:.0%} of its rows are faster than a {spec.full_name} can compute or read memory"


def not_square(rows: Rows) -> str:
    """Prompt attention must grow with the square of the prompt."""
    if rows.file.op is not OpClass.PREFILL:
        return ""
    exponents = _exponents(rows)
    if len(exponents) < 5 or float(np.median(exponents)) >= MIN_EXPONENT:
        return ""
    grows = float(np.median(exponents))
    return f"its attention grows with the length to the power of {grows:.1f} where it must be about 2"


def _exponents(rows: Rows) -> list[float]:
    """Growth between neighbouring lengths of long prompts without a prefix, all else equal."""
    c = rows.columns
    long = np.flatnonzero((c["isl"] >= LONG_PROMPT) & (c["step"] == 0))
    curves: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for i in long:
        key = (c["batch_size"][i], c["num_heads"][i], c["num_key_value_heads"][i])
        curves.setdefault(key, []).append((float(c["isl"][i]), float(rows.us[i])))
    return [
        float(np.log(b_us / a_us) / np.log(b / a))
        for points in curves.values()
        for (a, a_us), (b, b_us) in pairwise(sorted(points))
        if b > a
    ]


def log_ratios(rows: Rows, other: Rows) -> Array:
    """log(time here / time there) of every long kernel that both tables hold."""
    here, there = _keys(rows), _keys(other)
    _, i, j = np.intersect1d(here, there, return_indices=True)
    long = np.minimum(rows.us[i], other.us[j]) >= LONG_US
    return np.asarray(np.log(rows.us[i][long] / other.us[j][long]), dtype=np.float64)


def _keys(rows: Rows) -> npt.NDArray[np.void]:
    stacked = np.ascontiguousarray(np.stack([rows.columns[c] for c in sorted(rows.columns)], axis=-1))
    return stacked.view([("", stacked.dtype)] * stacked.shape[1]).ravel()


def unlike_its_chip(ratios: Sequence[float], chip: str) -> str:
    """Off by a factor from each of at least two other tables of the chip, always the same way."""
    limit = float(np.log(SAME_CHIP_FACTOR))
    for sign, word in ((-1.0, "faster"), (1.0, "slower")):
        if len(ratios) >= 2 and all(sign * r > limit for r in ratios):
            factor = float(np.exp(min(abs(r) for r in ratios)))
            return f"it is {factor:.1f} times {word} than every other table of the {chip}"
    return ""
