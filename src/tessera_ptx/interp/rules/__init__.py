"""Rules of all opcode families."""

from tessera_ptx.interp.rules import arith, atomic, bulk, matrix, memory, move, warp

__all__ = ["arith", "atomic", "bulk", "matrix", "memory", "move", "warp"]
