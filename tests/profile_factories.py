"""Hand-made launches and traces for the profile tests: a kernel name, shapes, and what it touches."""

import torch

from tessera.ir import (
    Access,
    Arg,
    Buffer,
    BufferKind,
    Costs,
    Device,
    Kernel,
    Launch,
    Origin,
    Step,
    Trace,
    View,
    region,
)
from tessera.ir.trace import item_bytes
from tessera.profile import Tables, installed_tables, parse_devices
from tessera.profile.estimate import modelled

Shape = tuple[int, ...]


def contiguous(shape: Shape) -> Shape:
    """Row-major strides."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def schema_of(name: str) -> str:
    """Torch's schema of an operator; empty for other kernels."""
    packet, _, overload = name.removeprefix("aten.").rpartition(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload, None) if packet else None
    return str(operator._schema) if operator else ""


class TraceMaker:
    """Collects launches; every tensor gets a buffer of its own."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.buffers: list[Buffer] = []
        self.launches: list[Launch] = []

    def tensor(self, shape: Shape, dtype: str = "bfloat16") -> View:
        """A fresh contiguous tensor."""
        size = item_bytes(dtype)
        for n in shape:
            size *= n
        self.buffers.append(Buffer(f"b{len(self.buffers)}", BufferKind.TEMPORARY, size))
        return View(len(self.buffers) - 1, dtype, shape, contiguous(shape))

    def launch(
        self, name: str, args: tuple[Arg, ...], *outputs: View, origin: Origin = Origin.ATEN
    ) -> Launch:
        """One launch that reads its tensors and writes its results."""
        kernel = Kernel(name, origin, schema_of(name))
        if kernel not in self.kernels:
            self.kernels.append(kernel)
        read = tuple(access(v, read=True) for v in args if isinstance(v, View) and v.num_elements)
        written = tuple(access(v, write=True) for v in outputs if v.num_elements)
        launch = Launch(self.kernels.index(kernel), args, (), outputs, read + written)
        self.launches.append(launch)
        return launch

    def done(self) -> Trace:
        """The trace so far."""
        step = Step("test", "decode", 1, 16)
        return Trace(step, tuple(self.kernels), tuple(self.buffers), tuple(self.launches), ())


def access(view: View, read: bool = False, write: bool = False) -> Access:
    """The bytes of a view."""
    size = item_bytes(view.dtype)
    dims = tuple((n, s * size) for n, s in zip(view.shape, view.stride, strict=True))
    touched = region(view.offset * size, size, dims)
    assert touched is not None
    return Access(view.buffer, touched, read, write)


def gemm_trace(m: int, n: int, k: int, dtype: str = "bfloat16") -> Trace:
    """One matrix product."""
    make = TraceMaker()
    a, b, c = make.tensor((m, k), dtype), make.tensor((k, n), dtype), make.tensor((m, n), dtype)
    make.launch("aten.mm.default", (a, b), c)
    return make.done()


def attention_trace(batch: int, heads: int, queries: int, keys: int, causal: bool = False) -> Trace:
    """One attention of head width 128 in bf16."""
    make = TraceMaker()
    q, k, v, out = (make.tensor((batch, heads, n, 128)) for n in (queries, keys, keys, queries))
    make.launch("aten._scaled_dot_product_flash_attention.default", (q, k, v, 0.0, causal), out)
    return make.done()


def unary_trace(name: str, elements: int, dtype: str = "float32") -> Trace:
    """One operator from one tensor to another of the same size."""
    make = TraceMaker()
    make.launch(name, (make.tensor((elements,), dtype),), make.tensor((elements,), dtype))
    return make.done()


def estimate(trace: Trace, devices: tuple[Device, ...], tables: Tables | bool = True) -> Costs:
    """Modelled prices."""
    found = installed_tables() if tables is True else tables or None
    columns = modelled(trace, (d.gpu for d in devices), found)
    return Costs(trace.digest, devices, tuple(zip(*(columns[d.gpu] for d in devices), strict=True)))


def emulated(*gpus: str) -> tuple[Device, ...]:
    """Emulated devices."""
    return parse_devices(",".join(f"emu:{name}" for name in gpus))
