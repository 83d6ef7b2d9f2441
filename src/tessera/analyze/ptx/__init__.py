"""The PTX analyzer: what a kernel reads and writes, proved from its code.

    text -> lexer, parser -> Module -> flatten (calls) -> cfg -> scan -> fixpoint (values of addresses)
         -> classify (which buffer) -> report (accesses, extents, movable or why not)

Sound before precise: an access is never left out. What the analysis cannot follow makes the kernel
immovable, by name and line. See `report` for the result, `extent` for the bytes, `store` for the cache,
`show` for sentences and tables.
"""

from tessera.analyze.ptx.extent import Extent, Launch
from tessera.analyze.ptx.intervals import Intervals
from tessera.analyze.ptx.launches import Given
from tessera.analyze.ptx.parser import parse
from tessera.analyze.ptx.report import (
    AccessReport,
    IndirectReport,
    KernelReport,
    SymbolReport,
    analyze_module,
    analyze_ptx,
    to_json,
)
from tessera.analyze.ptx.store import report_for_launch, reports_for

__all__ = [
    "AccessReport",
    "Extent",
    "Given",
    "IndirectReport",
    "Intervals",
    "KernelReport",
    "Launch",
    "SymbolReport",
    "analyze_module",
    "analyze_ptx",
    "parse",
    "report_for_launch",
    "reports_for",
    "to_json",
]
