"""What each instruction does: a rule for every family of opcodes, in the table of `decode`."""

from tessera_ptx.interp.rules import arith, atomic, bulk, matrix, memory, move, warp

__all__ = ["arith", "atomic", "bulk", "matrix", "memory", "move", "warp"]
