"""Operators of the project and their kernels; accesses (`ptx`) and launch (`launch`) of PTX kernels.

Import the module of an operator (`MODULES`) before running a trace that has it.
"""

from collections.abc import Sequence

MODULES = {
    "paged_attention": "tessera.kernels.paged",
    "choose": "tessera.kernels.choose",
    "packed_linear": "tessera.kernels.packing",
    "packed_grouped": "tessera.kernels.packing",
    "packed_part": "tessera.kernels.packing",
    "lora": "tessera.kernels.lora",
    "grouped_part": "tessera.kernels.grouped",
    "grouped_join": "tessera.kernels.grouped",
    "causal_conv": "tessera.kernels.recurrent",
    "ssd_scan": "tessera.kernels.recurrent",
    "selective_scan": "tessera.kernels.recurrent",
    "delta_scan": "tessera.kernels.recurrent",
}
# Part of a mixture -> index of its offsets; the first expert and the share follow.
PARTS = {"tessera.grouped_part.default": 2, "tessera.packed_part.default": 4}

# Positions per page.
PAGE = 16
# Most page tables where there are two windows.
MAX_GROUPS = 8
NORM_EPSILON = 1e-6
# State that is not in pages: the tokens chosen last, and, by prefix, what is kept by row.
NEWEST = "newest"
BY_ROW = "row "


def of_group(name: str, group: int) -> str:
    return f"{name}_{group}" if group else name


def max_pages(tokens: int, windows: Sequence[int], step: int) -> int:
    return sum(-(-(min(tokens, window + step + PAGE) if window else tokens) // PAGE) for window in windows)


def is_paged(state: str) -> bool:
    return state != NEWEST and not state.startswith(BY_ROW)
