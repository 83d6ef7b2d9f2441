"""Reports of kernels, with their sentences, tables, PTX lines and JSON."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tessera_ptx.extent import Extent

HEADINGS = ("kernel", "buffer", "access", "bytes")
_VERBS = {"r": "reads", "w": "writes", "a": "updates"}


@dataclass(frozen=True, slots=True)
class AccessReport:
    param: int
    offset: int
    read: bool
    write: bool
    # Also reads and writes.
    atomic: bool
    extent: Extent
    # The buffer is behind a tensor map.
    is_tensor_map: bool
    # (source line, r / w / a)
    lines: tuple[tuple[int, str], ...]

    @property
    def plain_read(self) -> bool:
        return any(effect == "r" for _, effect in self.lines)

    @property
    def plain_write(self) -> bool:
        return any(effect == "w" for _, effect in self.lines)

    @property
    def extent_text(self) -> str:
        return "tensor map" if self.is_tensor_map else str(self.extent)


@dataclass(frozen=True, slots=True)
class SymbolReport:
    name: str
    read: bool
    write: bool
    atomic: bool
    lines: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class IndirectReport:
    # ("param", index, offset), ("symbol", name), ("frame", space, name) or ("unknown", "")
    tables: tuple[tuple[Any, ...], ...]
    read: bool
    write: bool
    atomic: bool
    lines: tuple[tuple[int, str], ...]
    # Also through loaded pointers, as in a list.
    deep: bool

    @property
    def why(self) -> str:
        where = ", ".join(map(_table_text, self.tables)) or "memory"
        line = self.lines[0][0]
        verb = "accesses" if self.read and self.write else "writes" if self.write else "reads"
        return f"line {line}: {verb} through pointers loaded from {where}"


@dataclass(frozen=True, slots=True)
class KernelReport:
    name: str
    arch: str
    movable: bool
    why: tuple[str, ...]
    accesses: tuple[AccessReport, ...]
    symbols: tuple[SymbolReport, ...]
    indirect: tuple[IndirectReport, ...]
    params: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return "\n".join(sentences(self))

    @property
    def tables(self) -> tuple[int, ...]:
        """If only the buffers in these tables are unknown."""
        places = {table for item in self.indirect for table in item.tables}
        known = {item.why for item in self.indirect}
        flat = all(table[0] == "param" and table[2] == 0 for table in places)
        whole = flat and known.issuperset(self.why) and not any(item.deep for item in self.indirect)
        return tuple(sorted(table[1] for table in places)) if whole else ()

    def access(self, param: int, offset: int = 0) -> AccessReport | None:
        return next((a for a in self.accesses if (a.param, a.offset) == (param, offset)), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "arch": self.arch,
            "movable": self.movable,
            "why": list(self.why),
            "accesses": [
                {"param": a.param, "offset": a.offset, "read": a.read, "write": a.write,
                 "atomic": a.atomic, "extent": a.extent_text}
                for a in self.accesses
            ],
            "symbols": [{"name": s.name, "read": s.read, "write": s.write} for s in self.symbols],
            "indirect": [
                {"tables": [_table_dict(t) for t in i.tables], "read": i.read, "write": i.write,
                 "atomic": i.atomic, "lines": [line for line, _ in i.lines]}
                for i in self.indirect
            ],
        }  # fmt: skip


def to_json(reports: Iterable[KernelReport]) -> str:
    return json.dumps({"kernels": [r.as_dict() for r in reports]}, indent=2)


def buffer_name(report: KernelReport, param: int, offset: int, names: Sequence[str] = ()) -> str:
    """`+8` for a struct field."""
    name = names[param] if param < len(names) else f"param {param}"
    size = report.params[param][1] if param < len(report.params) else 8
    return name if not offset and size <= 8 else f"{name}+{offset}"


def sentences(report: KernelReport, names: Sequence[str] = ()) -> list[str]:
    read, written, updated = [], [], []
    for access in report.accesses:
        name = buffer_name(report, access.param, access.offset, names)
        read += [name] if access.plain_read else []
        written += [name] if access.plain_write else []
        updated += [name] if access.atomic else []
    others: list[tuple[str, SymbolReport | IndirectReport]] = []
    others += [(f"module variable {s.name}", s) for s in report.symbols]
    for item in report.indirect:
        others.append((f"memory behind {', '.join(_table(report, t, names) for t in item.tables)}", item))
    for name, other in others:
        read += [name] if other.read and not other.atomic else []
        written += [name] if other.write and not other.atomic else []
        updated += [name] if other.atomic else []
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


def _table_text(table: tuple[Any, ...]) -> str:
    if table[0] == "param":
        return f"parameter {table[1]}" + (f" (offset {table[2]})" if table[2] else "")
    return (
        f"'{table[1]}'"
        if table[0] == "symbol"
        else "memory"
        if table[0] == "unknown"
        else f"{table[1]} memory"
    )


def _table_dict(table: tuple[Any, ...]) -> dict[str, Any]:
    if table[0] == "param":
        return {"param": table[1], "offset": table[2]}
    return {table[0]: table[1]}
