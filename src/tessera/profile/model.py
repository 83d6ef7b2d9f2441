"""The cost model: microseconds from the work of a launch and the parameters of one GPU and class.

    us = t0 + (C^p + M^p)^(1/p)
    C  = operations / (peak * ec) + groups * row_us
    M  = bytes / (bandwidth * em) * (1 - hit + hit / l2x)

t0 is the shortest time of the class, ec and em the shares of the data sheet's peaks that long kernels reach,
p how well computing and loading overlap.

GEMMs compute in waves: the result is cut into tiles, one an SM at a time, and the last wave takes as long as
a full one, so the operations are those of whole waves. The model takes the best of a few tilings and of
splits of k; `tile` is what small tiles cost more an operation, `split_us` what each halving of k adds. With
tile = 0 the operations are taken as they are.

Decode attention pays `row_us` for every sequence and head of the keys. What the L2 cache holds is read `l2x`
times faster. `hit` is the share it holds: of a table's kernels, which ran alone and over and over, what fits
the cache; of a launch inside a step 0, since a whole model runs between two readings of the same bytes. Not
modelled: clocks that sink under load, results that one launch leaves in the cache for the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.profile.counts import OpClass, Work

Array = npt.NDArray[np.float64]

# Rows and columns of the result that one SM computes at a time, and into how many parts k may be split.
TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64))
SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Params:
    """The numbers of the model; the last four only where a class has such an effect."""

    t0_us: float
    ec: float
    em: float
    p: float
    tile: float = 0.0
    split_us: float = 0.0
    row_us: float = 0.0
    l2x: float = 1.0


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the data sheet says about one GPU in one dtype."""

    tflops: float
    gbps: float
    num_sms: int


@dataclass(frozen=True, slots=True)
class Loads:
    """The work of many launches of one class, as columns."""

    flops: Array
    num_bytes: Array
    # GEMM: batch, m, n, k, all 0 where the shape is not known. Shape (4, launches).
    gemm: Array
    # Decode attention: sequences times heads of the keys, else 0.
    rows: Array
    # Share of the bytes that the L2 cache holds.
    hit: Array

    def keep(self, mask: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "Loads":
        """The launches that the mask names."""
        columns = (
            self.flops[mask],
            self.num_bytes[mask],
            self.gemm[:, mask],
            self.rows[mask],
            self.hit[mask],
        )
        return Loads(*columns)


def plain_loads(flops: Array, num_bytes: Array) -> Loads:
    """Launches of which only operations and bytes are known, from memory."""
    zeros = np.zeros_like(num_bytes)
    return Loads(flops, num_bytes, np.zeros((4, len(zeros))), zeros, zeros)


def loads_of(works: Sequence[Work]) -> Loads:
    """The columns of launches inside a step."""
    flops = np.array([w.flops for w in works], dtype=np.float64)
    num_bytes = np.array([w.num_bytes for w in works], dtype=np.float64)
    gemm = np.array([_gemm_shape(w) for w in works], dtype=np.float64).reshape(-1, 4).T
    rows = [w.shape[0] * w.shape[4] if w.op is OpClass.DECODE and w.shape else 0 for w in works]
    return Loads(flops, num_bytes, gemm, np.array(rows, dtype=np.float64), np.zeros(len(works)))


def _gemm_shape(work: Work) -> tuple[float, ...]:
    if work.op is OpClass.GEMM and work.shape:
        return work.shape
    if work.op is OpClass.GROUPED and work.shape:
        groups, rows, n, k = work.shape
        visited = max(1, min(groups, rows))
        # Rows are taken to spread evenly: who goes where is data.
        return (visited, -(-rows // visited), n, k)
    return (0, 0, 0, 0)


def predict(params: Params, loads: Loads, peaks: Peaks) -> Array:
    """The time of every launch, in microseconds."""
    compute = _compute_us(params, loads, peaks) + params.row_us * loads.rows
    cached = 1.0 - loads.hit * (1.0 - 1.0 / params.l2x)
    memory = loads.num_bytes / (peaks.gbps * params.em * 1e3) * cached
    # Scaled by the longer of the two, so that no power overflows.
    longer = np.maximum(np.maximum(compute, memory), 1e-12)
    joined = (compute / longer) ** params.p + (memory / longer) ** params.p
    return np.asarray(params.t0_us + longer * joined ** (1.0 / params.p), dtype=np.float64)


def _compute_us(params: Params, loads: Loads, peaks: Peaks) -> Array:
    per_us = peaks.tflops * params.ec * 1e6
    plain = np.asarray(loads.flops / per_us, dtype=np.float64)
    shaped = loads.gemm[0] > 0
    if params.tile <= 0.0 or not shaped.any():
        return plain
    batch, m, n, k = loads.gemm[:, shaped]
    best = np.full(batch.shape, np.inf)
    for rows, columns in TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
        dearer = 1.0 + params.tile * (128 / rows + 128 / columns - 1.5)
        for split in SPLITS:
            in_waves = np.ceil(tiles * split / peaks.num_sms) * peaks.num_sms
            us = in_waves * (2.0 * rows * columns) * (k / split) * dearer / per_us
            np.minimum(best, us + params.split_us * np.log2(split), out=best)
    plain[shaped] = np.maximum(best, plain[shaped])
    return plain
