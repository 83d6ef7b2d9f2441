"""Bad input: a ParseError with its place or a report, never another exception, never a hang."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptx_factory import HEAD, THREAD, make_module, pointers
from sampling import examples
from tessera_ptx import analyze
from tessera_ptx.errors import ParseError

SEEDS = [
    make_module(
        pointers(0, 1)
        + THREAD
        + """.local .align 8 .b8 depot[32]; mov.u32 %r5, 0; mov.u64 %rd40, depot; st.local.u64 [%rd40], %rd1;
        $L: add.s64 %rd31, %rd11, %rd20; ld.global.v2.f32 {%f9, %f8}, [%rd31];
        ld.local.u64 %rd41, [%rd40+8]; @!%p2 st.f32 [%rd41], %f1;
        { .reg .b64 %tmp; mov.b64 {%r6, %r7}, %rd31; mov.b64 %tmp, {%r6, %r7};
        red.global.add.f32 [%tmp], %f1; }
        add.s32 %r5, %r5, 1; setp.lt.s32 %p5, %r5, 10; @%p5 bra $L;
        cp.async.ca.shared.global [buf], [%rd31+8], 16; .loc 1 2 3
        $T: .branchtargets $A, $L;
        brx.idx %r5, $T;
        $A: call.uni f, (%rd1); or.b32 %r9, %r5, 3; shl.b32 %r9, %r9, %r5; div.u32 %r10, %r9, %r5;
        mad.wide.u32 %rd50, %r10, 4, %rd1; atom.global.cas.b32 %r11, [%rd50], %r5, %r6;""",
        before=".shared .align 16 .b8 buf[128];\n.func f (.param .b64 a) { ret; }\n",
    ),
    make_module("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%rd1], %rd2; "
                "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
                "[%r9],[%rd14,{%r1,%r2}],[%r6];",
                "b8[128] u64"),
]  # fmt: skip
MAX_SECONDS = 5.0


def survives(text: str | bytes) -> None:
    """Analyzing ends in time with a report or a ParseError."""
    begin = time.process_time()
    try:
        for report in analyze(text, "fuzz.ptx"):
            assert report.movable == (not report.why)
    except ParseError as error:
        placed = error.line >= 1 and error.column >= 1 and "fuzz.ptx:" in str(error)
    else:
        placed = True
    assert placed
    assert time.process_time() - begin < MAX_SECONDS


@settings(max_examples=examples(300, 60), deadline=None)
@given(st.sampled_from(SEEDS), st.data())
def test_truncated_text_is_survived(text: str, data: st.DataObject) -> None:
    """A file cut anywhere is refused or analyzed."""
    survives(text[: data.draw(st.integers(0, len(text)))])


@settings(max_examples=examples(600, 100), deadline=None)
@given(st.sampled_from(SEEDS), st.data())
def test_mutated_text_is_survived(text: str, data: st.DataObject) -> None:
    """Characters replaced, dropped or put in anywhere are refused or analyzed."""
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        new = data.draw(
            st.text(alphabet='%$@{}[]();:,.!|+-*<>0123456789abdelmrstuvxyz_ \n\t"/\\\x00é', max_size=4)
        )
        text = text[:at] + new + text[at + data.draw(st.integers(0, 3)) :]
    survives(text)


@settings(max_examples=examples(300, 60), deadline=None)
@given(st.sampled_from(SEEDS), st.data())
def test_shuffled_lines_are_survived(text: str, data: st.DataObject) -> None:
    """Statements in any order, repeated or dropped, are refused or analyzed."""
    head, _, rest = text.partition(".visible")
    lines = rest.split(";")
    picked = data.draw(st.lists(st.integers(1, max(len(lines) - 2, 1)), max_size=60))
    survives(
        head + ".visible" + ";".join([lines[0], *(lines[i] for i in picked if i < len(lines)), lines[-1]])
    )


@settings(max_examples=examples(200, 40), deadline=None)
@given(st.binary(max_size=400))
def test_binary_is_survived(data: bytes) -> None:
    """Bytes that are no text are refused."""
    survives(data)
    survives(HEAD.encode() + data)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        HEAD + "." * 100_000,
        HEAD + ".visible " * 50_000,
        make_module("{" * 100_000),
        make_module("mov.u32 %r1, " + "(" * 50_000 + ";"),
        make_module("mov.u32 %r1, " + "|".join(["%r1"] * 50_000) + ";"),
        make_module("mov.u32 %r1, " + "-" * 50_000 + "1;"),
        make_module("mov.u32 %r1, " + "9" * 100_000 + ";"),
        make_module("call (%r1), f, (" + ",".join(["%r1"] * 50_000) + ");"),
        make_module("mov.u64 %rd1, {" + ",".join(["%r1"] * 50_000) + "};"),
        make_module(".reg .b32 %q<999999999999>;"),
        make_module("ld.global.f32 %f1, [%rd1" + "+1" * 50_000 + "];"),
        HEAD + '.file 1 "' + "a" * 1_000_000,
        HEAD + "/*" * 100_000,
        make_module("@" * 100_000),
        make_module("$L" * 100_000 + ":"),
        HEAD + ".global .b8 x" + "[4]" * 50_000 + ";",
    ],
    ids=range(17),
)
def test_degenerate_text_is_survived(text: str) -> None:
    """Long runs of one construct end in time."""
    survives(text)


def test_values_that_feed_themselves_settle() -> None:
    """A long chain of registers that all depend on one another in a loop ends."""
    turn = "".join(
        f"xor.b64 %rd{k}, %rd{k}, %rd{k + 1}; add.s64 %rd{k + 1}, %rd{k}, %rd{k + 2};\n"
        for k in range(20, 60)
    )
    survives(
        make_module(
            pointers(0, 1) + f"$L: {turn} setp.ne.s64 %p1, %rd21, 0; @%p1 bra $L; st.global.u32 [%rd30], %r1;"
        )
    )


# Turns of a chain and how often: each would take longer than the limit, or too many frames, if every part of
# an address were looked into as often as it is used.
CHAINS = {
    "halves": ("shr.u64 %rd61, %rd60, 1; add.s64 %rd60, %rd60, %rd61;", 19),
    "quotients": ("div.u64 %rd61, %rd60, %rd20; sub.s64 %rd60, %rd60, %rd61;", 17),
    "fields": ("bfi.b64 %rd61, %rd60, %rd12, 3, 40; add.s64 %rd60, %rd60, %rd61;", 19),
    "choices": ("selp.b64 %rd61, %rd60, %rd12, %p1; mul.lo.s64 %rd60, %rd60, %rd61;", 8),
    "maxima": ("max.s64 %rd61, %rd60, %rd20; sub.s64 %rd60, %rd60, %rd61;", 8),
    "squares": ("mul.lo.s32 %r1, %r1, %r1; mul.wide.s32 %rd20, %r1, 4;", 20),
    "long sums": ("and.b64 %rd60, %rd60, 0xffff00000000;", 2000),
    "deep logic": ("xor.b64 %rd60, %rd60, %rd12;", 3000),
    "deep signs": ("abs.s64 %rd61, %rd60; mul.lo.s64 %rd60, %rd61, 4;", 3000),
}


@pytest.mark.parametrize(("turn", "count"), CHAINS.values(), ids=CHAINS.keys())
def test_chains_are_survived(turn: str, count: int) -> None:
    """An address that is computed from itself again and again ends in time."""
    body = f"mov.u64 %rd60, %rd11; {turn * count} add.s64 %rd60, %rd60, %rd20; st.global.u32 [%rd60], %r1;"
    survives(make_module(pointers(0, 1) + THREAD + body))


def test_an_address_of_too_many_steps_is_given_up_by_name() -> None:
    """What is not looked into may be anything, and the report says so."""
    turn, _ = CHAINS["halves"]
    body = f"mov.u64 %rd60, %rd11; {turn * 40} st.global.u32 [%rd60], %r1;"
    (report,) = analyze(make_module(pointers(0) + body))

    assert ("line 5: too complex to follow: its addresses are computed in too many steps",) == report.why


def test_deep_call_trees_are_cut() -> None:
    """Functions that call the next one twice would unfold to 2**40 copies."""
    functions = "".join(
        f".func f{k} (.param .b64 a) {{ {{ .param .b64 p; call.uni f{k + 1}, (p); "
        f"}} {{ .param .b64 p; call.uni f{k + 1}, (p); }} ret; }}\n"
        for k in reversed(range(40))
    )
    text = make_module(
        "{ .param .b64 p; call.uni f0, (p); }", before=".func f40 (.param .b64 a) { ret; }\n" + functions
    )
    report = analyze(text)[0]

    assert any("too large" in reason for reason in report.why)
