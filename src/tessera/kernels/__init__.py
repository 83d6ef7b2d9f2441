"""Operators of the project and their kernels; accesses of PTX kernels (`ptx`) and their launch (`launch`).

`paged` and `choose` register tessera::paged_attention and tessera::choose with torch; import the module of an
operator (`MODULES`) before running a trace that has it.
"""

# Operator -> module that registers it.
MODULES = {"paged_attention": "tessera.kernels.paged", "choose": "tessera.kernels.choose"}

# Positions per page of keys and values.
PAGE = 16
# State of a microbatch that is not in pages: the tokens its last step chose.
NEWEST = "newest"
