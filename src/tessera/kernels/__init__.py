"""Operators of the project's own, and the kernels behind them. Imports torch alone.

`paged` registers tessera::paged_attention with torch: whoever calls it, or runs a trace that has it, imports
that module first.
"""

# Positions of one page of keys and values.
PAGE = 16
