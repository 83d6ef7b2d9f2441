"""Opcode table: operands written and memory accessed by each instruction family.

    d0        operand 0 is a destination (register, vector or pair)
    r1        memory at operand 1 is read; w: written; a: updated atomically (read and written)
    r1:1      ... in the second state space of the qualifiers (`cp.async.cg.shared.global`)
    r1=shared ... always in that space, whatever the qualifiers say
    h1        operand 1 names an address as a hint (prefetch, policy, fence): no access
    n3        at least three operands; fewer is text no assembler takes
    #word     a mark for the analysis: `control`, `call`, `stop` (the kernel becomes immovable),
              `tensor` (operands and direction follow the tensor copy rules), `map` (edits a tensor map)

The state space is the first one among the qualifiers, else generic. The longest dotted prefix with a row
decides. An unknown opcode makes the kernel immovable, with its line.
"""

from functools import lru_cache
from typing import NamedTuple

from tessera_ptx.syntax import Op

SPACES = ("global", "shared", "local", "const", "param")


class Use(NamedTuple):
    operand: int
    effect: str  # r, w, a or h
    space: str
    which: int


class OpcodeRow(NamedTuple):
    family: str
    writes: tuple[int, ...]
    uses: tuple[Use, ...]
    marks: frozenset[str]
    least: int


_PURE = {
    1: "activemask stacksave",
    2: """
abs bfind brev clz cnot cos cvt cvta elect ex2 getctarank isspacep istypep lg2 mov movmatrix neg not popc
rcp rsqrt sin sqrt tanh testp vote clusterlaunchcontrol.query_cancel tcgen05.ld tcgen05.shift
""",
    3: """
add addc and bmsk copysign div mapa match max min mul mul24 or redux rem set setp shl shr sub subc szext
vabsdiff vadd vmax vmin vset vshl vshr vsub vabsdiff2 vabsdiff4 vadd2 vadd4 vavrg2 vavrg4 vmax2 vmax4
vmin2 vmin4 vset2 vset4 vsub2 vsub4 xor
""",
    4: "bfe dp2a dp4a fma fns mad mad24 madc mma prmt sad selp shf shfl slct vmad wmma.mma",
    5: "bfi lop3",
}

_NONE = """
bar barrier membar fence nanosleep pmevent brkpt griddepcontrol setmaxnreg stackrestore
cp.async.commit_group cp.async.wait_group cp.async.wait_all cp.async.bulk.commit_group
cp.async.bulk.wait_group wgmma.fence wgmma.commit_group wgmma.wait_group
tcgen05.dealloc tcgen05.relinquish_alloc_permit tcgen05.mma tcgen05.cp tcgen05.st tcgen05.wait
tcgen05.fence bar.arrive bar.sync barrier.cluster
"""

_ROWS = """
bar.red                       d0 n3
barrier.cta.red               d0 n3
barrier.red                   d0 n3
alloca                        d0 n2 #alloca
ld                            d0 r1 n2
ldu                           d0 r1 n2
st                            w0 n2
st.async                      w0 w2=shared n2
st.bulk                       w0=shared n2
atom                          d0 a1 n3
red                           a0 n2
red.async                     a0 a2=shared n2
ldmatrix                      d0 r1=shared n2
stmatrix                      w0=shared n2
wmma.load                     d0 r1 n2
wmma.store                    w0 n2
wgmma.mma_async               d0
multimem.ld_reduce            d0 r1 n2 #stop
multimem.st                   w0 n2 #stop
multimem.red                  a0 n2 #stop
multimem.cp.async.bulk        w0:0 r1:1 #stop
multimem.cp.reduce.async.bulk a0:0 r1:1 #stop
cp.async                      w0:0 r1:1 n3
cp.async.mbarrier.arrive      a0=shared
cp.async.bulk                 w0:0 r1:1 n3
cp.async.bulk.prefetch        h0
cp.async.bulk.prefetch.tensor h0
cp.async.bulk.tensor          #tensor
cp.reduce.async.bulk          a0:0 r1:1 n3
cp.reduce.async.bulk.tensor   #tensor
prefetch                      h0
prefetchu                     h0
applypriority                 h0
discard                       w0 n1
createpolicy                  d0 h1
fence.proxy                   h0
tensormap.replace             w0 #map
tensormap.cp_fenceproxy       w0:0 r1:1 #map
mbarrier.init                 w0=shared
mbarrier.inval                w0=shared
mbarrier.expect_tx            w0=shared
mbarrier.complete_tx          w0=shared
mbarrier.arrive               d0 a1=shared
mbarrier.arrive_drop          d0 a1=shared
mbarrier.test_wait            d0 r1=shared
mbarrier.try_wait             d0 r1=shared
mbarrier.pending_count        d0
clusterlaunchcontrol.try_cancel w0=shared w1=shared
tcgen05.alloc                 w0=shared
tcgen05.commit                a0=shared
bra                           #control
brx                           #control
ret                           #control
exit                          #control
trap                          #control
call                          #call
tex                           d0 #stop
tld4                          d0 #stop
txq                           d0 #stop
suld                          d0 #stop
sust                          #stop
sured                         #stop
suq                           d0 #stop
"""


def _use(word: str) -> Use:
    rest, _, fixed = word[1:].partition("=")
    operand, _, which = rest.partition(":")
    return Use(int(operand), word[0], fixed, int(which or 0))


def _row(family: str, words: list[str]) -> OpcodeRow:
    writes = tuple(int(w[1:]) for w in words if w[0] == "d")
    uses = tuple(_use(w) for w in words if w[0] in "rwah")
    least = next((int(w[1:]) for w in words if w[0] == "n"), 0)
    return OpcodeRow(family, writes, uses, frozenset(w[1:] for w in words if w[0] == "#"), least)


def _table() -> dict[str, OpcodeRow]:
    rows = {name: _row(name, ["d0", f"n{least}"]) for least, names in _PURE.items() for name in names.split()}
    rows |= {name: _row(name, []) for name in _NONE.split()}
    for line in _ROWS.strip().splitlines():
        family, *words = line.split()
        rows[family] = _row(family, words)
    return rows


TABLE = _table()
_DEPTH = 5


@lru_cache(maxsize=65536)
def row_of(op: Op) -> OpcodeRow | None:
    # `tcgen05.wait::ld` belongs to `tcgen05.wait`.
    words = [word.partition("::")[0] for word in (op.name, *op.mods)]
    for length in range(min(len(words), _DEPTH), 0, -1):
        row = TABLE.get(".".join(words[:length]))
        if row is not None:
            return row
    return None


@lru_cache(maxsize=65536)
def spaces_of(op: Op) -> tuple[str, ...]:
    """Without suffixes such as `::cta`."""
    return tuple(m.partition("::")[0] for m in op.mods if m.partition("::")[0] in SPACES)


def space_of(op: Op, use: Use) -> str:
    """'' is generic."""
    if use.space:
        return use.space
    spaces = spaces_of(op)
    return spaces[use.which] if use.which < len(spaces) else ""


@lru_cache(maxsize=65536)
def width_of(op: Op) -> int:
    """Bytes of the last type qualifier; 0 without one."""
    for mod in reversed(op.mods):
        size = _ELEMENT.get(mod)
        if size is not None:
            return size
    return 0


@lru_cache(maxsize=65536)
def vector_of(op: Op) -> int:
    for mod in op.mods:
        if mod in ("v2", "v4", "v8"):
            return int(mod[1])
    return 1


_ELEMENT = {
    "pred": 0, "b8": 1, "u8": 1, "s8": 1, "e4m3": 1, "e5m2": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "e4m3x2": 2, "e5m2x2": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16, "b1024": 128,
}  # fmt: skip
