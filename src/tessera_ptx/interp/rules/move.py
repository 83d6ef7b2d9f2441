"""Moves, conversions, comparisons and selections."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera_ptx.interp import floats
from tessera_ptx.interp.decode import Decoder, Unknown, only, rule, simple
from tessera_ptx.interp.memory import ARENA, LOCAL, PARAM, SHARED, WINDOW
from tessera_ptx.interp.rules.arith import mode_of
from tessera_ptx.interp.state import Active, Frame, Step
from tessera_ptx.interp.types import PRED, TYPES, U64, Type, types_of
from tessera_ptx.syntax import Instruction, Pair, Vec

Function = Callable[..., Any]
_BASES = {"shared": SHARED, "local": LOCAL, "param": PARAM, "global": 0, "const": 0}


@rule("mov")
def move(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    target, source = ins.operands[0], ins.operands[1]
    if isinstance(target, Vec):
        return _unpack(ins, decoder, kind)
    if isinstance(source, Vec):
        part = TYPES[f"b{kind.bits // len(source.items)}"]
        gets = [decoder.get(item, part) for item in source.items]
        put = decoder.put(target, kind)

        def pack(frame: Frame, act: Active) -> None:
            total = kind.raw.type(0)
            for k, get in enumerate(gets):
                total = total | (get(frame).astype(kind.raw) << kind.raw.type(k * part.bits))
            put(frame, act, total)

        return pack
    return simple(decoder.put(target, kind), lambda a: a, decoder.get(source, kind))


def _unpack(ins: Instruction, decoder: Decoder, kind: Type) -> Step:
    target = ins.operands[0]
    assert isinstance(target, Vec)
    if isinstance(ins.operands[1], Vec):
        raise Unknown("a vector moved to a vector")
    part = TYPES[f"b{kind.bits // len(target.items)}"]
    get, puts = decoder.get(ins.operands[1], kind), decoder.vector_put(target, part)

    def unpack(frame: Frame, act: Active) -> None:
        whole = get(frame)
        for k, put in enumerate(puts):
            put(frame, act, (whole >> kind.raw.type(k * part.bits)).astype(part.raw))

    return unpack


@rule("cvta")
def convert_address(ins: Instruction, decoder: Decoder) -> Step:
    space = next((m.split("::")[0] for m in ins.op.mods if m.split("::")[0] in _BASES), None)
    if space is None:
        raise Unknown("cvta of this space")
    base = np.uint64(_BASES[space])
    kind = only(types_of(ins.op.mods), ins)
    if kind.bits != 64:
        raise Unknown("32-bit generic addresses")
    back = "to" in ins.op.mods
    get, put = decoder.get(ins.operands[1], U64), decoder.put(ins.operands[0], U64)
    return simple(put, (lambda a: a - base) if back else (lambda a: a + base), get)


@rule("isspacep")
def is_space(ins: Instruction, decoder: Decoder) -> Step:
    space = ins.op.mods[0].split("::")[0]
    base = np.uint64({"global": ARENA, **{k: v for k, v in _BASES.items() if v}}.get(space, 0))
    if not base:
        raise Unknown(space)
    inside: Function = lambda a: (a - base) < np.uint64(WINDOW)  # noqa: E731
    return simple(decoder.put(ins.operands[0], PRED), inside, decoder.get(ins.operands[1], U64))


_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_JOIN: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, kind: Type) -> Function:
    """A trailing `u` is true for NaN."""
    to_float: Function = floats.bf16_to_single if kind.name == "bf16" else (lambda a: a)

    def unordered(a: Any, b: Any) -> Any:
        return np.isnan(a) | np.isnan(b)

    def compare(a: Any, b: Any) -> Any:
        a, b = to_float(a), to_float(b)
        if name in ("num", "nan"):
            return unordered(a, b) == (name == "nan")
        if kind.kind != "f":
            return _COMPARE[name](a, b)
        if name.endswith("u"):
            return _COMPARE[name[:-1]](a, b) | unordered(a, b)
        return _COMPARE[name](a, b) & ~unordered(a, b)

    if kind.kind in ("u", "b") or name in ("lo", "ls", "hi", "hs"):
        return lambda a, b: _COMPARE[name](a.view(kind.raw), b.view(kind.raw))
    return compare


@rule("setp", "set")
def compare(ins: Instruction, decoder: Decoder) -> Step:
    kinds, mods = types_of(ins.op.mods), ins.op.mods
    kind = only(kinds, ins)
    if kind.name.endswith("x2"):
        raise Unknown("packed comparison")
    function = comparison(mods[0], kind)
    join = next((_JOIN[m] for m in mods[1:3] if m in _JOIN), None)
    a, b = (decoder.get(o, kind) for o in ins.operands[1:3])
    third = decoder.predicate(ins.operands[3]) if len(ins.operands) > 3 else None
    if ins.op.name == "set":
        return _set(ins, decoder, kinds[0], simple_join(function, join), (a, b, third))
    target = ins.operands[0]
    first = decoder.put(target.first if isinstance(target, Pair) else target, PRED)
    second = decoder.put(target.second, PRED) if isinstance(target, Pair) else None

    def step(frame: Frame, act: Active) -> None:
        truth = np.asarray(function(a(frame), b(frame)))
        yes, no = truth, ~truth
        if join is not None and third is not None:
            other = third(frame)
            yes, no = join(truth, other), join(~truth, other)
        first(frame, act, yes)
        if second is not None:
            second(frame, act, no)

    return step


def simple_join(function: Function, join: Function | None) -> Function:
    if join is None:
        return function
    return lambda a, b, c: join(function(a, b), c)


def _set(ins: Instruction, decoder: Decoder, result: Type, function: Function, gets: Any) -> Step:
    yes = result.dtype.type(1) if result.kind == "f" else (~result.raw.type(0)).view(result.dtype)
    made: Function = lambda *v: np.where(function(*v), yes, result.dtype.type(0))  # noqa: E731
    return simple(decoder.put(ins.operands[0], result), made, *(g for g in gets if g is not None))


@rule("selp")
def select(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    gets = decoder.predicate(ins.operands[3]), *(decoder.get(o, kind) for o in ins.operands[1:3])
    return simple(decoder.put(ins.operands[0], kind), np.where, *gets)


@rule("slct")
def select_by_sign(ins: Instruction, decoder: Decoder) -> Step:
    kinds = types_of(ins.op.mods)
    gets = decoder.get(ins.operands[3], kinds[1]), *(decoder.get(o, kinds[0]) for o in ins.operands[1:3])
    return simple(decoder.put(ins.operands[0], kinds[0]), lambda c, a, b: np.where(c >= 0, a, b), *gets)


@rule("cvt")
def convert(ins: Instruction, decoder: Decoder) -> Step:
    kinds = types_of(ins.op.mods)
    if "pack" in ins.op.mods or len(kinds) != 2:
        raise Unknown("this conversion")
    target, source = kinds
    put = decoder.put(ins.operands[0], target)
    if len(ins.operands) == 3:
        gets = [decoder.get(o, source) for o in ins.operands[1:3]]
        return simple(put, _pack_pair(ins, target, source), *gets)
    get = decoder.get(ins.operands[1], source)
    if source.name in ("e4m3x2", "e5m2x2"):
        return simple(put, _unpack_small(target, source), get)
    if target.kind != "f" and source.kind != "f":
        return simple(put, _between_integers(target, "sat" in ins.op.mods), get)
    return simple(put, _through_floats(ins, target, source), get)


def _between_integers(target: Type, sat: bool) -> Function:
    if not sat:
        return lambda a: a.astype(target.dtype)
    limits = np.iinfo(target.dtype)
    return lambda a: np.clip(a.astype(np.int64), limits.min, min(limits.max, 2**63 - 1)).astype(target.dtype)


def _through_floats(ins: Instruction, target: Type, source: Type) -> Function:
    mods, mode = ins.op.mods, mode_of(ins)
    whole = next((floats.WHOLE[m] for m in mods if m in floats.WHOLE), "")
    ftz, sat, relu = "ftz" in mods, "sat" in mods, "relu" in mods

    def run(a: Any) -> Any:
        value = floats.bf16_to_single(a) if source.name == "bf16" else floats.flush(a, ftz)
        if whole and source.kind == "f":
            value = floats.whole(value, whole)
        if target.kind != "f":
            return _to_integer(value, target, 64 in (source.bits, target.bits))
        result = _to_float(value, target, mode, sat, relu)
        return floats.flush(result, ftz) if target.name == "f32" else result

    return run


def _to_float(value: Any, target: Type, mode: str, sat: bool, relu: bool) -> Any:
    if relu and target.name != "bf16":
        value = np.where(value < 0, value.dtype.type(0), value)
    if target.name == "bf16":
        return floats.single_to_bf16(value.astype(np.float32), mode, relu)
    if target.name == "tf32":
        return floats.single_to_tf32(value, mode)
    if target.name == "f16":
        half = floats.to_half(value, mode)
        return floats.saturate(half) if sat else half
    if target.name == "f32" and mode != "n" and value.dtype != np.float32:
        wide = value.astype(np.float64)
        rest = (
            np.sign((value - wide.astype(value.dtype)).astype(np.float64))
            if value.dtype.kind in "iu"
            else wide * 0
        )
        result = floats.to_single(wide, rest, mode)
    else:
        result = value.astype(target.dtype)
    return floats.saturate(result) if sat else result


def _to_integer(value: Any, target: Type, wide: bool) -> Any:
    """Truncated and clamped; NaN becomes 0, or only the highest bit if either side has 64 bits, as on
    hardware.
    """
    unknown = (
        np.array(1 << (target.bits - 1), target.raw).view(target.dtype) if wide else target.dtype.type(0)
    )
    limits = np.iinfo(target.dtype)
    exact = np.trunc(value.astype(np.float64))
    low, high = exact <= float(limits.min), exact >= float(limits.max)
    middle = np.where(low | high | np.isnan(exact), 0.0, exact).astype(target.dtype)
    result = np.where(high, target.dtype.type(limits.max), middle)
    return np.where(np.isnan(exact), unknown, np.where(low, target.dtype.type(limits.min), result))


def _pack_pair(ins: Instruction, target: Type, source: Type) -> Function:
    """The first operand is the upper half."""
    mode, relu = mode_of(ins), "relu" in ins.op.mods
    if source.name != "f32":
        raise Unknown("a pair of this type")
    if target.name in ("e4m3x2", "e5m2x2"):
        small = target.name[:-2]

        def pack(a: Any, b: Any) -> Any:
            low, high = (floats.single_to_small(v, small).astype(np.uint16) for v in (b, a))
            return low | (high << np.uint16(8))

        return pack
    element = TYPES[target.name[:-2]] if target.name in ("f16x2", "bf16x2") else None
    if element is None:
        raise Unknown(target.name)
    return lambda a, b: floats.join(*(_to_float(v, element, mode, False, relu) for v in (b, a)))


def _unpack_small(target: Type, source: Type) -> Function:
    if target.name != "f16x2":
        raise Unknown(target.name)
    small = source.name[:-2]

    def unpack(a: Any) -> Any:
        low, high = a & np.uint16(0xFF), a >> np.uint16(8)
        return floats.join(*(floats.to_half(floats.small_to_single(v, small)) for v in (low, high)))

    return unpack
