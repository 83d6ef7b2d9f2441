"""Reports for people: sentences, rows of a table, and the source lines behind an access.

sentences(report)  ->  ["axpy reads param 0, param 1; writes param 0"]
rows(report)       ->  one row per pointer, symbol and table
explain(report, text) -> the lines of the PTX that make each access
"""

from collections.abc import Iterator, Sequence

from tessera.analyze.ptx.report import KernelReport

HEADINGS = ("kernel", "buffer", "access", "bytes")
_VERBS = {"r": "reads", "w": "writes", "a": "updates"}


def buffer_name(report: KernelReport, param: int, offset: int, names: Sequence[str] = ()) -> str:
    """`x` when names are given, else `param 0`; `+8` for a field of a struct."""
    name = names[param] if param < len(names) else f"param {param}"
    size = report.params[param][1] if param < len(report.params) else 8
    return name if not offset and size <= 8 else f"{name}+{offset}"


def sentences(report: KernelReport, names: Sequence[str] = ()) -> list[str]:
    """What the kernel does, in one sentence; a second one when it cannot be moved."""
    read, written, updated = [], [], []
    for access in report.accesses:
        name = buffer_name(report, access.param, access.offset, names)
        read += [name] if access.plain_read else []
        written += [name] if access.plain_write else []
        updated += [name] if access.atomic else []
    for symbol in report.symbols:
        name = f"module variable {symbol.name}"
        read += [name] if symbol.read and not symbol.atomic else []
        written += [name] if symbol.write and not symbol.atomic else []
        updated += [name] if symbol.atomic else []
    for item in report.indirect:
        tables = ", ".join(_table(report, t, names) for t in item.tables)
        name = f"memory behind {tables}"
        read += [name] if item.read and not item.atomic else []
        written += [name] if item.write and not item.atomic else []
        updated += [name] if item.atomic else []
    said = [
        f"{verb} {', '.join(buffers)}"
        for verb, buffers in (("reads", read), ("writes", written), ("updates", updated))
        if buffers
    ]
    out = [f"{report.name} {'; '.join(said) or 'touches no memory'}"]
    if not report.movable:
        out.append(f"{report.name} is immovable: {'; '.join(report.why)}")
    return out


def _table(report: KernelReport, table: tuple[object, ...], names: Sequence[str]) -> str:
    if table[0] == "param" and isinstance(table[1], int) and isinstance(table[2], int):
        return buffer_name(report, table[1], table[2], names)
    return f"module variable {table[1]}" if table[0] == "symbol" else "pointers in memory"


def _flags(read: bool, write: bool, atomic: bool) -> str:
    if atomic:
        return "atomic"
    return "read, write" if read and write else "write" if write else "read"


def rows(report: KernelReport, names: Sequence[str] = ()) -> list[tuple[str, str, str, str]]:
    """One row per buffer: kernel, buffer, access, bytes."""
    out = [
        (
            report.name,
            buffer_name(report, a.param, a.offset, names),
            _flags(a.read, a.write, a.atomic),
            a.extent_text,
        )
        for a in report.accesses
    ]
    out += [
        (report.name, f"variable {s.name}", _flags(s.read, s.write, s.atomic), "any") for s in report.symbols
    ]
    for item in report.indirect:
        tables = ", ".join(_table(report, t, names) for t in item.tables)
        out.append((report.name, f"behind {tables}", _flags(item.read, item.write, item.atomic), "any"))
    return out


def explain(report: KernelReport, text: str, names: Sequence[str] = ()) -> Iterator[str]:
    """Every access with the PTX lines that make it, then what stands against moving the kernel."""
    source = text.split("\n")
    for access in report.accesses:
        name = buffer_name(report, access.param, access.offset, names)
        yield f"{name}: {_flags(access.read, access.write, access.atomic)}; {access.extent_text}"
        yield from _lines(source, access.lines)
    for symbol in report.symbols:
        yield f"variable {symbol.name}: {_flags(symbol.read, symbol.write, symbol.atomic)}"
        yield from _lines(source, symbol.lines)
    for item in report.indirect:
        tables = ", ".join(_table(report, t, names) for t in item.tables)
        yield f"behind {tables}: {_flags(item.read, item.write, item.atomic)}"
        yield from _lines(source, item.lines)
    for reason in report.why:
        yield f"immovable: {reason}"


def _lines(source: list[str], lines: Sequence[tuple[int, str]]) -> Iterator[str]:
    for line, effect in lines:
        code = source[line - 1].strip() if 0 < line <= len(source) else ""
        yield f"  {line:6d}  {_VERBS[effect]:8s}{code}"
