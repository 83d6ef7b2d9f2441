"""Pointer flow against execution: random programs that shuffle pointers, run by a small evaluator.

Three buffers lie far apart. A program moves their addresses through registers, selections, loops, local
and shared memory, halves and differences, and accesses memory through what comes out. Every access that
the evaluator makes to a buffer must be announced by the report, unless the kernel is immovable.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ptx_factory import report_of
from sampling import examples

BUFFERS = (0x7F00_0000_0000, 0x7F20_0000_0000, 0x7F48_0000_0000)
NEAR = 1 << 24
MASK = (1 << 64) - 1
POINTERS, SLOTS = 4, 4

register = st.integers(0, POINTERS - 1)
slot = st.integers(0, SLOTS - 1)
simple = st.one_of(
    st.tuples(st.just("mov"), register, register),
    st.tuples(st.just("param"), register, st.integers(0, 2)),
    st.tuples(st.just("add"), register, register, st.integers(-8, 8)),
    st.tuples(st.just("index"), register, register),
    st.tuples(st.just("selp"), register, register, register),
    st.tuples(st.just("guarded"), register, register),
    st.tuples(st.just("diff"), register, register, register, register),
    st.tuples(st.just("halves"), register, register),
    st.tuples(st.just("align"), register, register),
    st.tuples(st.just("or"), register, register),
    st.tuples(st.sampled_from(["save", "load"]), st.sampled_from(["local", "shared"]), slot, register),
    st.tuples(st.sampled_from(["save_at", "load_at"]), st.sampled_from(["local", "shared"]), register),
    st.tuples(st.sampled_from(["ld", "st", "atom"]), register),
)
statements = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.tuples(st.just("if"), st.lists(inner, max_size=4), st.lists(inner, max_size=3)),
        st.tuples(st.just("loop"), st.lists(inner, max_size=5)),
    ),
    max_leaves=8,
)
programs = st.lists(statements, min_size=3, max_size=10)

PTX = {
    "mov": "mov.u64 %rd{0}, %rd{1};",
    "param": "ld.param.u64 %rd{0}, [k_param_{p}];",
    "add": "add.s64 %rd{0}, %rd{1}, {k};",
    "index": "mul.wide.s32 %rd9, %r5, 8; add.s64 %rd{0}, %rd{1}, %rd9;",
    "selp": "selp.b64 %rd{0}, %rd{1}, %rd{2}, %p1;",
    "guarded": "@%p1 mov.u64 %rd{0}, %rd{1};",
    "diff": "sub.s64 %rd9, %rd{2}, %rd{3}; add.s64 %rd{0}, %rd{1}, %rd9;",
    "halves": "mov.b64 {{%r11, %r12}}, %rd{1}; mov.b64 %rd{0}, {{%r11, %r12}};",
    "align": "and.b64 %rd{0}, %rd{1}, -16;",
    "or": "or.b64 %rd{0}, %rd{1}, 4;",
    "ld": "ld.u32 %r20, [%rd{0}];",
    "st": "st.u32 [%rd{0}], %r20;",
    "atom": "atom.add.u32 %r20, [%rd{0}], 1;",
}
# A new choice for selections and branches, and a new dynamic index, from a generator both sides share.
STEP = "mad.lo.s32 %r5, %r5, 5, 3; and.b32 %r5, %r5, 3; and.b32 %r6, %r5, 1; setp.eq.s32 %p1, %r6, 1;\n"


class Writer:
    """Turns a program into PTX."""

    def __init__(self) -> None:
        self.labels = 0

    def block(self, program: list[Any]) -> str:
        """The code of a list of statements."""
        return "".join(self.one(s) for s in program)

    def one(self, statement: Any) -> str:
        """The code of one statement; pointers live in %rd1 to %rd4."""
        kind, *rest = statement
        if kind in ("if", "loop"):
            self.labels += 1
            return self.branch(kind, rest, self.labels)
        if kind in ("save", "load"):
            space, number, reg = rest
            place, reg = f"[%rd{30 if space == 'local' else 31}+{8 * number}]", f"%rd{reg + 1}"
            pair = f"{place}, {reg}" if kind == "save" else f"{reg}, {place}"
            return f"{'st' if kind == 'save' else 'ld'}.{space}.u64 {pair};\n"
        if kind in ("save_at", "load_at"):
            space, reg = rest
            base = f"mul.wide.u32 %rd9, %r5, 8; add.s64 %rd9, %rd9, %rd{30 if space == 'local' else 31};"
            pair = f"[%rd9], %rd{reg + 1}" if kind == "save_at" else f"%rd{reg + 1}, [%rd9]"
            return f"{base} {'st' if kind == 'save_at' else 'ld'}.{space}.u64 {pair};\n"
        numbers = [r + 1 for r in rest]
        return STEP + PTX[kind].format(*numbers, p=rest[-1], k=4 * rest[-1]) + "\n"

    def branch(self, kind: str, rest: list[Any], label: int) -> str:
        """An if with two sides, or a loop of three turns."""
        if kind == "if":
            left, right = (self.block(side) for side in rest)
            return f"{STEP}@%p1 bra $A{label};\n{right}bra $B{label};\n$A{label}:\n{left}$B{label}:\n"
        counter = f"%r{30 + label % 40}"
        return (
            f"mov.u32 {counter}, 0;\n$A{label}:\n{self.block(rest[0])}add.s32 {counter}, {counter}, 1;\n"
            f"setp.lt.s32 %p2, {counter}, 3;\n@%p2 bra $A{label};\n"
        )


class Machine:
    """Runs a program for one thread and notes which buffer each access reaches."""

    def __init__(self) -> None:
        self.regs = [BUFFERS[0], BUFFERS[1], BUFFERS[2], BUFFERS[0]]
        self.memory: dict[tuple[str, int], int] = {}
        self.seed = 0
        self.choice = False
        self.seen: set[tuple[int, str]] = set()

    def step(self) -> None:
        """The shared generator."""
        self.seed = (5 * self.seed + 3) & 3
        self.choice = self.seed & 1 == 1

    def block(self, program: list[Any]) -> None:
        """Runs a list of statements."""
        for statement in program:
            self.one(statement)

    def one(self, statement: Any) -> None:
        """Runs one statement."""
        kind, *rest = statement
        if kind == "loop":
            for _ in range(3):
                self.block(rest[0])
        elif kind == "if":
            self.step()
            self.block(rest[0] if self.choice else rest[1])
        elif kind in ("save", "load"):
            self.transfer(kind == "save", rest[0], rest[1], rest[2])
        elif kind in ("save_at", "load_at"):
            self.transfer(kind == "save_at", rest[0], self.seed, rest[1])
        else:
            self.step()
            self.plain(kind, rest)

    def transfer(self, save: bool, space: str, number: int, reg: int) -> None:
        """Moves a pointer to or from memory; what was never stored is zero."""
        if save:
            self.memory[space, number] = self.regs[reg]
        else:
            self.regs[reg] = self.memory.get((space, number), 0)

    def plain(self, kind: str, rest: list[int]) -> None:
        """Register instructions and accesses."""
        regs = self.regs
        if kind in ("ld", "st", "atom"):
            self.access(regs[rest[0]], {"ld": "r", "st": "w", "atom": "a"}[kind])
            return
        if kind == "param":
            regs[rest[0]] = BUFFERS[rest[1]]
        elif kind == "selp":
            regs[rest[0]] = regs[rest[1] if self.choice else rest[2]]
        elif kind == "guarded":
            regs[rest[0]] = regs[rest[1] if self.choice else rest[0]]
        else:
            source = regs[rest[1]]
            moved = {
                "mov": source,
                "halves": source,
                "align": source & ~15,
                "or": source | 4,
                "index": source + 8 * self.seed,
                "add": source + 4 * rest[-1],
            }
            if kind == "diff":
                moved["diff"] = source + regs[rest[2]] - regs[rest[3]]
            regs[rest[0]] = moved[kind] & MASK

    def access(self, address: int, effect: str) -> None:
        """Notes an access near a buffer; others are no valid program."""
        for number, buffer in enumerate(BUFFERS):
            if abs(address - buffer) < NEAR:
                self.seen.add((number, effect))


def kernel(program: list[Any]) -> str:
    """The whole body."""
    return (
        ".local .align 8 .b8 depot[32]; mov.u64 %rd30, depot; mov.u64 %rd31, buf; mov.u32 %r5, 0;\n"
        "ld.param.u64 %rd1, [k_param_0]; ld.param.u64 %rd2, [k_param_1]; ld.param.u64 %rd3, [k_param_2];\n"
        "mov.u64 %rd4, %rd1;\n" + Writer().block(program)
    )


@settings(max_examples=examples(300, 40), deadline=None)
@given(programs)
def test_every_access_is_announced(program: list[Any]) -> None:
    """What a run touches, the report names with its effect, or the kernel is immovable."""
    report = report_of(kernel(program), "u64 u64 u64 u32", before=".shared .align 8 .b8 buf[32];")
    machine = Machine()
    machine.block(program)

    if report.movable:
        told = set()
        for a in report.accesses:
            told |= {(a.param, e) for e, said in (("r", a.read), ("w", a.write), ("a", a.atomic)) if said}
        assert set() == machine.seen - told


@settings(max_examples=examples(120, 25), deadline=None)
@given(st.lists(simple.filter(lambda s: s[0] not in ("diff", "load", "load_at")), min_size=3, max_size=14))
def test_plain_shuffling_stays_movable(program: list[Any]) -> None:
    """Moves, selections, offsets, halves and alignment never make a kernel immovable."""
    report = report_of(kernel(program), "u64 u64 u64 u32", before=".shared .align 8 .b8 buf[32];")

    assert () == report.why
