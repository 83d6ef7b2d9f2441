"""Launches a kernel on the CPU.

    result = run(text, "axpy", grid=4, block=128, args=[y, x, np.float32(2), 500])
    result.arrays[0]               what y holds afterwards; the argument itself is not changed
    result.touched(1).read         which bytes of x were read, as a mask

An argument is an array (passed as its address), a number (as wide as the parameter), or

    Offset(array, 64)                    the address of byte 64 of the array
    Packed({0: y, 8: x, 16: 500}, 24)    a struct by value: what lies at which byte
    ByPointer(Packed(...))               a buffer that holds addresses of other buffers

An array given twice is one buffer. Module variables are buffers by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tessera_ptx.errors import BadLaunch
from tessera_ptx.interp import rules
from tessera_ptx.interp.decode import decode
from tessera_ptx.interp.engine import Interpreter, describe, make_frame
from tessera_ptx.interp.memory import FRAMES, Arena, Strips, SymbolLayout, as_bytes, place_symbols
from tessera_ptx.interp.state import DecodedFunction, InterpState
from tessera_ptx.interp.types import Array
from tessera_ptx.parser import parse
from tessera_ptx.syntax import Function, Module

Dim3 = int | tuple[int, ...]
WARP = 32


@dataclass(frozen=True, slots=True)
class Geometry:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int  # blocks, along x

    @staticmethod
    def of(grid: Dim3, block: Dim3, cluster: int) -> "Geometry":
        shapes = []
        for name, given in (("grid", grid), ("block", block)):
            dims = (given,) if isinstance(given, int) else tuple(given)
            if not 1 <= len(dims) <= 3 or min(dims) < 1:
                raise BadLaunch(f"{name} {given} is no launch shape")
            shapes.append((*dims, 1, 1)[:3])
        geometry = Geometry((*shapes[0],), (*shapes[1],), cluster)  # type: ignore[arg-type]
        if geometry.size > 1024:
            raise BadLaunch(f"a block of {geometry.size} threads; at most 1024 are possible")
        if geometry.grid[0] % cluster:
            raise BadLaunch(f"a grid of {geometry.grid[0]} blocks is no multiple of clusters of {cluster}")
        return geometry

    @property
    def size(self) -> int:
        return int(np.prod(self.block))

    @property
    def threads(self) -> int:
        """Padded to full warps."""
        return -(-self.size // WARP) * WARP

    def batches(self, lanes_at_once: int) -> Iterator[range]:
        step = max(lanes_at_once // self.threads // self.cluster, 1) * self.cluster
        total = int(np.prod(self.grid))
        for first in range(0, total, step):
            yield range(first, min(first + step, total))

    def lanes(self, blocks: range) -> int:
        return len(blocks) * self.threads

    def exists(self, blocks: range) -> Array:
        mask: Array = np.tile(np.arange(self.threads) < self.size, len(blocks))
        return mask

    def special(self, blocks: range, layout: SymbolLayout) -> dict[str, Array]:
        lanes = self.lanes(blocks)
        thread = np.tile(np.arange(self.threads), len(blocks))
        cta = np.repeat(np.arange(blocks.start, blocks.stop), self.threads)
        lane = thread % WARP
        found: dict[str, Array] = {}
        for axis, (index, size) in enumerate(((thread, self.block), (cta, self.grid))):
            names = ("%tid", "%ntid") if axis == 0 else ("%ctaid", "%nctaid")
            parts = index % size[0], index // size[0] % size[1], index // (size[0] * size[1])
            for letter, part, extent in zip("xyz", parts, size, strict=True):
                found[f"{names[0]}.{letter}"] = part
                found[f"{names[1]}.{letter}"] = np.full(lanes, extent)
        one = np.uint64(1)
        bit = one << lane.astype(np.uint64)
        found |= {
            "%laneid": lane, "%warpid": thread // WARP, "%nwarpid": np.full(lanes, self.threads // WARP),
            "%lanemask_eq": bit, "%lanemask_lt": bit - one, "%lanemask_le": 2 * bit - one,
            "%lanemask_gt": ~(2 * bit - one), "%lanemask_ge": ~(bit - one),
            "%smid": np.zeros(lanes), "%nsmid": np.ones(lanes), "%gridid": np.zeros(lanes),
            "%dynamic_smem_size": np.full(lanes, layout.dynamic_bytes),
            "%total_smem_size": np.full(lanes, layout.shared_bytes),
        }  # fmt: skip
        found |= self._cluster(found["%ctaid.x"])
        return {
            name: (value.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32) for name, value in found.items()
        }

    def _cluster(self, block_x: Array) -> dict[str, Array]:
        rank, every = block_x % self.cluster, np.ones_like(block_x)
        found = {
            "%cluster_ctarank": rank, "%cluster_nctarank": every * self.cluster, "%cluster_ctaid.x": rank,
            "%cluster_nctaid.x": every * self.cluster, "%clusterid.x": block_x // self.cluster,
            "%nclusterid.x": every * (self.grid[0] // self.cluster),
            "%is_explicit_cluster": every * (self.cluster > 1),
        }  # fmt: skip
        for letter in "yz":
            found |= {f"%cluster_ctaid.{letter}": every * 0, f"%cluster_nctaid.{letter}": every}
        return found


_RULES = rules
DYNAMIC_SHARED = 96 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Offset:
    array: Array
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Numbers must be NumPy scalars, which define the width."""

    fields: Mapping[int, Any]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class ByPointer:
    content: Packed


def tensor_map(array: Array, box: tuple[int, ...], swizzle: int = 0) -> Packed:
    """CUtensorMap argument: `box` in the array's axis order, swizzle 0 to 3."""
    element = {"f2": 6, "f4": 7, "f8": 9, "u1": 0, "u2": 1, "u4": 2, "i4": 3, "u8": 4, "i8": 5}[
        f"{array.dtype.kind}{array.itemsize}"
    ]
    fields: dict[int, Any] = {0: array, 104: np.uint32(array.ndim - 1), 108: np.uint32(element)}
    fields[116] = np.uint32(swizzle)
    for axis in range(array.ndim):
        inner = array.ndim - 1 - axis
        fields[8 + 4 * axis] = np.uint32(array.shape[inner])
        fields[64 + 4 * axis] = np.uint32(box[inner])
        fields[84 + 4 * axis] = np.uint32(1)
        if axis:
            fields[24 + 8 * axis] = np.uint64(array.strides[inner])
    return Packed(fields, 128)


@dataclass(frozen=True, slots=True)
class Touched:
    read: Array
    write: Array
    atomic: Array

    def any(self) -> tuple[bool, bool, bool]:
        return bool(self.read.any()), bool(self.write.any()), bool(self.atomic.any())


@dataclass(frozen=True, slots=True)
class Result:
    # By argument; numbers unchanged. Struct fields are in `buffers`.
    arrays: tuple[Any, ...]
    # "1+8": the pointer at byte 8 of argument 1; "0->8": the pointer at byte 8 of the buffer of argument 0;
    # ":gbuf": a module variable.
    buffers: Mapping[str, Array]
    masks: Mapping[str, Touched]
    # (argument, byte offset) -> (buffer, byte offset).
    pointers: Mapping[tuple[int, int], tuple[str, int]]
    homes: tuple[tuple[Array, str], ...]

    def touched(self, argument: int, offset: int = 0) -> Touched:
        return self.masks[self.pointers[argument, offset][0]]


def run(
    program: Module | str,
    entry: str,
    grid: Dim3,
    block: Dim3,
    args: Sequence[Any],
    *,
    shared_bytes: int | None = None,
    cluster: int = 1,
    lanes_at_once: int = 1 << 14,
    max_steps: int = 50_000_000,
    file: str = "<ptx>",
) -> Result:
    """Raises InterpreterFault for undefined or unknown behaviour."""
    module = _parsed(program, file) if isinstance(program, str) else program
    function = _entry(module, entry)
    geometry = Geometry.of(grid, block, cluster)
    bound = Binding(module, function, args)
    codes = _decoded(module)
    layout = place_symbols(module, bound.arena, DYNAMIC_SHARED if shared_bytes is None else shared_bytes)
    bound.arena.seal()
    layout.initialise(bound.arena)
    for blocks in geometry.batches(lanes_at_once):
        machine = _machine(module, geometry, blocks, bound, layout, codes)
        Interpreter(machine, max_steps).run(make_frame_of_entry(machine, codes[entry], function))
    return bound.result()


@lru_cache(maxsize=64)
def _parsed(text: str, file: str) -> Module:
    return parse(text, file)


_CODES: dict[int, tuple[Module, dict[str, DecodedFunction]]] = {}


def _decoded(module: Module) -> dict[str, DecodedFunction]:
    known = _CODES.get(id(module))
    if known is None or known[0] is not module:
        if len(_CODES) > 64:
            _CODES.clear()
        codes = {f.name: decode(f, module.file, describe) for f in module.functions if f.defined}
        codes |= {alias: codes[real] for alias, real in module.aliases.items() if real in codes}
        known = _CODES[id(module)] = module, codes
    return known[1]


def _entry(module: Module, name: str) -> Function:
    for function in module.entries:
        if function.name == name:
            return function
    known = ", ".join(f.name for f in module.entries)
    raise BadLaunch(f"no kernel '{name}'; the module has: {known}", place=module.file)


def make_frame_of_entry(machine: InterpState, code: DecodedFunction, function: Function) -> Any:
    frame = make_frame(machine, code, None, -1)
    frame.places.update(function.param_offsets)
    return frame


def _machine(
    module: Module,
    geometry: Geometry,
    blocks: range,
    bound: "Binding",
    layout: SymbolLayout,
    codes: dict[str, DecodedFunction],
) -> InterpState:
    lanes = geometry.lanes(blocks)
    machine = InterpState(
        module.file, bound.arena, Strips("shared", len(blocks), layout.shared_bytes),
        Strips("local", lanes, 16, FRAMES), bound.params, lanes, geometry.threads, geometry.exists(blocks),
        geometry.special(blocks, layout), layout.symbols, layout.spaces, layout.functions, codes,
        np.repeat(np.arange(len(blocks)), geometry.threads), cluster=geometry.cluster,
    )  # fmt: skip
    return machine


class Binding:
    def __init__(self, module: Module, function: Function, args: Sequence[Any]) -> None:
        if len(args) > len(function.params):
            message = (
                f"'{function.name}' has {len(function.params)} parameters, {len(args)} arguments are given"
            )
            raise BadLaunch(message, place=module.file)
        self.arena, self.args = Arena(), args
        self.homes: dict[int, tuple[str, int, Array]] = {}  # by id of the array
        self.pointers: dict[tuple[int, int], tuple[str, int]] = {}
        total = max((function.param_offsets[p.name] + p.size for p in function.params), default=0)
        self.params = np.zeros(-(-max(total, 1) // 16) * 16, np.uint8)
        for number, (param, arg) in enumerate(zip(function.params, args, strict=False)):
            at = function.param_offsets[param.name]
            content = self._value(str(number), number, 0, arg, param.size, param.type)
            if content.size > param.size:
                raise BadLaunch(
                    f"argument {number} has {content.size} bytes, the parameter {param.size}",
                    place=module.file,
                )
            self.params[at : at + content.size] = content

    def _value(self, name: str, number: int, offset: int, arg: Any, size: int, kind: str) -> Array:
        if isinstance(arg, Packed):
            return self._packed(name, number, arg)
        if isinstance(arg, ByPointer):
            index = len(self.arena.regions)
            address = self.arena.add(name, np.zeros(arg.content.size, np.uint8))
            self.pointers[number, offset] = name, 0
            self.arena.fill(index, self._packed(f"{name}->", -1, arg.content))
            return as_bytes(np.uint64(address))
        extra = 0
        if isinstance(arg, Offset):
            arg, extra = arg.array, arg.offset
        if isinstance(arg, np.ndarray):
            if id(arg) not in self.homes:
                self.homes[id(arg)] = name, self.arena.add(name, as_bytes(arg)), arg
            home, address, _ = self.homes[id(arg)]
            self.pointers[number, offset] = home, extra
            return as_bytes(np.uint64(address + extra))
        return _scalar(arg, size, kind)

    def _packed(self, name: str, number: int, arg: Packed) -> Array:
        out = np.zeros(arg.size, np.uint8)
        for at, value in arg.fields.items():
            inner = f"{name}{at}" if name.endswith("->") else f"{name}+{at}"
            content = self._value(inner, number, at, value, 0, "")
            out[at : at + content.size] = content
        return out

    def result(self) -> Result:
        shapes = {name: array for name, _, array in self.homes.values()}
        buffers: dict[str, Array] = {}
        masks: dict[str, Touched] = {}
        for region in self.arena.regions:
            cut = slice(region.start, region.start + region.size)
            raw = self.arena.data[cut].copy()
            like = shapes.get(region.name)
            buffers[region.name] = raw if like is None else raw.view(like.dtype).reshape(like.shape)
            masks[region.name] = Touched(*(self.arena.marks[kind][cut].astype(bool) for kind in "rwa"))
        homes = tuple((array, name) for name, _, array in self.homes.values())
        return Result(tuple(self._arrays(buffers)), buffers, masks, self.pointers, homes)

    def _arrays(self, buffers: Mapping[str, Array]) -> Iterator[Any]:
        for number, arg in enumerate(self.args):
            home = self.pointers.get((number, 0))
            yield buffers[home[0]] if home is not None and not isinstance(arg, Packed) else arg


def _scalar(value: Any, size: int, kind: str) -> Array:
    """NumPy scalars keep their bytes."""
    if isinstance(value, np.generic):
        return as_bytes(value)
    if isinstance(value, float) or kind.startswith("f"):
        return as_bytes(np.array([value], f"f{size}"))
    return as_bytes(np.array([int(value) & ((1 << 8 * size) - 1)], f"u{size}"))
