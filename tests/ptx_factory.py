"""Small PTX texts for tests of the analyzer."""

from tessera_ptx import KernelReport, analyze

HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"
REGISTERS = (
    ".reg .pred %p<20>;\n.reg .b16 %rs<20>;\n.reg .b32 %r<80>;\n.reg .f32 %f<40>;\n.reg .b64 %rd<80>;\n"
)


def make_module(body: str, params: str = "u64 u64 u64 u32", before: str = "", name: str = "k") -> str:
    """A module with one kernel; `params` are types, `ptr` for `.u64 .ptr .global`, `b8[n]` for structs."""
    declared = []
    for number, kind in enumerate(params.split()):
        spelled = {"ptr": ".u64 .ptr .global .align 16"}.get(kind, "." + kind)
        if "[" in kind:
            base, _, size = kind.partition("[")
            declared.append(f".param .align 64 .{base} {name}_param_{number}[{size}")
        else:
            declared.append(f".param {spelled} {name}_param_{number}")
    head = f"{HEAD}{before}\n.visible .entry {name}(\n{', '.join(declared)}\n)\n"
    return f"{head}{{\n{REGISTERS}{body}\nret;\n}}\n"


def report_of(body: str, params: str = "u64 u64 u64 u32", before: str = "") -> KernelReport:
    """The report of a kernel with this body."""
    return analyze(make_module(body, params, before))[0]


def flags(report: KernelReport) -> dict[int | tuple[int, int], str]:
    """{parameter: "r", "w", "rw" or "rwa"}; fields of structs as (parameter, offset)."""
    out: dict[int | tuple[int, int], str] = {}
    for access in report.accesses:
        key = access.param if not access.offset else (access.param, access.offset)
        out[key] = "r" * access.read + "w" * access.write + "a" * access.atomic
    return out


def pointers(*numbers: int, generic: bool = False) -> str:
    """Loads parameter n into %rd{n+1} and, unless generic, its global address into %rd{n+11}."""
    lines = [f"ld.param.u64 %rd{n + 1}, [k_param_{n}];" for n in numbers]
    if not generic:
        lines += [f"cvta.to.global.u64 %rd{n + 11}, %rd{n + 1};" for n in numbers]
    return "\n".join(lines) + "\n"


THREAD = """mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mad.lo.s32 %r4, %r2, %r3, %r1;
mul.wide.s32 %rd20, %r4, 4;
"""
