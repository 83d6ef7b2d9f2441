"""Overheads beside bytes and operations, as amounts by term; `corrections.py` has their costs.

PyTorch kernels on broadcast, strided, transposed or mixed operands are bound by index arithmetic, reductions
by rows, and some operators start several kernels. Each element pays per dimension left after joining
contiguous ones; dense operands of one dtype and order pay nothing. Inductor kernels are classified by the
operators in their names. Not handled: other Triton and CUDA kernels. Strides count elements.
"""

import math
from collections.abc import Sequence
from enum import Enum

from tessera.ir import Launch, View
from tessera.ir.files import packaged
from tessera.ir.trace import item_bytes

Overhead = tuple[tuple[str, float], ...]

VECTOR_BYTES = 16
SECTOR_BYTES = 32
# Up to this length PyTorch reduces rows in one warp, 32 elements at a time.
WARP_ROW = 8192
# Below this, the number of rows decides.
SHORT_ROW = 512
COPIES = frozenset({"copy", "clone", "contiguous", "_to_copy", "to"})
SAMPLERS = {"argmax": "argmax", "argmin": "argmax", "topk": "topk", "sort": "sort", "argsort": "sort",
            "msort": "sort", "kthvalue": "sort"}  # fmt: skip
SCANS = frozenset({"cumsum", "cumprod", "logcumsumexp", "_cummax_helper", "_cummin_helper"})


class Scope(Enum):
    ALL = "cycles of all SMs"
    ONE = "cycles, one after the other"
    FLOOR = "cycles, added to everything else"
    FACTOR = "factor of the whole time"
    STREAM = "a model of its own"


TERMS = {
    name: Scope[term["scope"]]
    for name, term in packaged("profile", "terms.json", dict[str, dict[str, str]]).items()
}


def overhead_of(
    op: str, base: str, launch: Launch, ins: tuple[View, ...], outs: tuple[View, ...]
) -> Overhead:
    if not ins or not outs or outs[0].num_elements == 0:
        return ()
    terms: dict[str, float] = {}
    if op == "elementwise" or base in COPIES:
        _elementwise(terms, base, ins, outs[0])
    elif base in ("cat", "stack"):
        terms |= {"cat": outs[0].num_elements, "cat_part": max(v.num_elements for v in ins)}
    elif op == "norm":
        _copied(terms, ins[0])
    elif op == "softmax":
        _softmax(terms, launch, ins[0])
    elif op == "reduction":
        _reduction(terms, launch, ins[0], outs[0])
    elif base in SAMPLERS:
        kind, row = SAMPLERS[base], ins[0].shape[-1] if ins[0].shape else 1
        terms |= {f"{kind}_floor": 1.0, kind: ins[0].num_elements if kind == "argmax" else row}
    elif base in SCANS:
        terms |= {"scan": outs[0].num_elements, "scan_floor": 1.0}
        _copied(terms, ins[0])
    elif op == "scatter" and len(ins) > 2:
        terms |= {"put": ins[-1].num_elements, "put_floor": 1.0}
    elif op == "gather" and sum(v.dtype == "int64" for v in ins[1:]) > 1:  # by one list it is a copy
        terms |= {"put": outs[0].num_elements, "put_floor": 1.0}
    elif op == "conv":
        _convolution(terms, launch, ins, outs[0])
    elif op == "grouped" or (op == "gemm" and not all(starts_at_vectors(v) for v in ins if len(v.shape) > 1)):
        terms["grouped" if op == "grouped" else "unaligned"] = 1.0
    return tuple(sorted(terms.items()))


def attention_overhead(base: str, is_few: bool, is_masked: bool) -> Overhead:
    """Few queries stream the keys through one block each."""
    kernel = next((name for name in ("efficient", "cudnn", "flash") if name in base), "")
    if kernel and is_few:
        kernel = f"{'masked' if kernel == 'cudnn' and is_masked else kernel}_stream"
    return ((kernel, 1.0),) if kernel else ()


def fused_overhead(name: str, num_bytes: int) -> Overhead:
    words = set(name.split("_"))
    terms: dict[str, float] = {}
    if words & {"cos", "sin"}:
        terms["fused_angle"] = num_bytes
    if {"red", "softmax", "cat"} <= words:
        terms["fused_softmax"] = num_bytes
    elif {"index", "masked", "fill"} <= words:
        terms["fused_index"] = num_bytes
    if "argmax" in words:
        terms["fused_argmax"] = 1.0
    return tuple(sorted(terms.items()))


def copies_first(op: str, kernel_name: str, ins: Sequence[View]) -> bool:
    if kernel_name.startswith("aten.masked_fill."):
        return bool(ins)
    return op in ("norm", "softmax", "scan", "conv") and bool(ins) and not is_dense(ins[0])


def _elementwise(terms: dict[str, float], base: str, ins: tuple[View, ...], out: View) -> None:
    tensors = tuple(v for v in ins if v.shape)
    if base == "masked_fill":
        _add_index(terms, (out, ins[0]), out)
    _add_index(terms, (out, *tensors), out)
    if _casts(base, tensors, out) and "index" not in terms:
        terms |= {"cast": out.num_elements, "indexing": 1.0}


def _casts(base: str, ins: Sequence[View], out: View) -> bool:
    """fp32 to 16 bits is vectorised."""
    if base in COPIES:
        narrows = bool(ins) and ins[-1].dtype == "float32" and out.dtype in ("bfloat16", "float16")
        return bool(ins) and ins[-1].dtype != out.dtype and not narrows
    return len({v.dtype for v in ins if v.dtype != "bool"}) > 1


def _copied(terms: dict[str, float], view: View) -> None:
    if not is_dense(view):
        _add_index(terms, (dense(view), view), dense(view))


def _softmax(terms: dict[str, float], launch: Launch, view: View) -> None:
    axis = launch.args[1] if len(launch.args) > 1 else -1
    length = view.shape[axis] if isinstance(axis, int) and view.shape else 1
    if length * item_bytes(view.dtype) % VECTOR_BYTES and length > 64:
        terms["uneven_row"] = view.num_elements
    _copied(terms, view)


def _reduction(terms: dict[str, float], launch: Launch, view: View, out: View) -> None:
    rows = max(1, out.num_elements)
    length = view.num_elements // rows
    if length < 2 or not _reduces_inner(launch, view):
        return
    if length < SHORT_ROW:
        terms["row"] = rows
    elif length < WARP_ROW:
        terms["warp_row"] = length


def _reduces_inner(launch: Launch, view: View) -> bool:
    dim = launch.args[1] if len(launch.args) > 1 else dict(launch.kwargs).get("dim")
    dims = dim if isinstance(dim, tuple) else (dim,)
    reduced = {d % len(view.shape) for d in dims if type(d) is int and view.shape}
    inner = {i for i, (n, s) in enumerate(zip(view.shape, view.stride, strict=True)) if s == 1 and n > 1}
    return not reduced or bool(reduced & inner)


def _convolution(terms: dict[str, float], launch: Launch, ins: tuple[View, ...], out: View) -> None:
    groups = launch.args[8] if len(launch.args) > 8 else 1
    if len(ins) < 2:
        return
    _copied(terms, ins[0])
    if isinstance(groups, int) and groups > 1:
        taps = ins[1].num_elements // max(1, ins[1].shape[0])
        terms["depthwise"] = float(out.num_elements * taps)
        return
    terms["conv"] = out.num_elements
    if len(ins) > 2 and len(out.shape) > 2:
        # A separate kernel adds the bias.
        bias = View(ins[2].buffer, ins[2].dtype, (ins[2].shape[0],) + (1,) * (len(out.shape) - 2),
                    (1,) + (0,) * (len(out.shape) - 2), 0)  # fmt: skip
        _add_index(terms, (out, bias), out)


def _add_index(terms: dict[str, float], views: Sequence[View], out: View) -> None:
    """Terms of a kernel that visits elements in the order of `out`; none if it is vectorised."""
    sizes, strides = joined_dims(views, out)
    if len(sizes) <= 1 and all(column[0] == 1 for column in strides if column):
        return
    num = out.num_elements
    terms["indexing"] = 1.0
    terms["index"] = terms.get("index", 0.0) + num
    terms["dim"] = terms.get("dim", 0.0) + num * len(sizes)
    for view, column in zip(views, strides, strict=True):
        step = abs(column[0]) if column else 0
        if step > 1:
            share = min(SECTOR_BYTES, step * item_bytes(view.dtype)) / SECTOR_BYTES
            terms["sector"] = terms.get("sector", 0.0) + num * share


def joined_dims(views: Sequence[View], out: View) -> tuple[list[int], list[list[int]]]:
    """Innermost first; joined dimensions have their innermost stride. Tensors are broadcast to `out`, whose
    strides give the order.
    """
    rank = len(out.shape)
    spread = [_broadcast(v, rank) for v in views]
    order = sorted((i for i in range(rank) if out.shape[i] > 1), key=lambda i: (abs(out.stride[i]), -i))
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for i in order:
        steps = [column[i] for column in spread]
        if sizes and all(s == col[-1] * sizes[-1] for s, col in zip(steps, strides, strict=True)):
            sizes[-1] *= out.shape[i]
            continue
        sizes.append(out.shape[i])
        for col, s in zip(strides, steps, strict=True):
            col.append(s)
    return sizes, strides


def _broadcast(view: View, rank: int) -> list[int]:
    steps = [0 if n == 1 else s for n, s in zip(view.shape, view.stride, strict=True)]
    return ([0] * rank + steps)[len(steps) :]


def is_dense(view: View) -> bool:
    steps = zip(view.shape, view.stride, dense(view).stride, strict=True)
    return all(n <= 1 or stride == packed for n, stride, packed in steps)


def dense(view: View) -> View:
    steps = tuple(math.prod(view.shape[i + 1 :]) for i in range(len(view.shape)))
    return View(view.buffer, view.dtype, view.shape, steps, 0)


def starts_at_vectors(view: View) -> bool:
    outer = [s for n, s in zip(view.shape, view.stride, strict=True) if n > 1 and s > 1]
    return all(s * item_bytes(view.dtype) % VECTOR_BYTES == 0 for s in outer)
