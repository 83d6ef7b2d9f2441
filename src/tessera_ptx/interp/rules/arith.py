"""Integer and float arithmetic; bf16, f16x2 and bf16x2 are split into elements and packed again."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera_ptx.interp import floats
from tessera_ptx.interp.decode import CARRY, Decoder, Unknown, only, rule, simple
from tessera_ptx.interp.state import Active, Frame, Step
from tessera_ptx.interp.types import S32, TYPES, U32, Array, Type, types_of
from tessera_ptx.syntax import Instruction

Function = Callable[..., Any]
_WIDE = {16: 32, 32: 64}


def high_product(a: Any, b: Any, kind: Type) -> Any:
    if kind.bits < 64:
        wide = TYPES[f"{'s' if kind.kind == 's' else 'u'}{kind.bits * 2}"]
        product = a.astype(wide.dtype) * b.astype(wide.dtype)
        return (product >> wide.dtype.type(kind.bits)).astype(kind.dtype)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    low_a, high_a, low_b, high_b = ua & mask, ua >> half, ub & mask, ub >> half
    middle = high_a * low_b + ((low_a * low_b) >> half)
    cross = low_a * high_b + (middle & mask)
    high = high_a * high_b + (middle >> half) + (cross >> half)
    if kind.kind == "s":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.view(kind.dtype)


def divide(a: Any, b: Any) -> Any:
    """Towards zero; by zero, all bits set."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // safe)
    quotient = a // safe
    fix = (a % safe != 0) & ((a < 0) != (safe < 0))
    return np.where(b == 0, a.dtype.type(-1), quotient + fix.astype(a.dtype))


def remainder(a: Any, b: Any) -> Any:
    safe = np.where(b == 0, b.dtype.type(1), b)
    return np.where(b == 0, ~a.dtype.type(0), a - divide(a, safe) * safe)


def saturated(function: Function, kind: Type) -> Function:
    limits = np.iinfo(kind.dtype)

    def clamped(*values: Any) -> Any:
        result = function(*(v.astype(np.int64) for v in values))
        return np.clip(result, limits.min, limits.max).astype(kind.dtype)

    return clamped


def integer_rule(ins: Instruction, decoder: Decoder, function: Function, sources: int) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    if "sat" in ins.op.mods:
        function = saturated(function, kind)
    gets = [decoder.get(o, kind) for o in ins.operands[1 : 1 + sources]]
    return simple(decoder.put(ins.operands[0], kind), function, *gets)


def with_carry(ins: Instruction, decoder: Decoder, function: Function) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    unsigned = TYPES[f"u{kind.bits}"]
    gets = [decoder.get(o, unsigned) for o in ins.operands[1:]]
    put = decoder.put(ins.operands[0], unsigned)
    carry_slot, _ = decoder.slot(CARRY)
    takes, gives, bits = ins.op.name.endswith("c"), "cc" in ins.op.mods, kind.bits

    def step(frame: Frame, act: Active) -> None:
        wide = [np.broadcast_to(g(frame), frame.machine.num_lanes).astype(object) for g in gets]
        carry = frame.regs[carry_slot].astype(int).astype(object) if takes else 0
        exact = function(*wide, carry)
        put(frame, act, np.asarray(exact & ((1 << bits) - 1)).astype(unsigned.dtype))
        if gives:
            flag = np.asarray((exact >> bits) & 1).astype(bool)
            frame.regs[carry_slot] = np.where(act.mask, flag, frame.regs[carry_slot])

    return step


def _part(exact: Any, high: bool, bits: int) -> Any:
    return exact >> bits if high else exact & ((1 << bits) - 1)


@rule("addc", "subc", "madc")
def carried(ins: Instruction, decoder: Decoder) -> Step:
    high, bits = "hi" in ins.op.mods, only(types_of(ins.op.mods), ins).bits
    if ins.op.name == "addc":
        return with_carry(ins, decoder, lambda a, b, c: a + b + c)
    if ins.op.name == "subc":
        return with_carry(ins, decoder, lambda a, b, c: a - b - c)
    if "s32" in ins.op.mods or "s64" in ins.op.mods:
        raise Unknown("signed madc")
    return with_carry(ins, decoder, lambda a, b, c, d: _part(a * b, high, bits) + c + d)


def carry_out(ins: Instruction, decoder: Decoder) -> Step:
    high, bits = "hi" in ins.op.mods, only(types_of(ins.op.mods), ins).bits
    if ins.op.name == "add":
        return with_carry(ins, decoder, lambda a, b, c: a + b)
    if ins.op.name == "sub":
        return with_carry(ins, decoder, lambda a, b, c: a - b)
    return with_carry(ins, decoder, lambda a, b, c, d: _part(a * b, high, bits) + c)


def multiply(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    fused = ins.op.name in ("mad", "mad24")
    if ins.op.name in ("mul24", "mad24"):
        return _multiply24(ins, decoder, kind, fused)
    if "wide" in ins.op.mods:
        return _multiply_wide(ins, decoder, kind)
    if "hi" in ins.op.mods:

        def upper(a: Any, b: Any, *c: Any) -> Any:
            return high_product(a, b, kind) + (c[0] if c else kind.dtype.type(0))

        return integer_rule(ins, decoder, upper, 3 if fused else 2)
    if fused:
        return integer_rule(ins, decoder, lambda a, b, c: a * b + c, 3)
    return integer_rule(ins, decoder, lambda a, b: a * b, 2)


def _multiply_wide(ins: Instruction, decoder: Decoder, kind: Type) -> Step:
    wide = TYPES[f"{kind.kind}{_WIDE[kind.bits]}"]
    gets = [decoder.get(o, kind) for o in ins.operands[1:3]]
    gets += [decoder.get(o, wide) for o in ins.operands[3:]]

    def product(a: Any, b: Any, *c: Any) -> Any:
        return a.astype(wide.dtype) * b.astype(wide.dtype) + (c[0] if c else wide.dtype.type(0))

    return simple(decoder.put(ins.operands[0], wide), product, *gets)


def _multiply24(ins: Instruction, decoder: Decoder, kind: Type, fused: bool) -> Step:
    wide, eight = TYPES[f"{kind.kind}64"], np.int64(40)
    shift = np.int64(16) if "hi" in ins.op.mods else np.int64(0)

    def low24(a: Any) -> Any:
        return (
            ((a.astype(np.int64) << eight) >> eight)
            if kind.kind == "s"
            else a.astype(np.int64) & np.int64(0xFFFFFF)
        )

    def product(a: Any, b: Any, *c: Any) -> Any:
        result = (low24(a) * low24(b)) >> shift
        return result.astype(wide.dtype).astype(kind.dtype) + (c[0] if c else kind.dtype.type(0))

    return integer_rule(ins, decoder, product, 3 if fused else 2)


RULE_SAD: Function = lambda a, b, c: np.where(a > b, a - b, b - a) + c  # noqa: E731


@rule("rem", "sad", "popc", "clz", "brev", "and", "or", "xor", "not", "cnot")
def plain(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    name = ins.op.name
    if name in ("popc", "clz"):
        count: Function = _count_ones if name == "popc" else _leading_zeros
        return simple(decoder.put(ins.operands[0], U32), count, decoder.get(ins.operands[1], kind))
    functions: dict[str, tuple[Function, int]] = {
        "rem": (remainder, 2), "sad": (RULE_SAD, 3), "brev": (_reverse, 1), "and": (np.bitwise_and, 2),
        "or": (np.bitwise_or, 2), "xor": (np.bitwise_xor, 2), "not": (np.invert, 1),
        "cnot": (lambda a: (a == 0).astype(a.dtype), 1),
    }  # fmt: skip
    return integer_rule(ins, decoder, *functions[name])


def _count_ones(a: Any) -> Any:
    return np.bitwise_count(a.view(f"u{a.dtype.itemsize}")).astype(np.uint32)


def _leading_zeros(a: Any) -> Any:
    bits = a.dtype.itemsize * 8
    return np.uint32(bits) - _length(a)


def _length(a: Any) -> Any:
    spread = a.copy()
    shift = 1
    while shift < a.dtype.itemsize * 8:
        spread = spread | (spread >> a.dtype.type(shift))
        shift *= 2
    return _count_ones(spread)


def _reverse(a: Any) -> Any:
    size = a.dtype.itemsize
    table = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1], axis=1)[:, 0]
    flat = np.atleast_1d(a)
    bytes_of = table[flat.view(np.uint8).reshape(-1, size)[:, ::-1]]
    reversed_: Array = np.ascontiguousarray(bytes_of).view(a.dtype).reshape(flat.shape)
    return reversed_


@rule("bfind")
def find_bit(ins: Instruction, decoder: Decoder) -> Step:
    """Highest bit that differs from the sign, or -1."""
    kind = only(types_of(ins.op.mods), ins)
    shifted = "shiftamt" in ins.op.mods

    def find(a: Any) -> Any:
        positive = np.where(a < 0, ~a, a).view(kind.raw) if kind.kind == "s" else a
        place = _length(positive) - np.uint32(1)
        none = place == np.uint32(0xFFFFFFFF)
        return np.where(none, place, np.uint32(kind.bits - 1) - place) if shifted else place

    return simple(decoder.put(ins.operands[0], U32), find, decoder.get(ins.operands[1], kind))


@rule("shl", "shr")
def shift(ins: Instruction, decoder: Decoder) -> Step:
    """Shifts beyond the width shift everything out."""
    kind = only(types_of(ins.op.mods), ins)
    left, bits = ins.op.name == "shl", kind.bits

    def moved(a: Any, amount: Any) -> Any:
        within = np.minimum(amount, np.uint32(bits - 1)).astype(kind.dtype)
        result = a << within if left else a >> within
        if not left and kind.kind == "s":
            return result
        return np.where(amount >= np.uint32(bits), kind.dtype.type(0), result)

    gets = decoder.get(ins.operands[1], kind), decoder.get(ins.operands[2], U32)
    return simple(decoder.put(ins.operands[0], kind), moved, *gets)


@rule("shf")
def funnel(ins: Instruction, decoder: Decoder) -> Step:
    left, wrap = "l" in ins.op.mods, "wrap" in ins.op.mods

    def moved(low: Any, high: Any, amount: Any) -> Any:
        n = (amount & np.uint32(31)) if wrap else np.minimum(amount, np.uint32(32))
        both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
        if left:
            return ((both << n.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
        return (both >> n.astype(np.uint64)).astype(np.uint32)

    gets = [decoder.get(o, U32) for o in ins.operands[1:4]]
    return simple(decoder.put(ins.operands[0], U32), moved, *gets)


@rule("bfe")
def extract(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    top = np.uint32(kind.bits)

    def field(a: Any, start: Any, length: Any) -> Any:
        start, length = start & np.uint32(0xFF), length & np.uint32(0xFF)
        raw = a.view(kind.raw)
        if kind.kind == "s":
            filled = (a >> np.minimum(start, top - np.uint32(1)).astype(kind.dtype)).view(kind.raw)
            last = np.minimum(start + length - np.uint32(1), top - np.uint32(1))
            sign = ((raw >> last.astype(kind.raw)) & kind.raw.type(1)).astype(bool) & (length > 0)
            within = filled & _ones(length, kind)
            return np.where(sign, within | ~_ones(length, kind), within).view(kind.dtype)
        moved = np.where(
            start >= top, kind.raw.type(0), raw >> np.minimum(start, top - np.uint32(1)).astype(kind.raw)
        )
        return moved & _ones(length, kind)

    gets = decoder.get(ins.operands[1], kind), *(decoder.get(o, U32) for o in ins.operands[2:4])
    return simple(decoder.put(ins.operands[0], kind), field, *gets)


def _ones(length: Any, kind: Type) -> Any:
    full = np.uint32(kind.bits)
    partial = (kind.raw.type(1) << np.minimum(length, full - np.uint32(1)).astype(kind.raw)) - kind.raw.type(
        1
    )
    return np.where(length >= full, ~kind.raw.type(0), partial)


@rule("bfi")
def insert(ins: Instruction, decoder: Decoder) -> Step:
    kind = only(types_of(ins.op.mods), ins)

    def placed(a: Any, b: Any, start: Any, length: Any) -> Any:
        start, length = start & np.uint32(0xFF), length & np.uint32(0xFF)
        by = np.minimum(start, np.uint32(kind.bits - 1)).astype(kind.raw)
        mask = np.where(start >= np.uint32(kind.bits), kind.raw.type(0), _ones(length, kind) << by)
        return (b & ~mask) | ((a << by) & mask)

    gets = (
        *(decoder.get(o, kind) for o in ins.operands[1:3]),
        *(decoder.get(o, U32) for o in ins.operands[3:5]),
    )
    return simple(decoder.put(ins.operands[0], kind), placed, *gets)


@rule("lop3")
def logic3(ins: Instruction, decoder: Decoder) -> Step:
    if len(ins.operands) != 5:
        raise Unknown("lop3 with a predicate")
    table = int(decoder.get(ins.operands[4], U32)(None))  # type: ignore[arg-type]

    def logic(a: Any, b: Any, c: Any) -> Any:
        result = a & np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
                result = result | term
        return result

    gets = [decoder.get(o, U32) for o in ins.operands[1:4]]
    return simple(decoder.put(ins.operands[0], U32), logic, *gets)


@rule("prmt")
def permute(ins: Instruction, decoder: Decoder) -> Step:
    """A selector's high bit replicates the sign."""
    modes = {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"} & set(ins.op.mods)
    if modes:
        raise Unknown(f"prmt.{modes.pop()}")

    def picked(a: Any, b: Any, select: Any) -> Any:
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        result: Any = np.uint32(0)
        for k in range(4):
            code = (select >> np.uint32(4 * k)) & np.uint32(0xF)
            byte = (
                (both >> ((code & np.uint32(7)) * np.uint32(8)).astype(np.uint64)) & np.uint64(0xFF)
            ).astype(np.uint32)
            spread = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            result = result | (np.where(code & np.uint32(8), spread, byte) << np.uint32(8 * k))
        return result

    gets = [decoder.get(o, U32) for o in ins.operands[1:4]]
    return simple(decoder.put(ins.operands[0], U32), picked, *gets)


@rule("dp4a", "dp2a")
def dot_bytes(ins: Instruction, decoder: Decoder) -> Step:
    first, second = types_of(ins.op.mods)[:2]
    result = U32 if (first.kind, second.kind) == ("u", "u") else S32
    two, high = ins.op.name == "dp2a", "hi" in ins.op.mods

    def element(a: Any, k: int, bits: int, kind: Type) -> Any:
        value = (a >> np.uint32(k * bits)).astype(f"u{bits // 8}")
        return (value.view(f"i{bits // 8}") if kind.kind == "s" else value).astype(np.int64)

    def dot(a: Any, b: Any, c: Any) -> Any:
        total = c.astype(np.int64)
        for k in range(2 if two else 4):
            left = element(a, k, 16 if two else 8, first)
            total = total + left * element(b, k + (2 if high else 0), 8, second)
        return total.astype(np.uint64).astype(np.uint32).view(result.dtype)

    gets = *(decoder.get(o, U32) for o in ins.operands[1:3]), decoder.get(ins.operands[3], result)
    return simple(decoder.put(ins.operands[0], result), dot, *gets)


@rule("vabsdiff4")
def video(ins: Instruction, decoder: Decoder) -> Step:
    if set(ins.op.mods) != {"u32"}:
        raise Unknown("only the plain unsigned form")

    def differ(a: Any, b: Any, c: Any) -> Any:
        result: Any = np.uint32(0)
        for k in range(4):
            x, y = ((v >> np.uint32(8 * k)) & np.uint32(0xFF) for v in (a, b))
            result = result | (np.where(x > y, x - y, y - x) << np.uint32(8 * k))
        return result

    gets = [decoder.get(o, U32) for o in ins.operands[1:4]]
    return simple(decoder.put(ins.operands[0], U32), differ, *gets)


def mode_of(ins: Instruction) -> str:
    return next((floats.MODES[m] for m in ins.op.mods if m in floats.MODES), "n")


def lift(function: Function, kind: Type) -> Function:
    if kind.name == "bf16":
        return lambda *a: floats.single_to_bf16(
            np.asarray(function(*map(floats.bf16_to_single, a)), np.float32)
        )
    if kind.name in ("f16x2", "bf16x2"):
        element = lift(function, _BF16) if kind.name == "bf16x2" else _on_halves(function)
        return lambda *a: floats.join(*(element(*part) for part in zip(*map(floats.halves, a), strict=True)))
    return function


def _on_halves(function: Function) -> Function:
    return lambda *a: np.asarray(function(*(v.view(np.float16) for v in a)), np.float16).view(np.uint16)


_BF16 = types_of(("bf16",))[0]


def float_rule(ins: Instruction, decoder: Decoder, function: Function, sources: int) -> Step:
    kind = only(types_of(ins.op.mods), ins)
    if kind.name in ("f32x2", "tf32"):
        raise Unknown(kind.name)
    ftz, sat, relu = (m in ins.op.mods for m in ("ftz", "sat", "relu"))

    def whole(*values: Any) -> Any:
        result = floats.flush(np.asarray(function(*(floats.flush(v, ftz) for v in values))), ftz)
        if relu:
            result = np.where(result < 0, result.dtype.type(0), result)
        return floats.saturate(result) if sat else result

    lifted = lift(whole if ftz or sat or relu else function, kind)
    gets = [decoder.get(o, kind) for o in ins.operands[1 : 1 + sources]]
    return simple(decoder.put(ins.operands[0], kind), lifted, *gets)


def is_float(ins: Instruction) -> bool:
    return only(types_of(ins.op.mods), ins).kind == "f"


@rule("add", "sub")
def add(ins: Instruction, decoder: Decoder) -> Step:
    minus = ins.op.name == "sub"
    if is_float(ins):
        mode = mode_of(ins)
        return float_rule(ins, decoder, lambda a, b: floats.add(a, -b if minus else b, mode), 2)
    if "cc" in ins.op.mods:
        return carry_out(ins, decoder)
    return integer_rule(ins, decoder, np.subtract if minus else np.add, 2)


@rule("mul", "mul24")
def mul(ins: Instruction, decoder: Decoder) -> Step:
    if is_float(ins):
        mode = mode_of(ins)
        return float_rule(ins, decoder, lambda a, b: floats.multiply(a, b, mode), 2)
    return multiply(ins, decoder)


@rule("mad", "fma", "mad24")
def fma(ins: Instruction, decoder: Decoder) -> Step:
    if is_float(ins):
        mode = mode_of(ins)
        return float_rule(ins, decoder, lambda a, b, c: floats.fused(a, b, c, mode), 3)
    if "cc" in ins.op.mods:
        return carry_out(ins, decoder)
    return multiply(ins, decoder)


@rule("div")
def div(ins: Instruction, decoder: Decoder) -> Step:
    if is_float(ins):
        mode = mode_of(ins)
        return float_rule(ins, decoder, lambda a, b: floats.divide(a, b, mode), 2)
    return integer_rule(ins, decoder, divide, 2)


@rule("abs", "neg")
def sign(ins: Instruction, decoder: Decoder) -> Step:
    function = np.abs if ins.op.name == "abs" else np.negative
    if is_float(ins):
        return float_rule(ins, decoder, function, 1)
    return integer_rule(ins, decoder, function, 1)


def _with_xor_sign(pick: Function) -> Function:
    """Extreme magnitude with the xor of the signs."""

    def picked(a: Any, b: Any) -> Any:
        size = pick(np.abs(a), np.abs(b))
        return np.where(np.signbit(a) ^ np.signbit(b), -size, size)

    return picked


@rule("min", "max")
def extreme(ins: Instruction, decoder: Decoder) -> Step:
    """NaN loses unless `.NaN` is given."""
    low, mods = ins.op.name == "min", ins.op.mods
    if not is_float(ins):
        if "relu" in mods:
            raise Unknown("integer relu")
        return integer_rule(ins, decoder, np.minimum if low else np.maximum, 2)
    pick: Function = (np.minimum if low else np.maximum) if "NaN" in mods else (np.fmin if low else np.fmax)
    if "xorsign" in mods:
        pick = _with_xor_sign(pick)
    if len(ins.operands) == 4:
        pair = pick
        return float_rule(ins, decoder, lambda a, b, c: pair(pair(a, b), c), 3)
    return float_rule(ins, decoder, pick, 2)


def _keep_type(function: Function) -> Function:
    return lambda a: np.asarray(function(a.astype(np.float64))).astype(a.dtype)


_UNARY: dict[str, Function] = {
    "sin": _keep_type(np.sin), "cos": _keep_type(np.cos), "lg2": _keep_type(np.log2),
    "ex2": _keep_type(np.exp2), "tanh": _keep_type(np.tanh), "rsqrt": _keep_type(lambda a: 1.0 / np.sqrt(a)),
}  # fmt: skip


@rule(*_UNARY)
def unary(ins: Instruction, decoder: Decoder) -> Step:
    return float_rule(ins, decoder, _UNARY[ins.op.name], 1)


@rule("sqrt", "rcp")
def rounded(ins: Instruction, decoder: Decoder) -> Step:
    mode = mode_of(ins)
    if ins.op.name == "sqrt":
        return float_rule(ins, decoder, lambda a: floats.root(a, mode), 1)
    return float_rule(ins, decoder, lambda a: floats.divide(np.ones_like(a), a, mode), 1)


@rule("copysign")
def copysign(ins: Instruction, decoder: Decoder) -> Step:
    return float_rule(ins, decoder, lambda a, b: np.copysign(b, a), 2)
