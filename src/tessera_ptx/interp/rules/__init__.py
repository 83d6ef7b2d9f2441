"""Rules of all opcode families, in the table of `decode`."""

from tessera_ptx.interp.rules import arith, atomic, bulk, matrix, memory, move, warp

__all__ = ["arith", "atomic", "bulk", "matrix", "memory", "move", "warp"]
