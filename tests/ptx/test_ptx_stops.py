"""What the analysis does not follow makes the kernel immovable, by name and line."""

import pytest

from ptx_factory import HEAD, flags, make_module, pointers, report_of
from tessera_ptx import analyze


def why(body: str, before: str = "", params: str = "u64 u64 u64 u32") -> str:
    """All reasons in one string."""
    return "; ".join(report_of(body, params, before).why)


def test_unknown_instruction_is_named_with_its_line() -> None:
    """An opcode without a table row could touch memory."""
    text = make_module(pointers(0) + "frobnicate.global.u32 %r1, [%rd11];")
    line = 1 + text[: text.index("frobnicate")].count("\n")

    assert (f"line {line}: unknown instruction 'frobnicate.global.u32'",) == analyze(text)[0].why


@pytest.mark.parametrize(
    "instruction",
    [
        "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [tex, {%f5, %f6}];",
        "sust.b.2d.b32.trap [surf, {%r1, %r2}], {%r3};",
        "suld.b.1d.b32.trap %r1, [surf, {%r2}];",
    ],
)
def test_textures_and_surfaces_stop(instruction: str) -> None:
    """Textures and surfaces name no buffer."""
    assert "texture or surface" in why(instruction)


def test_call_through_a_register_stops() -> None:
    """The target of an indirect call is unknown."""
    body = (
        "prototype_1 : .callprototype (.param .b32 _) _ (.param .b64 _);\n"
        "call (retval0), %rd8, (param0), prototype_1;"
    )

    assert "calls through a register" in why(".param .b32 retval0; .param .b64 param0;" + body)


def test_external_function_stops_and_is_named() -> None:
    """A function that is not in the module may do anything."""
    before = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);"

    assert "'vprintf', which is not in this module" in why(
        "{ .param .b64 param0; .param .b64 param1; .param .b32 retval0;"
        "call.uni (retval0), vprintf, (param0, param1); }",
        before,
    )


def test_failed_assertion_does_not_stop() -> None:
    """__assertfail only ends the program."""
    before = (
        ".extern .func __assertfail "
        "(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);"
    )
    body = "{ .param .b64 param0; call.uni __assertfail, (param0, param0, param0, param0, param0); }"

    assert not why(body, before)


def test_recursion_stops() -> None:
    """A function that calls itself is not unfolded."""
    before = (
        ".func rec (.param .b64 a) { .reg .b64 %rd<3>; ld.param.u64 %rd1, [a]; "
        "{ .param .b64 p; st.param.b64 [p+0], %rd1; call.uni rec, (p); } ret; }"
    )

    assert "recursively" in why("{ .param .b64 param0; call.uni rec, (param0); }", before)


FUNC = """.func (.param .b64 ret) pick (.param .b64 a, .param .b64 b, .param .b32 c)
{ .reg .pred %p<3>; .reg .b64 %rd<5>; .reg .b32 %r<3>;
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u32 %r1, [c];
setp.eq.s32 %p1, %r1, 0; @%p1 bra L; st.param.b64 [ret+0], %rd1; ret; L: st.param.b64 [ret+0], %rd2; ret; }
"""


def test_device_function_that_returns_a_pointer_is_followed() -> None:
    """The pointer a function returns is one of those it was given."""
    body = """{ .param .b64 p0; st.param.b64 [p0+0], %rd1; .param .b64 p1; st.param.b64 [p1+0], %rd3;
    .param .b32 p2; st.param.b32 [p2+0], %r1; .param .b64 retval0;
    call.uni (retval0), pick, (p0, p1, p2); ld.param.b64 %rd9, [retval0+0]; }
    st.f32 [%rd9], %f1;"""
    report = report_of(pointers(0, 1, 2, generic=True) + body, before=FUNC)

    assert report.movable
    assert {0: "w", 2: "w"} == flags(report)


def test_two_calls_keep_their_arguments_apart() -> None:
    """Each call is analyzed with its own arguments."""
    function = (
        ".func put (.param .b64 a, .param .b64 b) { .reg .b64 %rd<5>; .reg .f32 %f<3>; "
        "ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.f32 %f1, [%rd1]; st.f32 [%rd2], %f1; ret; }\n"
    )
    call = (
        "{{ .param .b64 p0; st.param.b64 [p0+0], {a}; .param .b64 p1; st.param.b64 [p1+0], {b}; "
        "call.uni put, (p0, p1); }}\n"
    )
    body = pointers(0, 1, 2, generic=True) + call.format(a="%rd1", b="%rd2") + call.format(a="%rd2", b="%rd3")

    assert {0: "r", 1: "rw", 2: "w"} == flags(report_of(body, before=function))


def test_writing_a_module_variable_pins_the_kernel() -> None:
    """A module variable belongs to no parameter."""
    report = report_of("st.global.f32 [gbuf+4], %f1;", before=".visible .global .align 4 .b8 gbuf[64];")

    assert [("gbuf", False, True)] == [(s.name, s.read, s.write) for s in report.symbols]
    assert "writes the module variable 'gbuf'" in report.why[0]


@pytest.mark.parametrize(
    "name", ["_ZZ6kernelPfE3tab", "$str$1", "_$_str_$_2", "__const$_Z6kernelPf$tab", "__cudart_i2opi_f"]
)
def test_reading_a_private_constant_table_does_not_pin(name: str) -> None:
    """A table with an initial value and a name that no host code can say is the same everywhere."""
    report = report_of(
        f"ld.global.f32 %f1, [{name}+4];",
        before=f".global .align 4 .b8 {name}[8] = {{1, 2, 3, 4, 5, 6, 7, 8}};",
    )

    assert report.movable


def test_reading_host_set_constants_pins() -> None:
    """A __constant__ array without a value is set by the host."""
    report = report_of("ld.const.f32 %f1, [taps];", before=".const .align 4 .b8 taps[8];")

    assert "which the host may set" in report.why[0]


def test_write_through_a_module_pointer_is_indirect() -> None:
    """A pointer kept in a module variable is a pointer loaded from memory."""
    report = report_of(
        "ld.global.u64 %rd5, [gptr]; cvta.to.global.u64 %rd6, %rd5; st.global.f32 [%rd6], %f1;",
        before=".global .align 8 .u64 gptr;",
    )

    assert (("symbol", "gptr"),) == report.indirect[0].tables


def test_storing_an_address_pins() -> None:
    """An address written to memory would be another number on another device."""
    report = report_of(pointers(0, 1) + "ld.global.f32 %f1, [%rd11]; st.global.u64 [%rd12], %rd1;")

    assert "stores the address in parameter 0" in report.why[0]


def test_undefined_address_stops() -> None:
    """An address that no definition reaches is no access anybody can name."""
    assert "no definition reaches" in why("st.global.f32 [%rd40], %f1;")


def test_constant_address_stops() -> None:
    """An absolute address belongs to no buffer."""
    assert "near null" in why("st.global.f32 [16], %f1;")


def test_unreachable_code_is_no_access() -> None:
    """Instructions that cannot run touch nothing."""
    report = report_of(pointers(0) + "bra $END; st.global.f32 [%rd11], %f1;\n$END:")

    assert {} == flags(report)


def test_jump_table_reaches_all_its_targets() -> None:
    """brx.idx may go to every label of its list."""
    report = report_of(
        pointers(0, 1, 2)
        + """$T: .branchtargets $A, $B;
        brx.idx %r1, $T;
        $A: st.global.f32 [%rd11], %f1; bra $C;
        $B: st.global.f32 [%rd12], %f1;
        $C: ld.global.f32 %f2, [%rd13];"""
    )

    assert {0: "w", 1: "w", 2: "r"} == flags(report)


def test_branch_to_an_unknown_label_stops() -> None:
    """A branch that goes nowhere known could go anywhere."""
    assert "unknown target" in why("bra $NOWHERE;")


def test_every_kernel_of_a_module_is_reported() -> None:
    """Several entries in one file are several reports, in order."""
    one = make_module("st.global.f32 [%rd1], %f1;", name="first")
    two = make_module(pointers(0).replace("k_param", "second_param"), name="second").removeprefix(HEAD)

    assert ["first", "second"] == [r.name for r in analyze(one + two)]


def test_call_through_a_register_with_listed_targets_is_followed() -> None:
    """`.calltargets` names all functions that may be called; each is looked at."""
    functions = (
        ".func put (.param .b64 a) { .reg .b64 %rd<2>; ld.param.u64 %rd1, [a]; st.u32 [%rd1], 1; ret; }\n"
        ".func get (.param .b64 a) { .reg .b64 %rd<2>; .reg .b32 %r<2>; ld.param.u64 %rd1, [a]; "
        "ld.u32 %r1, [%rd1]; ret; }\n"
    )
    body = """{ .param .b64 p0; st.param.b64 [p0+0], %rd1;
    Targets: .calltargets put, get;
    call %rd9, (p0), Targets; }"""

    assert {0: "rw"} == flags(report_of(pointers(0, generic=True) + body, before=functions))


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.wait::ld.sync.aligned;",
        "fence.proxy.async.shared::cta;",
        "griddepcontrol.wait;",
        "bar.sync 0;",
    ],
)
def test_synchronization_touches_no_memory(instruction: str) -> None:
    """Barriers, fences and waits are known and harmless."""
    assert not why(instruction)


def test_pointer_from_memory_nobody_stored_to_stops() -> None:
    """What is read from local memory that was never written may be anything."""
    body = ".local .align 8 .b8 depot[8]; ld.local.u64 %rd5, [depot]; st.global.u32 [%rd5], %r1;"

    assert why(body)
