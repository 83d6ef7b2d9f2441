"""Operators of the project and their kernels; accesses of PTX kernels (`ptx`) and their launch (`launch`).

`paged`, `choose`, `packed`, `grouped`, `lora` and `recurrent` register operators with torch; import the
module of an operator (`MODULES`) before running a trace that has it.
"""

from collections.abc import Sequence

# Operator -> module that registers it.
MODULES = {
    "paged_attention": "tessera.kernels.paged",
    "choose": "tessera.kernels.choose",
    "packed_linear": "tessera.kernels.packed",
    "packed_grouped": "tessera.kernels.packed",
    "packed_part": "tessera.kernels.packed",
    "lora": "tessera.kernels.lora",
    "grouped_part": "tessera.kernels.grouped",
    "grouped_join": "tessera.kernels.grouped",
    "causal_conv": "tessera.kernels.recurrent",
    "ssd_scan": "tessera.kernels.recurrent",
    "selective_scan": "tessera.kernels.recurrent",
    "delta_scan": "tessera.kernels.recurrent",
}
# Part of a mixture of experts -> place of its offsets, before its first expert and its share.
PARTS = {"tessera.grouped_part.default": 2, "tessera.packed_part.default": 4}

# Positions per page of keys and values.
PAGE = 16
# Groups of layers with page tables of their own, at most where there are two windows.
MAX_GROUPS = 8
# Added to the square sum of a vector before the root of its length (`recurrent`).
NORM_EPSILON = 1e-6
# State of a microbatch that is not in pages: the tokens its last step chose, and, by the start of its name,
# what is kept by row.
NEWEST = "newest"
BY_ROW = "row "


def of_group(name: str, group: int) -> str:
    """Name of a step's input for one group of layers."""
    return f"{name}_{group}" if group else name


def max_pages(tokens: int, windows: Sequence[int], step: int) -> int:
    """Most pages of a sequence of so many tokens, read in steps of at most `step`, by windows of groups."""
    return sum(-(-(min(tokens, window + step + PAGE) if window else tokens) // PAGE) for window in windows)


def is_paged(state: str) -> bool:
    """True if the state of this name is in pages."""
    return state != NEWEST and not state.startswith(BY_ROW)
