"""Operators of the project and their kernels; accesses of PTX kernels (`ptx`) and their launch (`launch`).

`paged`, `choose`, `packed` and `lora` register operators with torch; import the module of an operator
(`MODULES`) before running a trace that has it.
"""

# Operator -> module that registers it.
MODULES = {
    "paged_attention": "tessera.kernels.paged",
    "choose": "tessera.kernels.choose",
    "packed_linear": "tessera.kernels.packed",
    "packed_grouped": "tessera.kernels.packed",
    "lora": "tessera.kernels.lora",
}

# Positions per page of keys and values.
PAGE = 16
# State of a microbatch that is not in pages: the tokens its last step chose, and, by the start of its name,
# what is kept by row.
NEWEST = "newest"
BY_ROW = "row "


def is_paged(state: str) -> bool:
    """True if the state of this name is in pages."""
    return state != NEWEST and not state.startswith(BY_ROW)
