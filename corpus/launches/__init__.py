"""Launches of corpus kernels: random sizes and contents, and what must come out, computed with NumPy.

    @launch("cuda", "basics", "axpy")
    def _(rng): return Launch(grid, block, args, {0: expected})

A maker draws its sizes from the generator, so one maker stands for many launches. `expect` maps an
argument's number (or the name of a buffer, as the interpreter names it) to its content afterwards; floats
are compared within `tolerance`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch and what it must do."""

    grid: Any
    block: Any
    args: list[Any]
    expect: Mapping[int | str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    shared_bytes: int | None = None
    cluster: int = 1


Maker = Callable[[np.random.Generator], Launch]
LAUNCH_FILES = ("basic", "traps", "calls", "flow", "hand", "triton", "triton_memory", "serving")
MAKERS: dict[tuple[str, str, str], Maker] = {}


def launch(part: str, theme: str, *kernels: str) -> Callable[[Maker], Maker]:
    """Register a maker for kernels of one theme."""

    def register(maker: Maker) -> Maker:
        for kernel in kernels:
            if (part, theme, kernel) in MAKERS:
                raise ValueError(f"two makers for {kernel}")
            MAKERS[part, theme, kernel] = maker
        return maker

    return register


def maker_of(row: Mapping[str, Any]) -> Maker | None:
    """The maker of a row of truth; one for the row's architecture (`name@sm_90`) goes first."""
    makers = all_makers()
    key = row["part"], row["theme"], row["kernel"]
    return makers.get((*key[:2], f"{key[2]}@{row['arch']}"), makers.get(key))


def all_makers() -> dict[tuple[str, str, str], Maker]:
    """Every maker by (part, theme, kernel)."""
    for name in LAUNCH_FILES:
        importlib.import_module(f"launches.{name}")
    return MAKERS


def singles(rng: np.random.Generator, *shape: int) -> Array:
    """Normal random singles."""
    return rng.standard_normal(shape).astype(np.float32)


def to_bf16(value: Array) -> Array:
    """Singles as bf16 bits, to nearest even."""
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """bf16 bits as singles."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def softmax(x: Array) -> Array:
    """Along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def pick(rng: np.random.Generator, *values: int) -> int:
    """One of the values."""
    return int(rng.choice(values))


def shape_1d(rng: np.random.Generator) -> tuple[int, int, int]:
    """Blocks, threads, and a number of elements that usually ends inside a block."""
    grid, block = int(rng.integers(1, 5)), pick(rng, 32, 64, 100, 128)
    return grid, block, int(rng.integers(1, grid * block + 1))
