"""Reports by hash of the PTX text, in memory and in a directory if given.

An unreadable file is rewritten; only a forged file of the right shape gives a wrong result.
"""

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tessera_ptx.analysis import analyze, analyze_launch
from tessera_ptx.expression import ExtentLimit, ExtentPart
from tessera_ptx.extent import Extent
from tessera_ptx.nodes import ParamHints
from tessera_ptx.parser import parse
from tessera_ptx.report import AccessReport, IndirectReport, KernelReport, SymbolReport
from tessera_ptx.syntax import Module

_MAX_KEPT = 512
_kept: OrderedDict[str, tuple[KernelReport, ...]] = OrderedDict()


def key_of(text: str | bytes) -> str:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return f"{hashlib.sha256(data).hexdigest()}-{_code_digest()}"


@cache
def _code_digest() -> str:
    """Results of other versions are not used."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def reports_for(
    text: str | bytes, file: str = "<ptx>", directory: Path | None = None
) -> tuple[KernelReport, ...]:
    key = key_of(text)
    found = _kept.get(key)
    if found is None and directory is not None:
        found = _read(directory / f"{key}.json")
    if found is None:
        found = analyze(text, file)
        if directory is not None:
            _write(directory / f"{key}.json", found)
    _kept[key] = found
    _kept.move_to_end(key)
    while len(_kept) > _MAX_KEPT:
        _kept.popitem(last=False)
    return found


@lru_cache(maxsize=_MAX_KEPT)
def report_for_launch(text: str | bytes, name: str, given: ParamHints) -> KernelReport:
    return analyze_launch(_parsed(text), reports_for(text, name), name, given)


@lru_cache(maxsize=4)
def _parsed(text: str | bytes) -> Module:
    return parse(text)


def forget() -> None:
    _kept.clear()
    report_for_launch.cache_clear()
    _parsed.cache_clear()


def _write(path: Path, reports: tuple[KernelReport, ...]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"kernels": [_plain(r) for r in reports]}, out)
        os.replace(name, path)
    except OSError:
        return  # an unwritable cache is ignored


def _read(path: Path) -> tuple[KernelReport, ...] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return tuple(_kernel(k) for k in data["kernels"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


def _plain(report: KernelReport) -> dict[str, Any]:
    return {
        "head": [report.name, report.arch, report.movable, report.why, report.params],
        "accesses": [
            [a.param, a.offset, a.read, a.write, a.atomic, a.is_tensor_map, a.lines, *_extent(a.extent)]
            for a in report.accesses
        ],
        "symbols": [[s.name, s.read, s.write, s.atomic, s.lines] for s in report.symbols],
        "indirect": [[i.tables, i.read, i.write, i.atomic, i.lines, i.deep] for i in report.indirect],
    }  # fmt: skip


def _extent(extent: Extent) -> tuple[Any, Any]:
    return extent.parts, extent.loops


def _tuples(data: Any) -> Any:
    return tuple(_tuples(d) for d in data) if isinstance(data, list) else data


def _limits(data: Any) -> tuple[ExtentLimit, ...]:
    return tuple(ExtentLimit(*limit) for limit in data)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(kind)
    return value


def _access(data: Any) -> AccessReport:
    param, offset, read, write, atomic, is_map, lines, parts, loops = _tuples(data)
    extent = Extent(
        tuple(ExtentPart(p[0], p[1], _limits(p[2]), p[3]) for p in parts),
        tuple((header, _limits(limits)) for header, limits in loops),
    )
    return AccessReport(
        _checked(param, int), _checked(offset, int), _checked(read, bool), _checked(write, bool),
        _checked(atomic, bool), extent, _checked(is_map, bool), _checked(lines, tuple),
    )  # fmt: skip


def _kernel(data: Any) -> KernelReport:
    name, arch, movable, why, params = _tuples(data["head"])
    return KernelReport(
        _checked(name, str), _checked(arch, str), _checked(movable, bool), _checked(why, tuple),
        tuple(_access(a) for a in data["accesses"]),
        tuple(SymbolReport(*_tuples(s)) for s in data["symbols"]),
        tuple(IndirectReport(*_tuples(i)) for i in data["indirect"]),
        _checked(params, tuple),
    )  # fmt: skip
