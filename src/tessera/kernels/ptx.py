"""Accesses of a PTX launch, from its code and numbers.

Argument i of the launch is parameter i of the entry; scratch pointers that Triton adds must not be touched.
Where the code does not tell pointers from numbers, the launch's arguments do. Intervals are clamped to the
buffer. A write that may miss bytes of its interval counts as reading them too, unless the buffer is empty.

A tuple argument is a table of pointers. An access through it counts for all of each buffer.
"""

from collections.abc import Sequence, Set

from tessera.ir import Access, Arg, Buffer, Kernel, Launch, Region, View, arg_views
from tessera.ir.trace import item_bytes
from tessera.kernels.launch import three
from tessera_ptx import (
    AccessReport,
    IndirectReport,
    Intervals,
    KernelReport,
    LaunchConfig,
    ParamHints,
    ParseError,
    report_for_launch,
    reports_for,
)

# An access of more separate runs is widened to their hull.
MAX_REGIONS = 16

# Smallest possible address of a tensor.
FAR = 1 << 40


def triton_accesses(
    kernel: Kernel, launch: Launch, buffers: Sequence[Buffer], empty: Set[int] = frozenset()
) -> tuple[tuple[Access, ...], str]:
    """The accesses, or why they cannot be proved."""
    report = _report(kernel)
    why = report if isinstance(report, str) else _against(report, launch)
    if why and not isinstance(report, str):
        report = report_for_launch(kernel.ptx, kernel.name, _hints(launch))
        why = why if _against(report, launch) else ""
    if why or isinstance(report, str):
        return (), why
    config = LaunchConfig(three(launch.grid), three(launch.block), _params(launch))
    accesses: list[Access] = []
    for access in report.accesses:
        view = launch.args[access.param]
        if isinstance(view, View):  # a table is no buffer
            accesses += _accesses(access, view, access.extent.resolve(config), buffers, empty)
    for item in report.indirect:
        accesses += _behind(item, [launch.args[table[1]] for table in item.tables], buffers)
    return tuple(accesses), ""


def tables_of(kernel: Kernel) -> tuple[int, ...]:
    """Parameters that are tables; none if the kernel cannot be proved for other reasons."""
    report = _report(kernel)
    return () if isinstance(report, str) else report.tables


def _behind(item: IndirectReport, tables: Sequence[Arg], buffers: Sequence[Buffer]) -> list[Access]:
    """Accesses through pointers of tables; untouched bytes count as read."""
    written = any(effect == "w" for _, effect in item.lines)
    targets = {view.buffer for table in tables for view in arg_views(table)}
    return [
        Access(buffer, Region(0, buffers[buffer].size_bytes), True, written, item.atomic)
        for buffer in sorted(targets)
        if buffers[buffer].size_bytes
    ]


def _report(kernel: Kernel) -> KernelReport | str:
    try:
        reports = reports_for(kernel.ptx, kernel.name)
    except ParseError as error:
        return f"its PTX could not be read: {error.message}"
    named = [r for r in reports if r.name == kernel.name]
    return named[0] if named else "its PTX has no entry of that name"


def _against(report: KernelReport, launch: Launch) -> str:
    """Why the report does not settle it."""
    given = dict(enumerate(launch.args))
    if not report.movable and not all(isinstance(given.get(i), tuple) for i in report.tables or (-1,)):
        return "; ".join(report.why)
    if len(report.params) < len(launch.args):
        return f"its PTX has {len(report.params)} parameters for {len(launch.args)} arguments"
    for access in report.accesses:
        if access.param >= len(launch.args):
            return "it uses scratch memory"
        arg = launch.args[access.param]
        if isinstance(arg, tuple) and access.write:
            return f"it writes the table of pointers in parameter {access.param}"
        if access.is_tensor_map or access.offset or not isinstance(arg, View | tuple):
            return f"parameter {access.param} holds an address that is no argument"
    return ""


def _hints(launch: Launch) -> ParamHints:
    pointers = frozenset(i for i, a in enumerate(launch.args) if isinstance(a, View | tuple))
    numbers = frozenset(
        i
        for i, a in enumerate(launch.args)
        if isinstance(a, bool | float) or (isinstance(a, int) and abs(a) < FAR)
    )
    return ParamHints(pointers, numbers)


def _params(launch: Launch) -> dict[int | tuple[int, int], int]:
    return {i: int(a) for i, a in enumerate(launch.args) if isinstance(a, bool | int)}


def _accesses(
    access: AccessReport, view: View, reached: Intervals, buffers: Sequence[Buffer], empty: Set[int]
) -> list[Access]:
    base, size = view.offset * item_bytes(view.dtype), buffers[view.buffer].size_bytes
    clamped = [(base + a, base + b) for a, b in reached.inside(-base, size - base)]
    regions, widened = _regions(clamped)
    partial = (widened or not reached.exact) and view.buffer not in empty
    reads = access.plain_read or ((access.plain_write or access.atomic) and partial)
    return [Access(view.buffer, region, reads, access.plain_write, access.atomic) for region in regions]


def _regions(spans: list[tuple[int, int]]) -> tuple[list[Region], bool]:
    """One strided region of regular runs, one each of few, else their hull; True for a hull."""
    if len(spans) <= 1:
        return [Region(a, b - a) for a, b in spans], False
    (first, end), step = spans[0], spans[1][0] - spans[0][0]
    if all((a, b) == (first + i * step, end + i * step) for i, (a, b) in enumerate(spans)):
        return [Region(first, end - first, ((len(spans), step),))], False
    if len(spans) <= MAX_REGIONS:
        return [Region(a, b - a) for a, b in spans], False
    return [Region(first, spans[-1][1] - first)], True
