"""PTX interpreter on NumPy: checks the static analysis, and runs PTX kernels on `cpu`."""

from tessera_ptx.errors import BadLaunch, Deadlock, InterpreterFault, OutOfBounds, UnknownInstruction
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
