"""Arithmetic whose opcode serves integers and floats alike, and the floats' own functions.

Packed and small formats (bf16, f16x2, bf16x2) are lifted: split into elements, computed, packed again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera_ptx.interp import floats, rules_integer
from tessera_ptx.interp.decode import Decoder, Unknown, only, rule, simple
from tessera_ptx.interp.state import Step
from tessera_ptx.interp.types import Type, types_of
from tessera_ptx.syntax import Instruction

Function = Callable[..., Any]


def mode_of(ins: Instruction) -> str:
    """The rounding direction; to nearest when none is given."""
    return next((floats.MODES[m] for m in ins.op.mods if m in floats.MODES), "n")


def lift(function: Function, kind: Type) -> Function:
    """A function of floats as a function of the type's bit patterns."""
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
    """A rule on floats with the modifiers `.ftz`, `.sat`, `.relu` applied."""
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
    """Whether the instruction works on floats."""
    return only(types_of(ins.op.mods), ins).kind == "f"


@rule("add", "sub")
def add(ins: Instruction, decoder: Decoder) -> Step:
    """Sum and difference."""
    minus = ins.op.name == "sub"
    if is_float(ins):
        mode = mode_of(ins)
        return float_rule(ins, decoder, lambda a, b: floats.add(a, -b if minus else b, mode), 2)
    if "cc" in ins.op.mods:
        return rules_integer.carry_out(ins, decoder)
    return rules_integer.integer_rule(ins, decoder, np.subtract if minus else np.add, 2)


@rule("mul", "mul24")
def mul(ins: Instruction, decoder: Decoder) -> Step:
    """Product."""
    if is_float(ins):
        mode = mode_of(ins)
        return float_rule(ins, decoder, lambda a, b: floats.multiply(a, b, mode), 2)
    return rules_integer.multiply(ins, decoder)


@rule("mad", "fma", "mad24")
def fma(ins: Instruction, decoder: Decoder) -> Step:
    """Product and sum; on floats rounded once."""
    if is_float(ins):
        mode = mode_of(ins)
        return float_rule(ins, decoder, lambda a, b, c: floats.fused(a, b, c, mode), 3)
    if "cc" in ins.op.mods:
        return rules_integer.carry_out(ins, decoder)
    return rules_integer.multiply(ins, decoder)


@rule("div")
def div(ins: Instruction, decoder: Decoder) -> Step:
    """Quotient."""
    if is_float(ins):
        mode = mode_of(ins)
        return float_rule(ins, decoder, lambda a, b: floats.divide(a, b, mode), 2)
    return rules_integer.integer_rule(ins, decoder, rules_integer.divide, 2)


@rule("abs", "neg")
def sign(ins: Instruction, decoder: Decoder) -> Step:
    """Magnitude and negation."""
    function = np.abs if ins.op.name == "abs" else np.negative
    if is_float(ins):
        return float_rule(ins, decoder, function, 1)
    return rules_integer.integer_rule(ins, decoder, function, 1)


def _with_xor_sign(pick: Function) -> Function:
    """`.xorsign.abs`: of the magnitudes, with the exclusive or of the signs."""

    def picked(a: Any, b: Any) -> Any:
        size = pick(np.abs(a), np.abs(b))
        return np.where(np.signbit(a) ^ np.signbit(b), -size, size)

    return picked


@rule("min", "max")
def extreme(ins: Instruction, decoder: Decoder) -> Step:
    """Smaller and larger; of a number and not-a-number the number, unless `.NaN` is given."""
    low, mods = ins.op.name == "min", ins.op.mods
    if not is_float(ins):
        if "relu" in mods:
            raise Unknown("integer relu")
        return rules_integer.integer_rule(ins, decoder, np.minimum if low else np.maximum, 2)
    pick: Function = (np.minimum if low else np.maximum) if "NaN" in mods else (np.fmin if low else np.fmax)
    if "xorsign" in mods:
        pick = _with_xor_sign(pick)
    if len(ins.operands) == 4:
        pair = pick
        return float_rule(ins, decoder, lambda a, b, c: pair(pair(a, b), c), 3)
    return float_rule(ins, decoder, pick, 2)


def _keep_type(function: Function) -> Function:
    """Computed in double precision, rounded once to the operand's type."""
    return lambda a: np.asarray(function(a.astype(np.float64))).astype(a.dtype)


_UNARY: dict[str, Function] = {
    "sin": _keep_type(np.sin), "cos": _keep_type(np.cos), "lg2": _keep_type(np.log2),
    "ex2": _keep_type(np.exp2), "tanh": _keep_type(np.tanh), "rsqrt": _keep_type(lambda a: 1.0 / np.sqrt(a)),
}  # fmt: skip


@rule(*_UNARY)
def unary(ins: Instruction, decoder: Decoder) -> Step:
    """Elementary functions."""
    return float_rule(ins, decoder, _UNARY[ins.op.name], 1)


@rule("sqrt", "rcp")
def rounded(ins: Instruction, decoder: Decoder) -> Step:
    """Square root and reciprocal, which take rounding modes."""
    mode = mode_of(ins)
    if ins.op.name == "sqrt":
        return float_rule(ins, decoder, lambda a: floats.root(a, mode), 1)
    return float_rule(ins, decoder, lambda a: floats.divide(np.ones_like(a), a, mode), 1)


@rule("copysign")
def copysign(ins: Instruction, decoder: Decoder) -> Step:
    """The sign of the first operand on the magnitude of the second."""
    return float_rule(ins, decoder, lambda a, b: np.copysign(b, a), 2)
