"""What the analysis needs to know of an opcode's spelling, worked out once per spelling."""

from dataclasses import dataclass
from functools import lru_cache

from tessera_ptx.opcodes import Row, Use, row_of, space_of, vector_of, width_of
from tessera_ptx.syntax import Op
from tessera_ptx.transfer import RULES, SCALAR_RESULTS, Form, Rule, form_of

_FLOATS = frozenset({"f16", "f16x2", "bf16", "bf16x2", "f32", "tf32", "f64", "f32x2", "pred"})


@dataclass(frozen=True, slots=True)
class OpInfo:
    """One spelling: its row, its value rule and the shape of its memory accesses."""

    op: Op
    row: Row | None
    writes: tuple[int, ...]
    # Memory operands with their state space; hints are left out.
    uses: tuple[tuple[Use, str], ...]
    form: Form | None
    rule: Rule | None
    # The result holds no integer worth following.
    scalar: bool
    width: int  # bytes of one element
    vector: int
    signed: bool
    is_load: bool
    marks: frozenset[str]


@lru_cache(maxsize=65536)
def info_of(op: Op) -> OpInfo:
    """The facts of one spelling."""
    row = row_of(op)
    form = form_of(op)
    is_load = row is not None and row.family in ("ld", "ldu", "atom")
    rule = RULES.get(op.name)
    floats = any(m in _FLOATS for m in op.mods) and form is None
    scalar = floats or op.name in SCALAR_RESULTS or row is None
    if op.name == "mov" and form is None and ("f64" in op.mods or "f32" in op.mods):
        scalar = False  # a pointer may travel as a double, its halves as floats
    uses = () if row is None else tuple((u, space_of(op, u)) for u in row.uses if u.effect != "h")
    return OpInfo(
        op, row, () if row is None else row.writes, uses, form, rule, scalar, width_of(op), vector_of(op),
        op.mods[-1:] in (("s8",), ("s16",), ("s32",), ("s64",)), is_load,
        frozenset() if row is None else row.marks,
    )  # fmt: skip
