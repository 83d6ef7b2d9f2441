"""Operators of the project and their kernels; accesses (`ptx`) and launch (`launch`) of PTX kernels.

Import the module of an operator (`MODULES`) before running a trace that has it.
"""

from collections.abc import Sequence

_OPERATORS = {
    "paged": ("paged_attention",),
    "choose": ("choose",),
    "packing": ("packed_linear", "packed_grouped", "packed_part"),
    "lora": ("lora",),
    "grouped": ("grouped_part", "grouped_join"),
    "recurrent": ("causal_conv", "ssd_scan", "selective_scan", "delta_scan"),
}
MODULES = {name: f"tessera.kernels.{module}" for module, names in _OPERATORS.items() for name in names}
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
