"""Kernel, Buffer, View, Launch, Step, Trace: what the program did, with which code on which bytes.

A trace is one step of a workload: its launches in program order, the buffers they touch and
how the step hands data in and out. Views are not launches: a launch's arguments say which
bytes of which buffer they mean. Buffers are logical storages, not addresses: memory that an
allocator would hand out twice is two buffers here.

Kernel, Region, Access: code, and which bytes one run of it touches.

A region is a strided set of bytes inside one buffer: `item_bytes` bytes at
`start + sum(i_d * stride_d)` for every index tuple. Ranges are half-open. Two regions
overlap iff they share a byte. That is decided one dimension at a time, the largest stride
first: rows of the same stride are compared once for each distance at which they can meet,
never one by one, so two column blocks of a large matrix cost as much as two of a small one.
Beyond MAX_STEPS comparisons regions are said to overlap: False is a proof, True is not.
"""

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

# After this many comparisons of rows, two regions are said to overlap.
MAX_STEPS = 20_000
# A generator of random numbers is a state buffer whose name is this and its device: "rng:cpu", "rng:cuda:0".
# A launch that draws reads and writes all of it.
GENERATOR = "rng:"
# Bytes of an element where it is not one.
ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "uint64": 8,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip

# (count, stride in bytes) of each dimension, the largest stride first.
Dims = tuple[tuple[int, int], ...]


class Origin(StrEnum):
    """Where a kernel's code came from, hence how its accesses are proved."""

    ATEN = "aten"  # an operator of a vendor library: proved from its schema
    TRITON = "triton"  # proved from its PTX, rebuilt from source for each device
    PTX = "ptx"  # proved from its PTX, loaded by the driver


@dataclass(frozen=True, slots=True)
class Kernel:
    """Code: an ATen overload or a PTX entry."""

    # "aten.mm.default" for operators, the entry's name for PTX.
    name: str
    origin: Origin
    # Operator schema with alias annotations; empty for PTX.
    schema: str = ""
    # PTX text; empty for operators.
    ptx: str = ""
    # What a Triton kernel is rebuilt from on another architecture; empty for all others.
    source: str = ""
    # (name, type) of every argument in order. Those of type "constexpr" are compiled in; the others are
    # the parameters of the PTX entry, in this order, and the arguments of a launch.
    signature: tuple[tuple[str, str], ...] = ()
    # The values that were compiled in, by name.
    constants: tuple[tuple[str, bool | int | float | str | None], ...] = ()
    num_warps: int = 0
    num_stages: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """A strided set of bytes of one buffer."""

    start: int
    item_bytes: int
    # (count, stride in bytes), outermost first; counts above 1, strides positive, and no two
    # dimensions that could be written as one. `region` builds this form.
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def stop(self) -> int:
        stop = self.start + self.item_bytes
        for n, stride in self.dims:
            stop += (n - 1) * stride
        return stop

    @property
    def num_bytes(self) -> int:
        """How many bytes are touched, counting a byte once for every index that reaches it."""
        size = self.item_bytes
        for n, _ in self.dims:
            size *= n
        return size

    @property
    def is_dense(self) -> bool:
        """True iff every byte between start and stop is touched."""
        return not self.dims

    def overlaps(self, other: "Region") -> bool:
        """True unless the two regions provably share no byte."""
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
    """The normal form of a strided set; None when it is empty. Dimensions are (count, byte stride)."""
    if any(n == 0 for n, _ in dims) or item_bytes == 0:
        return None
    for n, stride in dims:  # a negative stride touches the same bytes from the other end
        start += (n - 1) * stride if stride < 0 else 0
    live = sorted(((n, abs(s)) for n, s in dims if n > 1 and s != 0), key=lambda d: (d[1], d[0]))
    merged: list[tuple[int, int]] = []
    for n, stride in live:
        if not merged and stride <= item_bytes:
            item_bytes += (n - 1) * stride
        elif merged and stride % merged[-1][1] == 0 and stride // merged[-1][1] <= merged[-1][0]:
            # Rows of the smaller stride without a hole between them are one longer row.
            count, inner = merged[-1]
            merged[-1] = (count + (n - 1) * (stride // inner), inner)
        else:
            merged.append((n, stride))
    return Region(start, item_bytes, tuple(reversed(merged)))


def _extent(dims: Dims, item_bytes: int) -> int:
    """Bytes from the first touched to the last, both included."""
    return sum((n - 1) * stride for n, stride in dims) + item_bytes


def _meet(a: int, a_dims: Dims, a_item: int, b: int, b_dims: Dims, b_item: int) -> bool:
    """True unless the strided sets that start at `a` and at `b` provably share no byte.

    Takes off the largest stride S. Rows i of one set and j of the other, i and j free, stand at every
    distance (j - i) * S; only the distances at which the rows' enclosing intervals meet are looked at.
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
        # The middle one of three rows that meet a dense set lies inside it, if no row reaches past the next.
        is_inside = (not b_dims and a_size <= stride) or (not a_dims and b_size <= stride)
        if last - first > (1 if is_inside else MAX_STEPS):
            return True
        todo += [(a, a_rest, b + d * stride, b_rest) for d in range(first, last + 1)]
    return True


def _rows(dims: Dims, stride: int) -> tuple[int, Dims]:
    """How many rows of this stride there are, and what one of them is."""
    return (dims[0][0], dims[1:]) if dims and dims[0][1] == stride else (1, dims)


def _contains(outer: Region, inner: Region) -> bool:
    """True only if every byte of `inner` is in `outer`: all rows of one lie in rows of the other."""
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
    """One launch touches one region of one buffer."""

    buffer: int
    region: Region
    read: bool = False
    write: bool = False
    atomic: bool = False


class BufferKind(StrEnum):
    """Who owns a buffer's contents."""

    WEIGHT = "weight"  # the model's: read only, alike for all requests
    INPUT = "input"  # the request's, given anew for each step
    STATE = "state"  # the request's, mutated by a step and handed to the next
    OUTPUT = "output"  # what the step returns
    TEMPORARY = "temporary"  # dead when the step ends


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    kind: BufferKind
    size_bytes: int
    # Contents of a small constant that the program itself made, as hexadecimal; else empty.
    constant_hex: str = ""

    @property
    def is_generator(self) -> bool:
        return self.kind is BufferKind.STATE and self.name.startswith(GENERATOR)


def item_bytes(dtype: str) -> int:
    """Size of one element; one byte for the small types."""
    return ITEM_BYTES.get(dtype, 1)


class View(msgspec.Struct, frozen=True, tag=True):
    """A tensor: how one buffer's bytes are read. Strides and offset count elements."""

    buffer: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Symbol(msgspec.Struct, frozen=True, tag=True):
    """A torch constant among the arguments: kind is dtype, device, layout or memory_format."""

    kind: str
    name: str


Item = View | Symbol | bool | int | float | str | None
# An argument of a launch: a tensor, a torch constant, a plain value, or a tuple of these, nested at most
# twice (files are decoded by this type, and msgspec has no recursive unions).
Arg = Item | tuple[Item | tuple[Item, ...], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a kernel."""

    kernel: int
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    # What the launch returns, in order; None for a result that is not a tensor.
    outputs: tuple[View | None, ...]
    accesses: tuple[Access, ...]
    # The module that launched it ("model.layers.0.mlp"); empty outside any module.
    scope: str = ""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    # Empty if the launch may run on any device; else the reason why it may not.
    immovable: str = ""

    @property
    def given(self) -> list["View"]:
        args = (*self.args, *(value for _, value in self.kwargs))
        return [view for arg in args for view in arg_views(arg)]

    @property
    def views(self) -> list["View"]:
        return [*self.given, *(view for view in self.outputs if view is not None)]


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of the model does, and enough to build that call again."""

    model: str
    kind: str  # prefill, decode, encode, denoise, call; tokens, chunk or insert of a served model
    # Batch rows. For kind=tokens: maximum number of sequences.
    batch: int
    # Tokens per row that the state holds. For kind=prefill and kind=tokens: tokens that the step reads.
    context: int
    seed: int = 0
    # Positions of state beyond `context` that a decode may fill. For kind=tokens: positions in all pages.
    reserve: int = 0
    # Random weights from the seed in place of a checkpoint folder's own.
    random_weights: bool = False
    # A file with tensors that are inputs, by name; empty for inputs made from the model's description.
    inputs: str = ""
    # For kind=tokens: sequences that the state holds, where other steps over it have more than `batch`.
    rows: int = 0
    # For kind=tokens: expected tokens per sequence; 0: an even share of the pages.
    length: int = 0
    # Products of the same input are one, with weights laid one behind the other.
    joined_products: bool = False


@dataclass(frozen=True)
class Trace:
    """The launches of one step in program order."""

    step: Step
    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    # What the step returns, by name.
    outputs: tuple[tuple[str, View], ...]
    # Number of view operations that took part and needed no launch.
    num_views: int = 0
    # (operator, times) for those that returned old memory without their schema saying so, by name.
    aliases: tuple[tuple[str, int], ...] = ()
    # Where it was recorded: cpu, cuda:N, or fake. Only what ran on the CPU is sure to run there again.
    recorded_on: str = "cpu"

    def kernel_of(self, launch: int) -> Kernel:
        return self.kernels[self.launches[launch].kernel]

    def buffers_of(self, kind: BufferKind) -> tuple[int, ...]:
        return tuple(i for i, b in enumerate(self.buffers) if b.kind is kind)

    @cached_property
    def digest(self) -> str:
        """Names this trace by its contents; costs and plans refer to it."""
        return digest(self)


def digest(record: Any) -> str:
    """Names a record by its contents: equal records have equal digests."""
    return hashlib.sha256(msgspec.msgpack.encode(record)).hexdigest()


def arg_views(arg: Arg) -> tuple[View, ...]:
    """The tensors inside an argument, depth first."""
    if isinstance(arg, View):
        return (arg,)
    if isinstance(arg, tuple):
        return tuple(v for item in arg for v in arg_views(item))
    return ()
