"""Buffer, View, Launch, Step, Trace: what the program did.

A trace is one step of a workload: its launches in program order, the buffers they touch and
how the step hands data in and out. Views are not launches: a launch's arguments say which
bytes of which buffer they mean. Buffers are logical storages, not addresses: memory that an
allocator would hand out twice is two buffers here.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tessera.ir.codec import digest
from tessera.ir.kernel import Access, Kernel

# A generator of random numbers is a state buffer whose name is this and its device: "rng:cpu", "rng:cuda:0".
# A launch that draws reads and writes all of it.
GENERATOR = "rng:"


class BufferKind(StrEnum):
    """Who owns a buffer's contents."""

    WEIGHT = "weight"  # the model's: read only, alike for all requests
    INPUT = "input"  # the request's, given anew for each step
    STATE = "state"  # the request's, mutated by a step and handed to the next
    OUTPUT = "output"  # what the step returns
    TEMPORARY = "temporary"  # dead when the step ends


@dataclass(frozen=True, slots=True)
class Buffer:
    """One storage."""

    name: str
    kind: BufferKind
    size_bytes: int
    # Contents of a small constant that the program itself made, as hexadecimal; else empty.
    constant_hex: str = ""

    @property
    def is_generator(self) -> bool:
        """True if the buffer is the state of a generator of random numbers."""
        return self.kind is BufferKind.STATE and self.name.startswith(GENERATOR)


# Bytes of an element where it is not one.
ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "uint64": 8,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Size of one element; one byte for the small types."""
    return ITEM_BYTES.get(dtype, 1)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: how one buffer's bytes are read. Strides and offset count elements."""

    buffer: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        count = 1
        for n in self.shape:
            count *= n
        return count


@dataclass(frozen=True, slots=True)
class Symbol:
    """A torch constant among the arguments: kind is dtype, device, layout or memory_format."""

    kind: str
    name: str


# An argument of a launch: a tensor, a torch constant, a plain value, or a tuple of arguments.
Arg = View | Symbol | bool | int | float | str | None | tuple["Arg", ...]


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
        """Every tensor among its arguments."""
        args = (*self.args, *(value for _, value in self.kwargs))
        return [view for arg in args for view in arg_views(arg)]

    @property
    def views(self) -> list["View"]:
        """Every tensor that it is given or returns."""
        return [*self.given, *(view for view in self.outputs if view is not None)]


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of the model does, and enough to build that call again."""

    model: str
    kind: str  # prefill, decode, encode, denoise, call; tokens, chunk or insert of a served model
    # Rows; of tokens, the sequences they may be of.
    batch: int
    # Tokens per row that the step's state can hold; of a prefill or of tokens, those it reads.
    context: int
    seed: int = 0
    # Rows of state beyond `context` that a joined decode may fill; of tokens, positions in all pages.
    reserve: int = 0
    # Of a checkpoint folder: random weights from the seed in place of the folder's own.
    random_weights: bool = False
    # A file with tensors that are inputs, by name; empty for inputs made from the model's description.
    inputs: str = ""
    # Of tokens: sequences that the state has room for, where other steps over it have more than `batch`.
    rows: int = 0
    # Of tokens: how many a sequence is expected to have; 0 for an even share of the pages.
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
        """The kernel that launch number `launch` runs."""
        return self.kernels[self.launches[launch].kernel]

    def buffers_of(self, kind: BufferKind) -> tuple[int, ...]:
        """Indices of the buffers of one kind."""
        return tuple(i for i, b in enumerate(self.buffers) if b.kind is kind)

    @cached_property
    def digest(self) -> str:
        """Names this trace by its contents; costs and plans refer to it."""
        return digest(self)


def arg_views(arg: Arg) -> tuple[View, ...]:
    """The tensors inside an argument, depth first."""
    if isinstance(arg, View):
        return (arg,)
    if isinstance(arg, tuple):
        return tuple(v for item in arg for v in arg_views(item))
    return ()
