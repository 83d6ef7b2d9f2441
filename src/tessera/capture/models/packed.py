"""Quantised checkpoints as published: weights stay packed in memory, products are one operator.

`packed_tensors` groups a folder's tensors into `PackedWeight`s, by suffix (`_READERS`):

    gptq     4, 8 bits          int32, packed along inputs
    awq      gemm, 4 bits       int32, interleaved outputs
    pack     compressed-tensors, packed
    scaled   compressed-tensors, fp8, fbgemm_fp8, modelopt: one scale per tensor, row, group or block
    mxfp4

A `PackedWeight` is a parameter: transformers renames, stacks and joins it, so no model needs code of its own.

Not handled: quantised activations and caches (products are weight-only), 2 and 3 bits. torchao's weights are
read by transformers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn.functional import linear

from tessera.capture.models.checkpoint import AGAIN, CONVERT, Tensors, read_json
from tessera.errors import CaptureError, first_line
from tessera.ir.files import packaged
from tessera.kernels import packing
from tessera.kernels.packing import MIDDLE, MXFP4_BLOCK, num_columns, pack_nibbles, unpack_nibbles

UNSUPPORTED = packaged("capture.models", "unsupported.json", dict[str, str])
PACKINGS = ("quantization_config", "compression_config")
MODELOPT = "hf_quant_config.json"
ELSEWHERE = ("torchao",)
# Columns of AWQ's eight codes in 32 bits, by code.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packing:
    """A block of 0 rows or columns covers all."""

    methods: tuple[str, ...]
    bits: int
    # Stored GPTQ zeros are one less.
    is_offset: bool = False
    # Suffixes that every weight has, beside its scales.
    needed: tuple[str, ...] = ()
    # Bits of the layers that a pattern fits; the first counts.
    others: tuple[tuple[str, int], ...] = ()
    # Rows and columns that share a scale, where the shapes do not tell.
    block: tuple[int, int] = (128, 128)
    # Columns of a group; the last may have fewer. 0: groups of one size.
    group: int = 0


def packing_of(folder: Path, settings: Mapping[str, Any]) -> Packing | None:
    """None for plain weights."""
    inner = settings.get("text_config")
    places = [settings, inner if isinstance(inner, dict) else {}]
    config = next((place[name] for place in places for name in PACKINGS if place.get(name)), None)
    if config is None and (folder / MODELOPT).exists():
        config = {**(read_json(folder / MODELOPT).get("quantization") or {}), "quant_method": "modelopt"}
    if not isinstance(config, dict):
        return None
    method = str(config.get("quant_method", "compressed-tensors" if "config_groups" in config else ""))
    if method in ELSEWHERE:
        return None
    if method not in _METHODS:
        name = UNSUPPORTED.get(method, method or "quantised (without quant_method)")
        raise CaptureError(f"{name} weights are not supported", CONVERT, str(folder))
    try:
        return _METHODS[method](config)
    except _Unsupported as error:
        raise CaptureError(f"{error} weights are not supported", CONVERT, str(folder)) from error


class _Unsupported(Exception):
    """Names a variant of a method."""


def _integer(config: Mapping[str, Any]) -> Packing:
    method, bits = str(config["quant_method"]), config.get("bits", 4)
    dynamic = (config.get("dynamic") or {}).items()
    others = tuple((key.removeprefix("+:"), (value or {}).get("bits", bits)) for key, value in dynamic)
    for each in (bits, *(layer_bits for _, layer_bits in others)):
        if each not in ((4,) if method == "awq" else (4, 8)):
            raise _Unsupported(f"{method.upper()} {each}-bit")
    layouts = ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
    layout = str(config.get("version" if method == "awq" else "checkpoint_format") or layouts[0]).lower()
    if layout not in layouts:
        raise _Unsupported(f"{method.upper()} {layout}")
    flags = {".qzeros": config.get("zero_point", True), ".g_idx": config.get("desc_act")}
    needed = tuple(key for key, flag in flags.items() if flag)
    return Packing((method,), bits, layout == "gptq", needed, others, group=_group(config))


def _float8(config: Mapping[str, Any]) -> Packing:
    algorithm = str(config.get("quant_algo", "FP8"))
    if algorithm != "FP8":
        raise _Unsupported(f"ModelOpt {algorithm}")
    return Packing(("scaled",), 8, block=_block(config.get("weight_block_size")))


def _compressed(config: Mapping[str, Any]) -> Packing:
    kind = str(config.get("format", ""))
    groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, dict)]
    weights = [g["weights"] for g in groups if isinstance(g.get("weights"), dict)]
    kinds = {str(g.get("format") or kind) for g in groups} or {kind}
    for each in sorted(kinds - {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}):
        raise _Unsupported(f"compressed-tensors {each or 'unnamed'}")
    if config.get("transform_config"):
        raise _Unsupported("compressed-tensors transformed")
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise _Unsupported(f"compressed-tensors {sparse}")
    bits = {w.get("num_bits", 8) for w in weights}
    for each in sorted(bits - ({4, 8} if "pack-quantized" in kinds else {8})):
        raise _Unsupported(f"compressed-tensors {kind} {each}-bit")
    block = next((w["block_structure"] for w in weights if w.get("block_structure")), None)
    sizes = {_group(w) for w in weights}
    is_whole = kinds == {"pack-quantized"} and all(w.get("symmetric") is False for w in weights)
    return Packing(
        ("pack", "scaled"), max(bits, default=8), needed=("_zero_point",) if is_whole else (),
        block=_block(block), group=sizes.pop() if len(sizes) == 1 else 0,
    )  # fmt: skip


def _group(config: Mapping[str, Any]) -> int:
    size = config.get("group_size")
    return size if isinstance(size, int) and size > 0 else 0


def _block(sizes: Any) -> tuple[int, int]:
    if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(x, int) and x > 0 for x in sizes):
        return sizes[0], sizes[1]
    return 128, 128


_METHODS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "gptq": _integer, "awq": _integer, "fp8": _float8, "fbgemm_fp8": _float8, "modelopt": _float8,
    "compressed-tensors": _compressed, "mxfp4": lambda config: Packing(("mxfp4",), 4),
}  # fmt: skip


@dataclass(frozen=True)
class Code:
    format: str
    block: tuple[int, int]
    is_turned: bool = False
    # Digests, one for each expert.
    orders: tuple[str, ...] = ()


class PackedWeight(torch.Tensor):
    """A weight in packed memory, with the shape and type of its numbers."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    code: Code

    @staticmethod
    def __new__(cls: type, code: Code, dtype: torch.dtype, **parts: torch.Tensor | None) -> "PackedWeight":
        codes = parts["codes"]
        assert codes is not None
        shape = [*codes.shape[:-1], num_columns(codes, code.format, code.block)]
        if code.is_turned:
            shape[-2:] = shape[:-3:-1]
        weight: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        weight.code = code
        for name in ("codes", "scales", "zeros", "order"):
            setattr(weight, name, parts.get(name))
        return weight  # type: ignore[no-any-return]

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        named = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "order": self.order}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def form(self) -> object:
        """Equal for weights that can be joined along rows."""
        return self.code if self.codes.shape[-2] % self.code.block[0] == 0 else id(self)

    def each(
        self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
    ) -> "PackedWeight":
        parts = {name: change(tensor) for name, tensor in self.parts.items()}
        return PackedWeight(self.code, dtype or self.dtype, **parts)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.parts), (self.code, self.dtype)

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> "PackedWeight":
        return PackedWeight(*context, **parts)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight({tuple(self.shape)}, {self.dtype}, {self.code})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PRODUCTS:
                return _PRODUCTS[func](*args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket not in _CHANGES:
            _refuse(f"{func}")
        return _CHANGES[func.overloadpacket](*args, **(kwargs or {}))


def _refuse(what: str) -> NoReturn:
    raise CaptureError(f"the model does something that packed weights do not support: {what}", CONVERT)


def _linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    if weight.code.is_turned or weight.dim() != 2:
        _refuse("linear with an exchanged or stacked weight")
    operands = weight.codes, weight.scales, weight.zeros, weight.order, bias
    out: torch.Tensor = torch.ops.tessera.packed_linear(x, *operands, weight.code.format, weight.code.block)
    return out


def _grouped(x: torch.Tensor, weight: PackedWeight, *, offs: torch.Tensor, **_: Any) -> torch.Tensor:
    if not weight.code.is_turned:
        _refuse("this grouped product")
    if weight.order is not None:
        rows = torch.arange(len(x), dtype=offs.dtype, device=x.device)
        expert = torch.searchsorted(offs, rows, right=True).clamp_max(len(weight) - 1)
        x = x.gather(1, weight.order[expert])
    operands = weight.codes, weight.scales, weight.zeros, offs
    out: torch.Tensor = torch.ops.tessera.packed_grouped(x, *operands, weight.code.format, weight.code.block)
    return out


def _times(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    if isinstance(x, PackedWeight):
        _refuse("a product from the left")
    return _linear(x, _turned(weight))


def _turned(tensor: PackedWeight, first: int = -2, second: int = -1) -> PackedWeight:
    if {first % tensor.dim(), second % tensor.dim()} != {tensor.dim() - 2, tensor.dim() - 1}:
        _refuse("exchange of other dimensions than the last two")
    code = replace(tensor.code, is_turned=not tensor.code.is_turned)
    return PackedWeight(code, tensor.dtype, **tensor.parts)


def _copied(tensor: PackedWeight, **options: Any) -> PackedWeight:
    device, dtype = options.get("device"), options.get("dtype")
    return tensor.each(lambda part: part.to(device=device), dtype)


def _joined(tensors: Sequence[PackedWeight], dim: int = 0, *, is_new: bool = False) -> PackedWeight:
    """`is_new`: along a dimension of its own."""
    first, rank = tensors[0], tensors[0].dim() + is_new
    dim %= rank
    codes = [replace(t.code, orders=()) if is_new else t.code for t in tensors]
    begins_block = all(t.codes.shape[-2] % t.code.block[0] == 0 for t in tensors[:-1])
    if len(set(codes)) > 1 or first.code.is_turned or dim > rank - (3 if is_new else 2) or not begins_block:
        _refuse("joining weights of different forms")
    parts = [t.parts for t in tensors]
    if any("zeros" in p for p in parts):
        middle = MIDDLE.get(first.code.format, 0)
        parts = [{"zeros": torch.full_like(p["scales"], middle, dtype=torch.int8), **p} for p in parts]
    join = torch.stack if is_new else torch.cat
    code, order = first.code, first.order
    if is_new and any(t.order is not None for t in tensors):
        same = torch.arange(first.shape[-1], device=first.device)
        order = torch.stack([same if t.order is None else t.order for t in tensors])
        code = replace(code, orders=tuple(digest for t in tensors for digest in t.code.orders or ("",)))
    joined = {n: join([p[n] for p in parts], dim) for n in parts[0] if n != "order"}
    return PackedWeight(code, first.dtype, **joined, order=order)


def _rows(tensor: PackedWeight, dim: int = 0, start: int | None = 0, end: int | None = None) -> PackedWeight:
    begin, stop, _ = slice(start, end).indices(tensor.shape[0])
    block = tensor.code.block[0]
    if dim or tensor.dim() != 2 or tensor.code.is_turned or begin % block:
        _refuse("a slice of columns")
    blocks = slice(begin // block, -(-stop // block))
    cuts = {"codes": slice(begin, stop), "scales": blocks, "zeros": blocks, "order": slice(None)}
    return PackedWeight(tensor.code, tensor.dtype, **{n: t[cuts[n]] for n, t in tensor.parts.items()})


def _same(tensor: PackedWeight, *_: Any, **__: Any) -> PackedWeight:
    return PackedWeight(tensor.code, tensor.dtype, **tensor.parts)


_aten = torch.ops.aten
_transposed = torch.Tensor.T.__get__  # type: ignore[attr-defined]
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    linear: _linear, torch._grouped_mm: _grouped, torch.nn.functional.grouped_mm: _grouped,
    torch.transpose: _turned, torch.Tensor.transpose: _turned, _transposed: _turned,
    torch.matmul: _times, torch.Tensor.matmul: _times, torch.Tensor.__matmul__: _times,
}  # fmt: skip
_CHANGES: dict[Any, Callable[..., Any]] = {
    _aten.detach: _same, _aten.alias: _same, _aten.clone: lambda t, **_: t.each(torch.clone),
    _aten._to_copy: _copied, _aten.cat: _joined, _aten.slice: _rows,
    _aten.stack: lambda tensors, dim=0: _joined(tensors, dim, is_new=True),
}  # fmt: skip


class Unread:
    """A tensor that is read when transformers copies it."""

    # transformers goes on after an error and names other tensors.
    error: CaptureError | None = None

    def __init__(self, read: Callable[[], torch.Tensor], dtype: str = "F32") -> None:
        self._read, self._dtype = read, dtype

    def __getitem__(self, _: Any) -> "Unread":
        return self

    def to(self, device: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        try:
            tensor = self._read()
        except CaptureError as error:
            self.error = error
            raise
        return tensor.to(device=tensor.device if tensor.is_meta else device, dtype=dtype)

    def get_dtype(self) -> str:
        return self._dtype


def outline(tensor: Any) -> torch.Tensor:
    shape = tensor.get_shape()
    return torch.empty(shape, dtype=tensor[slice(0) if shape else ...].dtype, device="meta")


def put_packed(model: torch.nn.Module, source: torch.nn.Module) -> torch.nn.Module:
    def empty(part: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(part.size(), part.stride(), dtype=part.dtype)

    for name, weight in source.named_parameters():
        if isinstance(weight, PackedWeight):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, torch.nn.Parameter(weight.each(empty)))
    return model


def packed_tensors(
    tensors: Tensors, packing: Packing, dtype: torch.dtype, shapes: Mapping[str, Sequence[int]],
    is_outline: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """`shapes`: the model's parameters; a weight of exchanged shape is exchanged. `is_outline`: none has
    values; only zeros and groups are read, which decide what a weight consists of.
    """
    result = dict(tensors)
    if is_outline:
        result = {name: Unread(partial(outline, t), t.get_dtype()) for name, t in tensors.items()}
    readers = [_READERS[method] for method in packing.methods]
    for name, (suffix, renamed, beside, types, read) in product(tensors, readers):
        base = name.removesuffix(suffix)
        parts = {key: tensors[base + key] for key in beside if base + key in tensors}
        if not name.endswith(suffix) or not (parts or suffix):
            continue
        if lacking := [key for key in (beside[0], *packing.needed) if suffix and key not in parts]:
            raise CaptureError(f"its weights lack {base}{lacking[0]}", AGAIN)
        for part in (name, *(base + key for key in parts)):
            del result[part]
        target = base + renamed
        bits = next((bits for pattern, bits in packing.others if re.match(pattern, base)), packing.bits)
        layer_packing = replace(packing, bits=bits)
        arguments = target, types, partial(read, packing=layer_packing, dtype=dtype), tensors[name], parts
        result[target] = Unread(partial(_read, *arguments, shapes.get(target), is_outline))
    return result


def _read(
    name: str, types: Sequence[torch.dtype], read: Callable[..., PackedWeight], weight: Any, parts: Tensors,
    shape: Sequence[int] | None, is_outline: bool,
) -> PackedWeight:  # fmt: skip
    tensor = outline(weight) if is_outline else weight[...]
    held = {key: outline(x) if is_outline and "scale" in key else x[...] for key, x in parts.items()}
    if tensor.dtype not in types or tensor.dim() < 2:
        raise CaptureError(f"{name} is packed as {tuple(tensor.shape)} of {tensor.dtype}", AGAIN)
    try:
        packed = read(tensor, held)
    except (RuntimeError, LookupError, ZeroDivisionError) as error:
        raise CaptureError(f"{name} cannot be unpacked: {first_line(error)}", AGAIN) from error
    form, block = packed.code.format, packed.code.block
    rows = packed.codes.shape[-2], num_columns(packed.codes, form, block)
    blocks = [*packed.codes.shape[:-2], *(-(-n // b) for n, b in zip(rows, block, strict=True))]
    for part in (packed.scales, packed.zeros):
        if part is not None and list(part.shape) != blocks:
            message = f"{name} has scales or zeros of shape {list(part.shape)}, where {blocks} fits"
            raise CaptureError(message, AGAIN)
    if packed.scales.is_floating_point() != (form != "mxfp4"):
        raise CaptureError(f"{name} has scales of {packed.scales.dtype}", AGAIN)
    if is_outline:
        packed = packed.each(lambda part: part.to("meta"))
    if packing.can_tile(packed.codes, packed.scales, form, block):
        codes, scales, tiled, block = packing.tile(packed.codes, packed.scales, packed.zeros, form, block)
        code = replace(packed.code, format=tiled, block=block)
        packed = PackedWeight(code, packed.dtype, codes=codes, scales=scales, order=packed.order)
    exchanged = [*packed.shape[:-2], *packed.shape[:-3:-1]]
    # Square experts of MXFP4 (gpt-oss) are exchanged too.
    is_sure = list(packed.shape) != exchanged or form == "mxfp4"
    is_exchanged = shape is not None and list(shape) == exchanged and is_sure
    return _turned(packed, -2, -1) if is_exchanged else packed


def _bytes(words: torch.Tensor) -> torch.Tensor:
    return words.flatten().view(torch.uint8).view(len(words), -1)


def _small(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return unpack_nibbles(codes) if bits == 4 else codes


def _integers(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, packing: Packing,
    dtype: torch.dtype, groups: torch.Tensor | None = None,
) -> PackedWeight:  # fmt: skip
    bits = packing.bits
    columns = codes.shape[1] * 8 // bits
    size = _columns(columns, scales.shape[1], packing)
    sorted_groups = torch.arange(columns) // size
    order, orders = None, tuple[str, ...]()
    if groups is not None and not torch.equal(groups.long(), sorted_groups):
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order].long(), sorted_groups):
            raise IndexError(f"g_idx has no groups of {size} columns")
        orders = (blake2b(order.numpy().tobytes(), digest_size=8).hexdigest(),)
        codes = _small(codes, bits)[:, order]
        codes = pack_nibbles(codes) if bits == 4 else codes
    if bits == 8:  # unsigned to signed
        codes = (codes ^ 128).view(torch.int8)
        zeros = None if zeros is None else (zeros ^ 128).view(torch.int8)
    elif zeros is not None and bool((zeros > 15).any()):
        raise IndexError("a zero is no code of 4 bits")
    middle = MIDDLE.get(f"int{bits}", 0)
    if zeros is not None:
        zeros = None if bool((zeros == middle).all()) else zeros.to(torch.int8).contiguous()
    code = Code(f"int{bits}", (1, size), orders=orders)
    parts = {"codes": codes.contiguous(), "scales": scales.contiguous(), "zeros": zeros, "order": order}
    return PackedWeight(code, dtype, **parts)


def _columns(columns: int, groups: int, packing: Packing) -> int:
    is_size = packing.group and -(-columns // packing.group) == groups
    return packing.group if is_size else columns // groups


def _gptq(weight: torch.Tensor, parts: Tensors, packing: Packing, dtype: torch.dtype) -> PackedWeight:
    zeros = None
    if ".qzeros" in parts:
        zeros = _small(_bytes(parts[".qzeros"]), packing.bits).t()
        zeros = (zeros + packing.is_offset) & ((1 << packing.bits) - 1)
    codes = _bytes(weight.t())
    return _integers(codes, parts[".scales"].t(), zeros, packing, dtype, parts.get(".g_idx"))


def _awq(weight: torch.Tensor, parts: Tensors, packing: Packing, dtype: torch.dtype) -> PackedWeight:
    columns = torch.tensor(AWQ_ORDER).argsort()

    def unpacked(words: torch.Tensor) -> torch.Tensor:
        eights = unpack_nibbles(_bytes(words)).view(words.shape[0], -1, 8)
        return eights[..., columns].flatten(1).t()

    zeros = unpacked(parts[".qzeros"]) if ".qzeros" in parts else None
    return _integers(pack_nibbles(unpacked(weight).contiguous()), parts[".scales"].t(), zeros, packing, dtype)


def _pack(weight: torch.Tensor, parts: Tensors, packing: Packing, dtype: torch.dtype) -> PackedWeight:
    codes, zeros = _bytes(weight), parts.get("_zero_point")
    if "_shape" in parts:  # words may have codes of no column
        columns = int(parts["_shape"][1])
        packing = replace(packing, bits=4 if weight.shape[1] == -(-columns // 8) else 8)
        codes = codes[:, : columns * packing.bits // 8]
    if zeros is not None and zeros.dtype is torch.int32:  # packed along rows
        zeros = _small(_bytes(zeros.t()), packing.bits).t()[: len(codes)]
    elif zeros is not None:
        zeros = (zeros.to(torch.int16) + (1 << (packing.bits - 1))).to(torch.uint8)
    return _integers(codes, parts["_scale"], zeros, packing, dtype, parts.get("_g_idx"))


def _scaled(weight: torch.Tensor, parts: Tensors, packing: Packing, dtype: torch.dtype) -> PackedWeight:
    scales, zeros = parts["_scale_inv" if "_scale_inv" in parts else "_scale"], parts.get("_zero_point")
    scales = scales.float() if scales.dtype is torch.float8_e8m0fnu else scales
    rows, columns = weight.shape[-2:]
    blocks = tuple(-(-n // b) for n, b in zip((rows, columns), packing.block, strict=True))
    if scales.numel() == weight[..., 0, 0].numel():  # one for all
        scales = scales.reshape(*weight.shape[:-2], 1, 1).expand(*weight.shape[:-1], 1)
        zeros = None if zeros is None else zeros.reshape(scales[..., :1, :].shape).expand(scales.shape)
    elif scales.dim() < weight.dim():
        scales = scales[..., None]
    block = (1, _columns(columns, scales.shape[-1], packing))
    if tuple(scales.shape[-2:]) == blocks and scales.shape[-2] != rows:
        block = packing.block
    if zeros is not None:
        zeros = zeros.reshape(scales.shape).to(torch.int8).contiguous() if bool(zeros.any()) else None
    code = Code("int8" if weight.dtype is torch.int8 else "fp8", block)
    return PackedWeight(code, dtype, codes=weight.contiguous(), scales=scales.contiguous(), zeros=zeros)


def _mxfp4(weight: torch.Tensor, parts: Tensors, packing: Packing, dtype: torch.dtype) -> PackedWeight:
    code = Code("mxfp4", (1, MXFP4_BLOCK))
    codes, scales = weight.flatten(-2).contiguous(), parts["_scales"].contiguous()
    return PackedWeight(code, dtype, codes=codes, scales=scales)


_WORDS = (torch.int32,)
_BYTES = (torch.int8, torch.float8_e4m3fn)
# Suffix of packed weights, that of the weight, suffixes beside it, types, reader.
_READERS: dict[str, tuple[str, str, tuple[str, ...], Sequence[torch.dtype], Callable[..., PackedWeight]]] = {
    "gptq": (".qweight", ".weight", (".scales", ".qzeros", ".g_idx"), _WORDS, _gptq),
    "awq": (".qweight", ".weight", (".scales", ".qzeros"), _WORDS, _awq),
    "pack": ("_packed", "", ("_scale", "_zero_point", "_g_idx", "_shape"), _WORDS, _pack),
    "scaled": ("", "", ("_scale_inv", "_scale", "_zero_point"), _BYTES, _scaled),
    "mxfp4": ("_blocks", "", ("_scales",), (torch.uint8,), _mxfp4),
}
