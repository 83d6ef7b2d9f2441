"""Attention of a few queries: keys and values stream through blocks, one for each sequence and key head.

    us = floor * t0 + sqrt(M^2 + S^2) + tail * row_us * blocks
    M  = bytes / (bandwidth * em * reach)
    S  = keys of a block * max(chain, wave * ceil(blocks / SMs))

Each kernel has its own numbers: `chain` is how many cycles one block takes for a key when it is alone on its
SM, `wave` how many a key takes when blocks share one. Few blocks leave SMs idle: kernels that split the keys
then give every SM a part (`splits`), the others wait for the longest block. `floor`, `reach` and `tail` are
ratios to the GPU's own fitted t0, em and row_us of decode attention, which are of serving stacks' kernels; on
other chips than the one that was measured no kernel is taken to reach more than those rows do.

`streams.json` is made by scripts/fit_streams.py from launches timed on one GPU.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from tessera.profile.counts import OpClass, Work
from tessera.profile.gpus import Gpu, clock_ghz
from tessera.profile.model import Params

# How walks name the kernels that have numbers: "flash_stream".
SUFFIX = "_stream"
# A split has at least so many keys.
SPLIT_KEYS = 128
# Width of the heads that were timed; a key of wider ones takes longer.
FITTED_WIDTH = 128
# Of the data sheet's bandwidth; nothing streams faster.
MOST = 1.0


@dataclass(frozen=True, slots=True)
class Stream:
    """The numbers of one kernel."""

    floor: float
    reach: float
    tail: float
    # Cycles.
    chain: float
    wave: float
    splits: bool
    # Mean relative error on launches left out of the fit, one at a time.
    rel_error: float = 0.0
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """Every kernel's numbers, and whose launches they were fitted to."""

    gpu: str
    kernels: Mapping[str, Stream]


@cache
def fitted_streams() -> Streams:
    """Those that come with the package."""
    document = json.loads(files("tessera.profile").joinpath("streams.json").read_text(encoding="utf-8"))
    return Streams(document["gpu"], {name: Stream(**row) for name, row in document["kernels"].items()})


def stream_of(work: Work, streams: Streams) -> Stream | None:
    """The kernel's numbers, if this is attention of a few queries by a kernel that has some."""
    if work.op is not OpClass.DECODE or not work.shape or work.dtype not in ("bfloat16", "float16"):
        return None
    named = (term.removesuffix(SUFFIX) for term, _ in work.walk if term.endswith(SUFFIX))
    return next((streams.kernels[name] for name in named if name in streams.kernels), None)


def streamed_us(stream: Stream, work: Work, spec: Gpu, params: Params, is_same_chip: bool) -> float:
    """The time of one launch; `params` are the GPU's own of decode attention."""
    batch, _, num_keys, _, kv_heads, width = work.shape[:6]
    per_us, blocks = clock_ghz(spec) * 1e3, batch * kv_heads
    keys = num_keys * width / FITTED_WIDTH
    if stream.splits and blocks < spec.num_sms:
        # Every SM gets a part of some block's keys.
        parts = max(1, min(spec.num_sms // blocks, num_keys // SPLIT_KEYS))
        blocks, keys = blocks * parts, keys / parts
    reach = stream.reach if is_same_chip else min(1.0, stream.reach)
    memory = work.num_bytes / (spec.memory_gbps * min(MOST, params.em * reach) * 1e3)
    waves = math.ceil(blocks / spec.num_sms)
    serial = keys * max(stream.chain, stream.wave * waves) / per_us
    return stream.floor * params.t0_us + math.hypot(memory, serial) + stream.tail * params.row_us * blocks
