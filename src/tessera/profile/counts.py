"""Work of one launch: class, dtype, operations, bytes, shape.

The kernel's name gives the class (`operators.json`), else "other", priced by bytes. Bytes are unique bytes
read plus written. GEMM, attention and convolution count operations; other classes are bound by memory.
Gathers, scatters, grouped GEMMs and paged attention count the rows that move. Not handled: caches, sparsity,
early exits.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from tessera.ir import Kernel, Launch, Origin, View, arg_views
from tessera.ir.files import packaged
from tessera.ir.trace import item_bytes
from tessera.kernels import PARTS
from tessera.profile.overheads import Overhead, attention_overhead, copies_first, fused_overhead, overhead_of

# Attention with so few queries is bound by the KV cache.
MAX_DECODE_QUERIES = 8
# The last tensors are state, starts and rows.
RECURRENT = frozenset({"causal_conv", "ssd_scan", "selective_scan", "delta_scan"})
# A CPU unpacks a weight in so many readings of its numbers.
UNPACKING = 6
OPERATORS = {
    name: op
    for op, names in packaged("profile", "operators.json", dict[str, list[str]]).items()
    for name in names
}


class OpClass(StrEnum):
    GEMM = "gemm"
    GROUPED = "grouped"  # one GEMM per expert
    PREFILL = "prefill"
    DECODE = "decode"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    COPY = "copy"
    REDUCTION = "reduction"
    GATHER = "gather"
    SCATTER = "scatter"
    SOFTMAX = "softmax"
    SAMPLING = "sampling"
    SCAN = "scan"
    CONV = "conv"
    ALLOCATION = "allocation"
    OTHER = "other"  # priced by bytes


# Templates (GEMM, attention) keep no shape and are priced by bytes.
INDUCTOR = {
    "triton_poi_": OpClass.ELEMENTWISE,
    "triton_for_": OpClass.ELEMENTWISE,
    "triton_red_": OpClass.REDUCTION,
    "triton_per_": OpClass.REDUCTION,
    "triton_mix_": OpClass.REDUCTION,
    "triton_spl_": OpClass.SCAN,
}


@dataclass(frozen=True, slots=True)
class Work:
    op: OpClass
    # The first floating-point argument's dtype.
    dtype: str
    flops: float
    num_bytes: int
    # GEMM: batch, m, n, k. Grouped: groups, rows, n, k. Attention: batch, queries, keys, heads, KV heads,
    # head width, 1 if causal.
    shape: tuple[int, ...] = ()
    overhead: Overhead = ()
    # Added on a CPU, which writes packed weights out; negative where it joins rows in place.
    cpu_bytes: int = 0


def work_of(kernel: Kernel, launch: Launch) -> Work:
    op = class_of(kernel)
    views = _inputs(launch)
    if op is OpClass.PREFILL:
        return _attention(kernel, launch, views)
    if kernel.name in PARTS:
        return _grouped_part(launch, views, PARTS[kernel.name] + 2)
    flops = 0.0
    shape: tuple[int, ...] = ()
    if op in (OpClass.GEMM, OpClass.GROUPED):
        flops, shape = _gemm(op, _base(kernel.name), launch, views)
    elif op is OpClass.CONV:
        flops = _conv_flops(launch, views)
    num_bytes = _bytes(op, kernel, launch, views)
    overhead = _overhead(op, kernel, launch, views, num_bytes)
    cpu_bytes = UNPACKING * _unpacked(views) if _base(kernel.name).startswith("packed_") else 0
    if _base(kernel.name) == "grouped_join" and isinstance(share := launch.args[-1], float):
        cpu_bytes = round(2.0 * share * _size(views[1])) - num_bytes
    return Work(op, _dtype(launch, views), flops, num_bytes, shape, overhead, cpu_bytes)


def _overhead(
    op: OpClass, kernel: Kernel, launch: Launch, views: tuple[View, ...], num_bytes: int
) -> Overhead:
    if kernel.name.startswith(tuple(INDUCTOR)):
        return fused_overhead(kernel.name, num_bytes)
    if kernel.origin is not Origin.ATEN or op is OpClass.ALLOCATION:
        return ()
    return overhead_of(op.value, _base(kernel.name), launch, views, _outputs(launch))


@cache
def class_of(kernel: Kernel) -> OpClass:
    """Attention is PREFILL until its query length is known."""
    if kernel.origin is Origin.ATEN:
        return OpClass(OPERATORS.get(_base(kernel.name), OpClass.OTHER))
    return next((op for prefix, op in INDUCTOR.items() if kernel.name.startswith(prefix)), OpClass.OTHER)


@cache
def _base(name: str) -> str:
    """`aten.add_.Tensor` -> `add`."""
    parts = name.split(".")
    base = parts[1] if len(parts) > 1 else parts[0]
    return base if base.endswith("__") else base.rstrip("_") or base


def is_zero_size(launch: Launch) -> bool:
    results = [v for v in launch.outputs if v is not None]
    return bool(results) and all(v.num_elements == 0 for v in results)


def _inputs(launch: Launch) -> tuple[View, ...]:
    listed = [v for arg in launch.args for v in arg_views(arg)]
    return (*listed, *(v for key, arg in launch.kwargs if key != "out" for v in arg_views(arg)))


def _outputs(launch: Launch) -> tuple[View, ...]:
    results = tuple(v for v in launch.outputs if v is not None)
    return results or tuple(v for key, arg in launch.kwargs if key == "out" for v in arg_views(arg))


def _dtype(launch: Launch, views: tuple[View, ...]) -> str:
    floating = (v.dtype for v in (*views, *_outputs(launch)) if "float" in v.dtype)
    return next(floating, views[0].dtype if views else "uint8")


def _size(view: View) -> int:
    return view.num_elements * item_bytes(view.dtype)


def _bytes(op: OpClass, kernel: Kernel, launch: Launch, views: tuple[View, ...]) -> int:
    if op is OpClass.ALLOCATION:
        return 0
    if op is OpClass.GATHER:
        result_bytes = sum(_size(v) for v in _outputs(launch))
        return 2 * result_bytes + sum(_size(v) for v in views[1:])
    if op is OpClass.SCATTER:
        moved = 2 * sum(_size(v) for v in views[1:])
        # Out of place, all rows are copied.
        in_place = kernel.name.split(".")[1].endswith("_")
        return moved if in_place or not views else moved + 2 * _size(views[0])
    touched = _touched(launch, _visited(kernel, launch)) if launch.accesses else _seen(launch, views)
    if kernel.name.startswith(tuple(INDUCTOR)) and _visited(kernel, launch) is None:
        return touched - _idle_places(kernel, launch)
    if op is OpClass.GROUPED and len(views) > 1:
        return touched - _idle_experts(views)
    if _base(kernel.name) in RECURRENT:
        return touched - _idle_rows(views)
    if kernel.origin is Origin.ATEN and copies_first(op.value, kernel.name, views):
        return touched + 2 * _size(views[0])
    return touched


def _visited(kernel: Kernel, launch: Launch) -> int | None:
    """Integer arguments of an Inductor kernel are loop sizes."""
    if kernel.origin is Origin.ATEN or not kernel.name.startswith(tuple(INDUCTOR)):
        return None
    sizes = [arg for arg in launch.args if type(arg) is int]
    return math.prod(sizes) if sizes else None


def _touched(launch: Launch, visited: int | None = None) -> int:
    touched = [*launch.regions(reading=True), *launch.regions(reading=False)]
    if visited is None:
        return sum(region.num_bytes for _, region in touched)
    items: dict[int, int] = {}
    for view in (*_inputs(launch), *_outputs(launch)):
        items[view.buffer] = max(items.get(view.buffer, 1), item_bytes(view.dtype))
    return sum(min(r.num_bytes, visited * items.get(b, 16)) for b, r in touched)


def _idle_places(kernel: Kernel, launch: Launch) -> int:
    """Several kernels in one have no loop sizes as arguments. What such a kernel writes alone, at unknown
    places, and so seems to read, is as much as its largest other read or write.
    """
    named = zip(kernel.signature, launch.args, strict=False)
    given = {v.buffer for (name, _), v in named if isinstance(v, View) and not name.startswith("out_ptr")}
    scattered = [a for a in launch.accesses if a.read and a.write and a.buffer not in given]
    others = [a for a in launch.accesses if a not in scattered]
    most = max((a.region.num_bytes for a in others if a.write or not any(o.write for o in others)), default=0)
    return sum(2 * a.region.num_bytes - min(a.region.num_bytes, most) for a in scattered) if most else 0


def _seen(launch: Launch, views: tuple[View, ...]) -> int:
    """Without accesses, every argument is read and every result written once."""
    return sum(_size(v) for v in {*views}) + sum(_size(v) for v in {*_outputs(launch)})


def _idle_experts(views: tuple[View, ...]) -> int:
    """M rows visit at most M groups."""
    rows, weights = views[0], views[1]
    if len(weights.shape) != 3 or not rows.shape or not weights.shape[0]:
        return 0
    groups = weights.shape[0]
    size = sum(_size(v) for v in views[1:] if len(v.shape) == 3 and v.shape[0] == groups)
    return size * max(0, groups - rows.shape[0]) // groups


def _grouped_part(launch: Launch, views: tuple[View, ...], place: int) -> Work:
    """Argument `place` is the expected share of the rows."""
    x, weights = views[0], [v for v in views[1:] if len(v.shape) == 3]
    share = launch.args[place]
    assert isinstance(share, float)
    all_rows, k = x.shape
    groups, n = weights[0].shape[0], _outputs(launch)[0].shape[1]
    rows = max(1, round(all_rows * share))
    chosen = groups * (1.0 - (1.0 - min(1.0, share / groups)) ** all_rows)
    num_bytes = round(sum(map(_size, weights)) * chosen / groups) + rows * (k + n) * item_bytes(x.dtype)
    is_packed = len(weights) > 1
    shape = () if is_packed else (max(1, round(chosen)), rows, n, k)
    cpu_bytes = UNPACKING * round(chosen * (n * k * item_bytes(x.dtype))) if is_packed else 0
    return Work(OpClass.GROUPED, x.dtype, 2.0 * rows * n * k, num_bytes, shape, cpu_bytes=cpu_bytes)


def _unpacked(views: tuple[View, ...]) -> int:
    """Experts count as far as rows visit them."""
    x, codes = views[:2]
    experts = min(codes.shape[0], x.shape[0]) if len(codes.shape) == 3 else 1
    return experts * codes.shape[-2] * x.shape[-1] * item_bytes(x.dtype)


def _idle_rows(views: tuple[View, ...]) -> int:
    """Rows without a sequence, read and written."""
    state, _, rows = views[-3:]
    num = state.shape[0]
    return 2 * _size(state) * max(0, num - rows.shape[0]) // num


def _gemm(op: OpClass, base: str, launch: Launch, views: tuple[View, ...]) -> tuple[float, tuple[int, ...]]:
    first = 1 if base in ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation") else 0
    outputs = _outputs(launch)
    if len(views) <= first or not outputs or not views[first].shape:
        return 0.0, ()
    result, left = outputs[0], views[first].shape
    if base == "lora":  # y, x, and two matrices per adapter, of which a row has one pair
        rank = views[2].shape[1]
        return 2.0 * rank * (views[1].num_elements + result.num_elements), ()
    k = left[-1]
    summed = left[0] if base == "addbmm" else 1
    flops = 2.0 * k * result.num_elements * summed
    # No table has quantised weights. Operations count in the input's type; FP8 with blocks of scales takes
    # 0.8 of that on Hopper, where the tables' FP8 takes half.
    if "pack_mm" in base or base.startswith("packed_"):
        return flops, ()
    right = views[first + 1].shape if len(views) > first + 1 else ()
    n = result.shape[-1] if len(right) > 1 and result.shape else 1
    rows = result.num_elements // n if n else 0
    if op is OpClass.GROUPED:
        return flops, (right[0], rows, n, k) if len(right) == 3 else ()
    batch = max(1, math.prod(right[:-2]))
    return flops, (batch, rows * summed // batch, n, k)


def _conv_flops(launch: Launch, views: tuple[View, ...]) -> float:
    """One filter per output element (transposed: input element)."""
    outputs = _outputs(launch)
    if len(views) < 2 or not outputs or len(views[1].shape) < 2:
        return 0.0
    per_element = views[1].num_elements // max(1, views[1].shape[0])
    transposed = len(launch.args) > 6 and launch.args[6] is True
    return 2.0 * per_element * (views[0] if transposed else outputs[0]).num_elements


def _attention(kernel: Kernel, launch: Launch, views: tuple[View, ...]) -> Work:
    base = _base(kernel.name)
    if base == "paged_attention":
        return _paged(launch, views)
    num_bytes = _touched(launch) if launch.accesses else _seen(launch, views)
    if len(views) < 3 or len(views[0].shape) != 4 or len(views[1].shape) != 4:
        # Lengths of packed sequences are data, so operations are unknown.
        return Work(OpClass.OTHER, _dtype(launch, views), 0.0, num_bytes)
    sequence, heads = (1, 2) if base.endswith("_attention_forward") else (2, 1)
    query, key, value = views[:3]
    num_q, num_k = query.shape[sequence], key.shape[sequence]
    pairs = float(num_q * num_k)
    causal = _is_causal(kernel, launch) and num_k >= num_q
    if causal:
        pairs -= num_q * (num_q - 1) / 2
    width = query.shape[3] + value.shape[3]
    flops = 2.0 * query.shape[0] * query.shape[heads] * pairs * width
    op = OpClass.DECODE if num_q <= MAX_DECODE_QUERIES else OpClass.PREFILL
    shape = (query.shape[0], num_q, num_k, query.shape[heads], key.shape[heads], query.shape[3], int(causal))
    overhead = attention_overhead(
        base, op is OpClass.DECODE, len(launch.args) > 3 and isinstance(launch.args[3], View)
    )
    return Work(op, query.dtype, flops, num_bytes, shape, overhead)


def _paged(launch: Launch, views: tuple[View, ...]) -> Work:
    query, keys, values, _, starts = views[:5]
    num, heads, width = query.shape
    kv_heads, value_width = values.shape[2:]
    _, window, _, _, length, _, *tails = launch.args[7:]
    assert isinstance(window, int)
    assert isinstance(length, int)
    sequences = max(1, min(num, starts.shape[0]))
    queries = -(-num // sequences)
    held = max(length, queries)
    seen = held - (queries - 1) / 2
    read = held
    if window:
        seen, read = min(seen, window), min(held, window + queries - 1)
    tail = tails[1].shape[-1] if tails and isinstance(tails[1], View) else 0
    is_shared = keys == values  # latents are both, of one head
    held_width = width + tail if is_shared else kv_heads * (width + tail + value_width)
    flops = 2.0 * num * heads * seen * (width + tail + value_width)
    pages = sequences * read * held_width * item_bytes(keys.dtype)
    num_bytes = pages + _size(query) + sum(_size(v) for v in _outputs(launch))
    op = OpClass.DECODE if queries <= MAX_DECODE_QUERIES else OpClass.PREFILL
    overhead: Overhead = (("paged_stream", 1.0),) if op is OpClass.DECODE else ()
    shape = (sequences, queries, read, heads, kv_heads, width, 1)
    return Work(op, query.dtype, flops, num_bytes, shape, overhead)


def _is_causal(kernel: Kernel, launch: Launch) -> bool:
    before, named, _ = kernel.schema.partition(" is_causal")
    place = before.count(",")
    argument = launch.args[place] if named and len(launch.args) > place else None
    return dict(launch.kwargs).get("is_causal", argument) is True
