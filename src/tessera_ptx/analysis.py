"""Accesses of each kernel of a module; raises ParseError only.

A kernel is movable if every access is through a parameter or to a compiler-made constant table, and nothing
stopped the analysis. The host can set every named module variable by `cudaMemcpyToSymbol`, so constant tables
have names that host code cannot spell: function statics, literals, constant aggregates, switch and math
tables.
"""

import gc
import re
from collections.abc import Iterable
from typing import Any

from tessera_ptx.collect import Facts, Piece, Touch, collect
from tessera_ptx.expression import Exporter, ExtentLimit, ExtentPart, Sum, loops_in
from tessera_ptx.extent import Extent, union
from tessera_ptx.nodes import ParamHints
from tessera_ptx.parser import parse
from tessera_ptx.poly import Poly
from tessera_ptx.report import AccessReport, IndirectReport, KernelReport, SymbolReport
from tessera_ptx.syntax import Function, Module, Variable

_MAX_PARTS = 64
_DEEP = ("deep", "")
# `_ZZ`: function statics; others are compiler names (`.` becomes `$` or `_$_` in PTX).
_PRIVATE = re.compile(r"_ZZ|(?:\$|_\$_)str|__const(?:\$|_\$_)|switch(?:\$|_\$_)table|__unnamed_\d|__cudart_")


def analyze(text: str | bytes, file: str = "<ptx>") -> tuple[KernelReport, ...]:
    # Parsing allocates millions of objects and frees none: collection only costs time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return analyze_module(parse(text, file))
    finally:
        if collecting:
            gc.enable()


def analyze_module(module: Module) -> tuple[KernelReport, ...]:
    facts = [(entry, collect(module, entry)) for entry in module.entries if entry.defined]
    written = {name for _, f in facts for name, touch in f.symbols.items() if touch.write}
    return tuple(_report(module, entry, f, written) for entry, f in facts)


def analyze_launch(
    module: Module, known: tuple[KernelReport, ...], name: str, given: ParamHints
) -> KernelReport:
    entry = next(e for e in module.entries if e.defined and e.name == name)
    written = {symbol.name for report in known for symbol in report.symbols if symbol.write}
    return _report(module, entry, collect(module, entry, given), written)


def _report(module: Module, entry: Function, facts: Facts, written: set[str]) -> KernelReport:
    exporter = Exporter(facts.flow.atoms)
    loops = {h: _limits(exporter, conditions) for h, conditions in facts.loops.items()}
    accesses = tuple(
        AccessReport(
            param, offset, touch.read, touch.write, touch.atomic, _extent(exporter, touch, loops),
            touch.by_map, tuple(sorted(touch.lines)),
        )
        for (param, offset), touch in sorted(facts.params.items())
    )  # fmt: skip
    symbols = tuple(
        SymbolReport(name, t.read, t.write, t.atomic, tuple(sorted(t.lines)))
        for name, t in sorted(facts.symbols.items())
    )
    indirect = tuple(
        IndirectReport(
            tuple(table for table in tables if table != _DEEP),
            t.read,
            t.write,
            t.atomic,
            tuple(sorted(t.lines)),
            _DEEP in tables,
        )
        for tables, t in sorted(facts.indirect.items(), key=lambda item: repr(item[0]))
    )
    why = _reasons(module, facts, symbols, indirect, written)
    params = tuple((p.name, p.size) for p in entry.params)
    return KernelReport(entry.name, module.target, not why, why, accesses, symbols, indirect, params)


def _reasons(
    module: Module,
    facts: Facts,
    symbols: tuple[SymbolReport, ...],
    indirect: tuple[IndirectReport, ...],
    written: set[str],
) -> tuple[str, ...]:
    reasons = [(line, f"line {line}: {what}") for line, what in facts.stops]
    variables = {v.name: v for v in module.variables}
    for symbol in symbols:
        reason = _symbol_reason(symbol, variables.get(symbol.name), written)
        if reason:
            reasons.append((symbol.lines[0][0], f"line {symbol.lines[0][0]}: {reason}"))
    reasons += [(item.lines[0][0], item.why) for item in indirect]
    return tuple(dict.fromkeys(text for _, text in sorted(reasons)))


def _symbol_reason(symbol: SymbolReport, variable: Variable | None, written: set[str]) -> str:
    if variable is None:
        return f"accesses '{symbol.name}', which the module does not declare"
    if symbol.write:
        return f"writes the module variable '{symbol.name}'"
    if symbol.name in written:
        return f"reads the module variable '{symbol.name}', which a kernel of this module writes"
    if not variable.initial or variable.linkage or not _PRIVATE.match(symbol.name):
        return f"reads the module variable '{symbol.name}', which the host may set"
    return ""


def _limits(exporter: Exporter, conditions: Iterable[Any]) -> tuple[ExtentLimit, ...]:
    return tuple(
        ExtentLimit(exporter.sum(c.left), c.relation, exporter.sum(c.right), c.bits, c.signed)
        for c in conditions
    )


def _extent(exporter: Exporter, touch: Touch, loops: dict[int, tuple[ExtentLimit, ...]]) -> Extent:
    if touch.by_map or any(p.offset is None or p.width == 0 for p in touch.pieces):
        return Extent((ExtentPart(None, 0, (), False),))
    parts = _joined(exporter, touch.pieces)
    if len(parts) > _MAX_PARTS:
        return Extent((ExtentPart(None, 0, (), False),))
    counted = loops_in(s for p in parts for s in _sums(p.offset, p.limits))
    while more := loops_in(s for h in counted for s in _sums((), loops.get(h, ()))) - counted:
        counted |= more  # a loop's end may depend on an outer loop
    return Extent(parts, tuple((h, loops[h]) for h in sorted(counted) if h in loops))


def _sums(offset: Sum | None, limits: tuple[ExtentLimit, ...]) -> list[Sum]:
    return [offset or (), *(side for limit in limits for side in (limit.left, limit.right))]


def _joined(exporter: Exporter, pieces: list[Piece]) -> tuple[ExtentPart, ...]:
    """One part per byte run."""
    runs: dict[Any, tuple[Piece, set[tuple[int, int]]]] = {}
    for piece in pieces:
        offset: Poly = piece.offset or {}
        moving = frozenset((m, c) for m, c in offset.items() if m)
        under = tuple(
            (frozenset(c.left.items()), c.relation, frozenset(c.right.items()), c.bits, c.signed)
            for c in piece.conditions
        )
        _, found = runs.setdefault((moving, under, piece.complete), (piece, set()))
        found.add((offset.get((), 0), offset.get((), 0) + piece.width))
    parts: list[ExtentPart] = []
    for piece, found in runs.values():
        limits = _limits(exporter, piece.conditions)
        moving_sum = exporter.sum({m: c for m, c in (piece.offset or {}).items() if m})
        for low, high in union(found):
            offset_sum = (*moving_sum, (low, ())) if low else moving_sum
            parts.append(ExtentPart(offset_sum, high - low, limits, piece.complete))
    return tuple(parts)
