"""Synthetic tensors for one launch, from the recorded types and shapes.

Floats are normal, flags true and false, and integers keep the launch inside its memory:
  gathers and scatters   random indices below the least extent of the tensors they index
  grouped products       offsets that share the rows evenly among the groups
  PTX kernels            zeros, which are inside any tensor
  all others             small numbers above zero
Refused: operators whose integers are lengths, offsets or page tables in ways not listed here.
"""

import torch

from tessera.errors import CannotTime
from tessera.execute.launcher import generator_buffer
from tessera.execute.memory import Memory, Storage
from tessera.ir import Kernel, Launch, Origin, Trace, View

INDEXED = (
    "embedding", "index", "index_select", "index_add", "index_copy", "index_put", "index_fill", "gather",
    "scatter", "scatter_add", "scatter_reduce", "take", "take_along_dim", "_unsafe_index", "_index_put_impl",
    "_unsafe_index_put", "masked_scatter",
)  # fmt: skip
GROUPED = (
    "_grouped_mm",
    "_scaled_grouped_mm",
    "grouped_mm",
    "packed_grouped",
    "packed_part",
    "grouped_part",
    "grouped_join",
)
# Their integers are lengths, offsets or page tables.
LENGTHS = ("_flash_attention_forward", "_efficient_attention_forward", "_varlen", "embedding_bag",
           "paged_attention", "lora", "choose", "causal_conv", "ssd_scan", "selective_scan", "delta_scan",
           "repeat_interleave", "bincount", "segment_reduce")  # fmt: skip
SMALL = 8
BLOCK = 1 << 20


def synthetic(trace: Trace, index: int, device: torch.device) -> Memory:
    launch, kernel = trace.launches[index], trace.kernel_of(index)
    if generator_buffer(trace, launch) is not None:
        raise CannotTime(f"{kernel.name} draws random numbers from a state that cannot be synthesised")
    memory = Memory({})
    # Torch's default generator is unusable after a failed graph capture.
    chance = torch.Generator(device).manual_seed(index)
    filled: set[int] = set()
    for view in launch.arg_views:
        if view.buffer not in filled:
            filled.add(view.buffer)
            size = trace.buffers[view.buffer].size_bytes
            memory.put(view.buffer, _filled(kernel, launch, view, size, chance))
    return memory


def _filled(kernel: Kernel, launch: Launch, view: View, size_bytes: int, chance: torch.Generator) -> Storage:
    dtype = getattr(torch, view.dtype)
    flat = torch.empty(size_bytes, dtype=torch.uint8, device=chance.device)
    count = size_bytes // dtype.itemsize
    typed = flat[: count * dtype.itemsize].view(dtype)
    if dtype is torch.bool:
        typed.random_(0, 2, generator=chance)
    elif dtype.itemsize == 1 or dtype.is_floating_point or dtype.is_complex:
        if dtype.itemsize == 1:  # codes, or 8-bit floats, which have no generator
            typed.view(torch.uint8)[:BLOCK].random_(32, 48, generator=chance)
        else:
            typed[:BLOCK].normal_(generator=chance)
        for start in range(BLOCK, count, BLOCK):  # a generator is slow on a CPU
            typed[start : start + BLOCK] = typed[: min(BLOCK, count - start)]
    else:
        typed.copy_(_integers(kernel, launch, view, count, chance))
    return flat.untyped_storage()


def _integers(
    kernel: Kernel, launch: Launch, view: View, count: int, chance: torch.Generator
) -> torch.Tensor:
    device = chance.device
    if kernel.origin is not Origin.ATEN:
        return torch.zeros(count, dtype=torch.int64, device=device)
    base = kernel.name.split(".")[1].rstrip("_")
    if any(base.startswith(name) for name in LENGTHS):
        raise CannotTime(f"the integers of {kernel.name} are lengths or tables, which cannot be synthesised")
    if base in GROUPED:
        rows = next(v.shape[0] for v in launch.arg_views if v.buffer != view.buffer)
        # As many experts as rows that choose at random are expected to have, evenly.
        chosen = max(1, round(count * (1.0 - (1.0 - 1.0 / count) ** rows)))
        return torch.arange(1, count + 1, device=device) * chosen // count * rows // chosen
    if base in INDEXED:
        most = max(1, _least_extent(launch, view))
        return torch.randint(0, most, (count,), device=device, generator=chance)
    return torch.randint(1, SMALL, (count,), device=device, generator=chance)


def _least_extent(launch: Launch, index: View) -> int:
    """An index below this is valid in every other tensor along every dimension."""
    return min((n for v in launch.arg_views if v.buffer != index.buffer for n in v.shape), default=1)
