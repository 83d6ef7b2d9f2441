"""The parser: what compilers and people write, and where errors point."""

import pytest

from ptx_factory import HEAD, make_module
from tessera_ptx.errors import ParseError
from tessera_ptx.parser import parse
from tessera_ptx.syntax import FloatImm, Function, Imm, Mem, Pair, Reg, Special, Sym, Vec


def body(text: str, params: str = "u64") -> Function:
    """The kernel with this body."""
    return parse(make_module(text, params)).entries[0]


def operands(statement: str) -> tuple[object, ...]:
    """The operands of the first instruction."""
    return body(statement).body[0].operands


def test_header_is_read() -> None:
    """Version, target, options and address size come from the directives."""
    module = parse(".version 8.7\n.target sm_90a, debug\n.address_size 64\n")

    assert ((8, 7), "sm_90a", ("debug",), 64) == (
        module.version,
        module.target,
        module.target_options,
        module.address_size,
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("%r1", Reg("%r1")),
        ("%tid.x", Special("%tid.x")),
        ("%laneid", Special("%laneid")),
        ("0x10", Imm(16)),
        ("-4", Imm(-4)),
        ("0b101", Imm(5)),
        ("017", Imm(15)),
        ("42U", Imm(42)),
        ("WARP_SZ", Imm(32)),
        ("(1<<4)", Imm(16)),
        ("gbuf", Sym("gbuf")),
        ("gbuf+4", Sym("gbuf", 4)),
        ("0f3F800000", FloatImm(1.0, 32, 0x3F800000)),
        ("1.5", FloatImm(1.5, 0, 0)),
        ("[%rd1]", Mem(Reg("%rd1"), 0)),
        ("[ %rd1 + 0 ]", Mem(Reg("%rd1"), 0)),
        ("[%rd1+-4]", Mem(Reg("%rd1"), -4)),
        ("[gbuf+8]", Mem(Sym("gbuf"), 8)),
        ("{ %r1 }", Vec((Reg("%r1"),))),
        ("{%f1, %f2, %f3, %f4}", Vec((Reg("%f1"), Reg("%f2"), Reg("%f3"), Reg("%f4")))),
        ("%r1|%p1", Pair(Reg("%r1"), Reg("%p1"))),
        ("[%rd1, {%r1, %r2}]", Mem(Reg("%rd1"), 0, (Vec((Reg("%r1"), Reg("%r2"))),))),
    ],
)
def test_operand_is_read(written: str, meant: object) -> None:
    """Every way of writing an operand gives its node."""
    assert meant == operands(f"foo.b32 {written};")[0]


def test_loc_without_semicolon_hides_nothing() -> None:
    """An instruction behind `.loc` is seen, even on the same line."""
    text = (
        ".loc 1 9 7 ld.global.f32 %f1, [%rd1];\n"
        ".loc 1 2 3, function_name $L__info_string0, inlined_at 1 20 10\nret;"
    )

    assert ["ld.global.f32", "ret", "ret"] == [i.op.text for i in body(text).body]


def test_scoped_registers_get_names_of_their_own() -> None:
    """The same name in two scopes is two registers."""
    code = body(
        "{ .reg .b64 %tmp; mov.u64 %tmp, 1; } { .reg .b64 %tmp; mov.u64 %tmp, 2; } mov.u64 %tmp, 3;"
    ).body

    assert 3 == len({i.operands[0] for i in code[:3]})


def test_register_without_percent_sign_is_a_register() -> None:
    """Names declared with .reg need no %."""
    assert Reg("x") == body(".reg .b32 x; mov.u32 x, 1;").body[0].operands[0]


def test_labels_of_two_scopes_stay_apart() -> None:
    """A branch goes to the label of its own scope."""
    function = body("{ bra L; L: mov.u32 %r1, 1; }\n{ bra L; mov.u32 %r1, 3; L: mov.u32 %r1, 2; }")
    targets = [
        function.labels[i.operands[0].name]
        for i in function.body
        if i.op.name == "bra" and isinstance(i.operands[0], Sym)
    ]

    assert [1, 4] == targets


def test_positions_are_kept() -> None:
    """Line and column of an instruction are those of its opcode, guards and labels aside."""
    text = make_module("\n\n   @%p1 ld.global.f32 %f1, [%rd1];")
    line = 1 + text[: text.index("ld.global")].count("\n")
    instruction = parse(text).entries[0].body[0]

    assert (line, 9) == (instruction.line, instruction.column)


def test_debug_sections_are_skipped() -> None:
    """DWARF behind a kernel is no code."""
    text = (
        make_module("")
        + '.section .debug_abbrev\n{\n.b8 1\n.b8 17\n}\n.section .debug_str { $L: .b8 1 }\n.file 1 "a.cu"\n'
    )

    assert 1 == len(parse(text).entries)


def test_parameter_attributes_are_kept() -> None:
    """`.ptr`, space and sizes of parameters are read."""
    first, second = body("", "ptr b8[128]").params

    assert (True, "global", 8) == (first.is_pointer, first.ptr_space, first.size)
    assert (True, 128, 64) == (second.is_array, second.size, second.align)


def test_comments_are_no_code() -> None:
    """Both kinds of comments are left out, also around a string."""
    assert ["ret"] == [
        i.op.name for i in body("/* st.global.f32 [%rd1], %f1;\n */ // ld.global.f32 %f1, [%rd1];").body
    ]


def test_directives_of_the_head_are_kept() -> None:
    """.reqntid and .maxntid bound the block."""
    text = HEAD + ".entry k (.param .u64 a) .reqntid 128, 1, 1 .minnctapersm 2 { ret; }"

    assert {"reqntid": (128, 1, 1), "minnctapersm": (2,)} == dict(parse(text).entries[0].attributes)


def test_alias_and_forward_declaration() -> None:
    """A function may be declared first and defined later, and have another name."""
    text = HEAD + ".func f (.param .b64 a);\n.func f (.param .b64 a) { ret; }\n.alias g, f;\n"
    module = parse(text)

    assert [True] == [f.defined for f in module.functions]
    assert {"g": "f"} == dict(module.aliases)


def test_bytes_with_a_trailing_zero_are_read() -> None:
    """Drivers store PTX as a C string."""
    assert "k" == parse(make_module("").encode() + b"\0").entries[0].name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no PTX"),
        ("   \n\n", "holds no PTX"),
        ("int main() { return 0; }", "module directive"),
        (".target sm_80\n", ".version must come first"),
        (".version 8.0\n", ".target is missing"),
        (make_module("ld.global.f32 %f1, [%rd1").split("ret;")[0], "statement is expected"),
        (make_module("").split("ret;")[0], "not closed"),
        (make_module("/* never closed"), "comment is not closed"),
        (make_module("ld.global.f32 %f1 %f2 %f3;"), "operand"),
        (make_module("add.s32 %r1,, %r2;"), "empty"),
        (make_module("mov.b64 %rd1, {%r1, %r2;"), "operand"),
        (make_module("$L: $L: ret;"), "defined twice"),
        (make_module(".reg .b32;"), "register name"),
        (make_module(".reg .q32 %x;"), "unknown directive or type '.q32'"),
        (make_module("\x00\x01\x02"), "statement is expected"),
        ("\x7fELF\x02\x01", "module directive"),
        (make_module("{" * 5000), "nested too deeply"),
    ],
)
def test_bad_text_is_a_parse_error(text: str, message: str) -> None:
    """Text that is not PTX is refused with a message."""
    with pytest.raises(ParseError, match=message):
        parse(text)


def test_error_points_at_its_place() -> None:
    """The message is `file:line:column: message`, the line and a caret below the place."""
    text = HEAD + ".entry k ()\n{\n  add.s32 %r1, @@, 2;\n}\n"
    with pytest.raises(ParseError) as caught:
        parse(text, "bad.ptx")

    shown = str(caught.value).split("\n")
    assert shown[0].startswith("bad.ptx:6:")
    assert "  add.s32 %r1, @@, 2;" in shown[1]
    assert "^" == shown[2].strip()
