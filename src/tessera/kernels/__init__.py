"""Operators of the project and their kernels; accesses of PTX kernels (`ptx`) and their launch (`launch`).

`paged` registers tessera::paged_attention with torch: whoever calls it, or runs a trace that has it, imports
that module first.
"""

# Positions of one page of keys and values.
PAGE = 16
