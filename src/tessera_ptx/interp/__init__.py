"""A PTX interpreter on NumPy: the oracle of the static analysis, and the `cpu` device of PTX kernels."""

from tessera_ptx.errors import (
    BadLaunch,
    Deadlock,
    InterpreterFault,
    OutOfBounds,
    UnknownInstruction,
)
from tessera_ptx.interp.launch import ByPointer, Offset, Packed, Result, Touched, run, tensor_map

__all__ = [
    "BadLaunch",
    "ByPointer",
    "Deadlock",
    "InterpreterFault",
    "Offset",
    "OutOfBounds",
    "Packed",
    "Result",
    "Touched",
    "UnknownInstruction",
    "run",
    "tensor_map",
]
