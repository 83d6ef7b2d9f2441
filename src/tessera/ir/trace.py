"""Recorded program: one step of a workload as launches in program order.

Views are arguments, not launches. Buffers are logical storages: reused memory is two buffers.

A region is a strided set of bytes of one buffer: `item_bytes` bytes at `start + sum(i_d * stride_d)` for
every index tuple. Ranges are half-open. Beyond MAX_STEPS comparisons regions count as overlapping.
"""

import copyreg
import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

MAX_STEPS = 20_000
# Prefix of a random generator's state ("rng:cpu"). A launch that draws reads and writes all of it.
GENERATOR = "rng:"
ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "uint64": 8,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip

# (count, stride in bytes) per dimension, largest stride first.
Dims = tuple[tuple[int, int], ...]


class Origin(StrEnum):
    """Origin of a kernel's code; decides how accesses are proved."""

    ATEN = "aten"  # library operator, proved from its schema
    TRITON = "triton"  # proved from PTX, rebuilt from source per device
    PTX = "ptx"  # proved from PTX, loaded by the driver


@dataclass(frozen=True, slots=True)
class Kernel:
    """An ATen overload or a PTX entry."""

    name: str
    origin: Origin
    # With alias annotations; empty for PTX.
    schema: str = ""
    # Empty for operators.
    ptx: str = ""
    # Triton source, for other architectures.
    source: str = ""
    # (name, type) of every argument. "constexpr" arguments are compiled in; the others are launch arguments,
    # in order.
    signature: tuple[tuple[str, str], ...] = ()
    constants: tuple[tuple[str, bool | int | float | str | None], ...] = ()
    num_warps: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    start: int
    item_bytes: int
    # (count, stride in bytes), outermost first, in the normal form of `region`: counts above 1, positive
    # strides, no mergeable dimensions.
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def stop(self) -> int:
        stop = self.start + self.item_bytes
        for n, stride in self.dims:
            stop += (n - 1) * stride
        return stop

    @property
    def num_bytes(self) -> int:
        size = self.item_bytes
        for n, _ in self.dims:
            size *= n
        return size

    @property
    def is_dense(self) -> bool:
        return not self.dims

    def overlaps(self, other: "Region") -> bool:
        """False only if the regions provably share no byte."""
        if self.stop <= other.start or other.stop <= self.start:
            return False
        if not self.dims and not other.dims:
            return True
        return _meet(self.start, self.dims, self.item_bytes, other.start, other.dims, other.item_bytes)

    def covers(self, other: "Region") -> bool:
        """True only if every byte of `other` is in this region."""
        if not self.dims:
            return self.start <= other.start and other.stop <= self.stop
        return self == other or _contains(self, other)


def region(start: int, item_bytes: int, dims: tuple[tuple[int, int], ...]) -> Region | None:
    """Normal form of a strided set of (count, byte stride), or None if empty."""
    if any(n == 0 for n, _ in dims) or item_bytes == 0:
        return None
    for n, stride in dims:  # a negative stride touches the same bytes
        start += (n - 1) * stride if stride < 0 else 0
    live = sorted(((n, abs(s)) for n, s in dims if n > 1 and s != 0), key=lambda d: (d[1], d[0]))
    merged: list[tuple[int, int]] = []
    for n, stride in live:
        if not merged and stride <= item_bytes:
            item_bytes += (n - 1) * stride
        elif merged and stride % merged[-1][1] == 0 and stride // merged[-1][1] <= merged[-1][0]:
            count, inner = merged[-1]
            merged[-1] = (count + (n - 1) * (stride // inner), inner)
        else:
            merged.append((n, stride))
    return Region(start, item_bytes, tuple(reversed(merged)))


def _extent(dims: Dims, item_bytes: int) -> int:
    return sum((n - 1) * stride for n, stride in dims) + item_bytes


def _meet(a: int, a_dims: Dims, a_item: int, b: int, b_dims: Dims, b_item: int) -> bool:
    """False only if the strided sets at `a` and `b` provably share no byte.

    Rows of the largest stride S are (j - i) * S apart; only distances at which intervals meet are compared.
    """
    todo = [(a, a_dims, b, b_dims)]
    for _ in range(MAX_STEPS):
        if not todo:
            return False
        a, a_dims, b, b_dims = todo.pop()
        if not a_dims and not b_dims:
            if a < b + b_item and b < a + a_item:
                return True
            continue
        stride = max(dims[0][1] for dims in (a_dims, b_dims) if dims)
        a_count, a_rest = _rows(a_dims, stride)
        b_count, b_rest = _rows(b_dims, stride)
        a_size, b_size = _extent(a_rest, a_item), _extent(b_rest, b_item)
        # a < b + d * stride + b_size and b + d * stride < a + a_size
        first = max(1 - a_count, (a - b - b_size) // stride + 1)
        last = min(b_count - 1, -((b - a - a_size) // stride) - 1)
        # The middle one of three rows that meet a dense set lies inside it, unless rows overlap.
        is_inside = (not b_dims and a_size <= stride) or (not a_dims and b_size <= stride)
        if last - first > (1 if is_inside else MAX_STEPS):
            return True
        todo += [(a, a_rest, b + d * stride, b_rest) for d in range(first, last + 1)]
    return True


def _rows(dims: Dims, stride: int) -> tuple[int, Dims]:
    return (dims[0][0], dims[1:]) if dims and dims[0][1] == stride else (1, dims)


def _contains(outer: Region, inner: Region) -> bool:
    (num_rows, stride), rest = outer.dims[0], outer.dims[1:]
    count, step, inner_rest = 1, stride, inner.dims
    if inner.dims and inner.dims[0][1] % stride == 0:
        (count, step), inner_rest = inner.dims[0], inner.dims[1:]
    row = (inner.start - outer.start) // stride
    if row < 0 or row + (count - 1) * (step // stride) >= num_rows:
        return False
    mine = Region(outer.start + row * stride, outer.item_bytes, rest)
    return mine.covers(Region(inner.start, inner.item_bytes, inner_rest))


@dataclass(frozen=True, slots=True)
class Access:
    buffer: int
    region: Region
    read: bool = False
    write: bool = False
    atomic: bool = False


class BufferKind(StrEnum):
    WEIGHT = "weight"  # model, read only
    INPUT = "input"  # request, new for each step
    STATE = "state"  # request, mutated and kept for the next step
    OUTPUT = "output"  # returned by the step
    TEMPORARY = "temporary"  # dead at the end of the step


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    kind: BufferKind
    size_bytes: int
    # Contents of a small constant.
    constant_hex: str = ""

    @property
    def is_generator(self) -> bool:
        return self.kind is BufferKind.STATE and self.name.startswith(GENERATOR)


def item_bytes(dtype: str) -> int:
    return ITEM_BYTES.get(dtype, 1)


def _unset() -> msgspec.UnsetType:
    return msgspec.UNSET


# Pickle looks for its name in every imported module; some import others for that.
copyreg.pickle(msgspec.UnsetType, lambda value: (_unset, ()))


class View(msgspec.Struct, frozen=True, tag=True):
    """A tensor over one buffer. Strides and offset count elements."""

    buffer: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    # "conj", "neg": values are conjugates or negatives of the bytes; torch only marks the tensor.
    flags: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Symbol(msgspec.Struct, frozen=True, tag=True):
    """Torch constant (dtype, device, layout or memory_format), or complex number."""

    kind: str
    name: str


Item = View | Symbol | bool | int | float | str | None
# Tuples nest at most twice: msgspec has no recursive unions.
Arg = Item | tuple[Item | tuple[Item, ...], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: int
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    # None for a result that is not a tensor.
    outputs: tuple[View | None, ...]
    accesses: tuple[Access, ...]
    # Module path, "model.layers.0.mlp".
    scope: str = ""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    # Why the launch is pinned; empty if it can run on any device.
    immovable: str = ""

    @property
    def arg_views(self) -> list["View"]:
        args = (*self.args, *(value for _, value in self.kwargs))
        return [view for arg in args for view in arg_views(arg)]

    def regions(self, reading: bool) -> set[tuple[int, Region]]:
        """(buffer, region) that it reads, else those that it writes."""
        return {(a.buffer, a.region) for a in self.accesses if a.atomic or (a.read if reading else a.write)}

    @property
    def views(self) -> list["View"]:
        return [*self.arg_views, *(view for view in self.outputs if view is not None)]

    @property
    def buffers(self) -> set[int]:
        return {view.buffer for view in self.views} | {access.buffer for access in self.accesses}


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the model, with enough to repeat it."""

    model: str
    kind: str  # prefill, decode, encode, denoise, call; tokens, chunk or insert for serving
    # Batch rows. For kind=tokens: maximum sequences.
    batch: int
    # Tokens per row in the state. For kind=prefill and kind=tokens: tokens read by the step.
    context: int
    seed: int = 0
    # Positions beyond `context` for decodes. For kind=tokens: positions in all pages.
    reserve: int = 0
    # Weights from the seed, not the checkpoint.
    random_weights: bool = False
    # File with input tensors by name; empty: generated.
    inputs: str = ""
    # For kind=tokens: sequences in the state, if more than `batch`.
    rows: int = 0
    # For kind=tokens: expected tokens per sequence; 0: an even share of the pages.
    length: int = 0
    # GEMMs of the same input are fused.
    joined_products: bool = False
    adapters: tuple[str, ...] = ()
    # For kind=tokens: attention window of each page table, 0: none. Empty: one table, no window.
    windows: tuple[int, ...] = ()
    # For serving: the step encodes a picture, or takes embeddings of pictures.
    pictures: bool = False


@dataclass(frozen=True)
class Trace:
    step: Step
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    # Results by name.
    outputs: tuple[tuple[str, View], ...]
    num_views: int = 0
    # (operator, count) that returned old memory without declaring it.
    aliases: tuple[tuple[str, int], ...] = ()
    # cpu, cuda:N or fake. Only what ran on the CPU is sure to run there again.
    recorded_on: str = "cpu"

    def kernel_of(self, launch: int) -> Kernel:
        return self.kernels[self.launches[launch].kernel]

    def buffers_of(self, kind: BufferKind) -> tuple[int, ...]:
        return tuple(i for i, b in enumerate(self.buffers) if b.kind is kind)

    def bytes_of(self, *kinds: BufferKind) -> int:
        return sum(buffer.size_bytes for buffer in self.buffers if buffer.kind in kinds)

    @cached_property
    def handed_over_bytes(self) -> int:
        outputs = sum(self.buffers[view.buffer].size_bytes for _, view in self.outputs)
        return self.bytes_of(BufferKind.STATE) + outputs

    @cached_property
    def digest(self) -> str:
        return digest(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy: another thread may compute a cached property while this is pickled."""
        return dict(vars(self))


def digest(record: Any) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(record)).hexdigest()


def arg_views(arg: Arg) -> tuple[View, ...]:
    if isinstance(arg, View):
        return (arg,)
    if isinstance(arg, tuple):
        return tuple(v for item in arg for v in arg_views(item))
    return ()
