"""Operators of the project and their kernels; accesses of PTX kernels (`ptx`) and their launch (`launch`).

`paged` registers tessera::paged_attention with torch; import it before running a trace that has it.
"""

# Positions per page of keys and values.
PAGE = 16
# State of a microbatch that is not in pages: the tokens its last step chose.
NEWEST = "newest"
