"""Divides products of a trace: a model larger than a device is spread over several.

A grouped product becomes parts with some experts each, and joins that copy rows; a plain product becomes
concatenated parts of its columns. Values are those of the undivided product, but for a library's rounding of
narrower products and of 16-bit experts. Parts are joined from the last to the first, so that the last can be
joined on another device and cross as one.

Not handled: plain products with packed weights, and weights of several launches.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import structs

from tessera.capture.operators import argument_accesses, byte_region
from tessera.ir import Access, Buffer, BufferKind, Cluster, Kernel, Launch, Origin, Trace, View, verify
from tessera.ir.trace import Arg, item_bytes
from tessera.kernels import PARTS, grouped, packing  # noqa: F401 - registers the operators

# Share of a card's memory for weights, and part of it from which a plain product is divided.
USABLE, LARGE = 0.8, 8
JOINS = ("tessera.grouped_join.default", "aten.cat.default")
PLAIN = ("aten.mm.default", "aten.addmm.default")
PACKED = 7
GROUPED = {
    "aten._grouped_mm.default": torch.ops.tessera.grouped_part.default,
    "tessera.packed_grouped.default": torch.ops.tessera.packed_part.default,
}


@dataclass(frozen=True, slots=True)
class DivideConfig:
    num_parts: int = 4
    # Least weight bytes; None: never.
    plain_bytes: int | None = None


def division_for(cluster: Cluster, traces: Sequence[Trace]) -> DivideConfig | None:
    """None unless GPUs beside their host cannot hold the model."""
    cards = [d.memory_bytes for d in cluster.devices if not d.is_cpu]
    weights = sum(b.size_bytes for b in traces[-1].buffers if b.kind is BufferKind.WEIGHT)
    if len(cards) == len(cluster.devices) or not cards or weights <= USABLE * min(cards):
        return None
    return DivideConfig(plain_bytes=min(cards) // LARGE)


def divided(
    cluster: Cluster, traces: Sequence[Trace], frequencies: Mapping[str, Sequence[float]]
) -> list[Trace]:
    config = division_for(cluster, traces)
    return list(traces) if config is None else [divide(trace, config, frequencies) for trace in traces]


def divide(
    trace: Trace, config: DivideConfig, frequencies: Mapping[str, Sequence[float]] | None = None
) -> Trace:
    """`frequencies`: scope of a mixture -> how often each expert is chosen."""
    writer = _Writer(trace, config, frequencies or {})
    for launch in trace.launches:
        writer.add(launch)
    divided = writer.done()
    verify(divided)
    return divided


def experts_of(trace: Trace) -> dict[int, tuple[str, int, int]]:
    parts = {}
    for number, launch in enumerate(trace.launches):
        place = PARTS.get(trace.kernels[launch.kernel].name)
        if place is not None:
            weight, first = launch.args[1], launch.args[place + 1]
            assert isinstance(weight, View)
            assert isinstance(first, int)
            parts[number] = launch.scope, first, weight.shape[0]
    return parts


class _Writer:
    def __init__(
        self, trace: Trace, config: DivideConfig, frequencies: Mapping[str, Sequence[float]]
    ) -> None:
        self._trace, self._config, self._frequencies = trace, config, frequencies
        self._kernels, self._buffers = list(trace.kernels), list(trace.buffers)
        self._launches: list[Launch] = []
        self._operators: dict[Any, int] = {}
        self._readers = Counter(b for x in trace.launches for b in {view.buffer for view in x.arg_views})
        self._readers.update(view.buffer for _, view in trace.outputs)

    def add(self, launch: Launch) -> None:
        name = self._trace.kernels[launch.kernel].name
        if name in GROUPED and (ends := self._expert_ends(launch)):
            self._divide_experts(launch, GROUPED[name], ends)
        elif name in PLAIN and (ends := self._column_ends(launch)):
            self._divide_columns(launch, ends)
        else:
            self._launches.append(launch)

    def done(self) -> Trace:
        buffers, launches = tuple(self._buffers), tuple(self._launches)
        return replace(self._trace, kernels=tuple(self._kernels), buffers=buffers, launches=launches)

    def _is_own(self, view: Arg, rank: int | None = None) -> bool:
        if not isinstance(view, View) or view.offset or rank not in (None, len(view.shape)):
            return False
        buffer = self._trace.buffers[view.buffer]
        size = view.num_elements * item_bytes(view.dtype)
        is_weight = buffer.kind is BufferKind.WEIGHT and not buffer.constant_hex
        return is_weight and size == buffer.size_bytes and self._readers[view.buffer] == 1

    def _expert_ends(self, launch: Launch) -> list[int]:
        x, *weights, offsets = _mixture(launch)
        views = [view for view in weights if isinstance(view, View)]
        if not (isinstance(x, View) and isinstance(offsets, View) and len(x.shape) == 2 and views):
            return []
        for view in views:
            is_outer = len(view.shape) == 3 and view.stride[0] == view.shape[1] * view.shape[2]
            if not is_outer or not self._is_own(view) or view.shape[0] != views[0].shape[0]:
                return []
        return _ends(views[0].shape[0], self._config.num_parts)

    def _column_ends(self, launch: Launch) -> list[int]:
        weight, result = launch.args[-1], launch.outputs[0]
        least = self._config.plain_bytes
        if least is None or launch.kwargs or not self._is_own(weight) or result is None:
            return []
        assert isinstance(weight, View)
        is_dense = weight.stride in ((weight.shape[1], 1), (1, weight.shape[0]))
        if not is_dense or self._trace.buffers[weight.buffer].size_bytes < least:
            return []
        if len(launch.args) == 3 and not self._is_own(launch.args[0], rank=1):
            return []
        return _ends(weight.shape[1], self._config.num_parts)

    def _divide_experts(self, launch: Launch, product: Any, ends: Sequence[int]) -> None:
        x, *weights, offsets = _mixture(launch)
        result = launch.outputs[0]
        assert result is not None
        assert isinstance(weights[0], View)
        num, form = weights[0].shape[0], launch.args[5:]  # of a packed weight
        parts: list[tuple[int, int, float, View]] = []
        for first, last in zip([0, *ends[:-1]], ends, strict=True):
            experts = (self._experts(weight, first, last, not form) for weight in weights)
            share = self._share(launch.scope, first, last, num)
            into = result if last == num else self._temporary(result)
            args = (x, *experts, offsets, first, share, *form)
            parts.append((first, last, share, self._append(product, args, into, launch.scope)))
        for first, last, share, part in reversed(parts[:-1]):
            args = (result, part, offsets, first, last, share)
            self._append(torch.ops.tessera.grouped_join.default, args, result, launch.scope, is_new=False)

    def _experts(self, weight: Arg, first: int, last: int, may_turn: bool) -> Arg:
        if not isinstance(weight, View):  # a packed weight without zeros
            return weight
        (num, depth, width), stride, turned = weight.shape, weight.stride, ""
        # A CPU reads rows of outputs faster: 57 against 40 GB/s of bfloat16 on 15 cores.
        if may_turn and stride[1:] == (width, 1) and item_bytes(weight.dtype) == 2 and depth % 8 == 0:
            stride, turned = (stride[0], 1, depth), f",{depth}x{width}"
        each = stride[0] * item_bytes(weight.dtype)
        buffer = self._part(weight.buffer, first * each, last * each, num * each, turned)
        return structs.replace(weight, buffer=buffer, shape=(last - first, depth, width), stride=stride)

    def _divide_columns(self, launch: Launch, ends: Sequence[int]) -> None:
        *before, x, weight = launch.args
        result = launch.outputs[0]
        assert isinstance(weight, View)
        assert result is not None
        item, (depth, width) = item_bytes(weight.dtype), weight.shape
        is_rows = weight.stride[1] == depth  # columns of the product are rows in memory
        each, total = (depth * item, depth * width * item) if is_rows else (item, width * item)
        parts = []
        for first, last in zip([0, *ends[:-1]], ends, strict=True):
            num = last - first
            buffer = self._part(weight.buffer, first * each, last * each, total)
            stride = (1, depth) if is_rows else (num, 1)
            columns = structs.replace(weight, buffer=buffer, shape=(depth, num), stride=stride)
            operands = [x, columns]
            for bias in before:
                assert isinstance(bias, View)
                size = item_bytes(bias.dtype)
                where = self._part(bias.buffer, first * size, last * size, width * size)
                operands.insert(0, structs.replace(bias, buffer=where, shape=(num,)))
            product = (torch.ops.aten.addmm if before else torch.ops.aten.mm).default
            parts.append(self._append(product, tuple(operands), self._temporary(result, num), launch.scope))
        joined = parts[-1]
        for number in reversed(range(len(parts) - 1)):
            width = parts[number].shape[1] + joined.shape[1]
            into = result if number == 0 else self._temporary(result, width)
            args = ((parts[number], joined), -1)
            joined = self._append(torch.ops.aten.cat.default, args, into, launch.scope)

    def _share(self, scope: str, first: int, last: int, num: int) -> float:
        often = self._frequencies.get(scope)
        if not often or len(often) != num or not sum(often):
            return (last - first) / num
        return sum(often[first:last]) / sum(often)

    def _part(self, whole: int, first: int, last: int, width: int, turned: str = "") -> int:
        """Bytes `first` to `last` of every `width` of a weight, named for `execute.memory.part_of`."""
        buffer = self._trace.buffers[whole]
        size = buffer.size_bytes // width * (last - first)
        part = Buffer(f"{buffer.name}[{first}:{last}/{width}{turned}]", BufferKind.WEIGHT, size)
        if first == 0:
            self._buffers[whole] = part
            return whole
        self._buffers.append(part)
        return len(self._buffers) - 1

    def _temporary(self, like: View, width: int | None = None) -> View:
        shape = (like.shape[0], width or like.shape[1])
        size = shape[0] * shape[1] * item_bytes(like.dtype)
        self._buffers.append(Buffer(f"t{len(self._buffers)}", BufferKind.TEMPORARY, size))
        return View(len(self._buffers) - 1, like.dtype, shape, (shape[1], 1))

    def _append(self, func: Any, args: tuple[Arg, ...], out: View, scope: str, is_new: bool = True) -> View:
        """`is_new`: `out` is a result; otherwise an argument that the launch changes."""
        if func not in self._operators:
            self._kernels.append(Kernel(str(func), Origin.ATEN, str(func._schema)))
            self._operators[func] = len(self._kernels) - 1
        accesses = argument_accesses(func._schema, args, {})
        if is_new and (touched := byte_region(out)) is not None:
            accesses.append(Access(out.buffer, touched, write=True))
        outputs = (out,) if is_new else ()
        self._launches.append(Launch(self._operators[func], args, (), outputs, tuple(accesses), scope))
        return out


def _mixture(launch: Launch) -> tuple[Arg, ...]:
    """Rows, weight (packed: codes, scales and zeros) and offsets."""
    options = dict(launch.kwargs)
    if len(launch.args) == PACKED:
        return launch.args[:5]
    args = launch.args
    if "offs" in options:
        args = (*args, options.pop("offs"))
    has_more = any(value is not None for value in (*args[3:], *options.values()))
    return (None, None, None) if has_more else args[:3]


def _ends(num: int, parts: int) -> list[int]:
    parts = min(num, parts)
    return [num * (n + 1) // parts for n in range(parts)] if parts > 1 else []
