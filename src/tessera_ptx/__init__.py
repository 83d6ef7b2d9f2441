"""Static analysis of the memory accesses of PTX kernels, and an interpreter that checks it.

    print(*analyze(open("axpy.ptx").read()), sep="\n")

    text -> lexer, parser -> Module -> flatten (calls) -> cfg -> scan -> fixpoint (values of addresses)
         -> classify (which buffer) -> analysis (accesses, extents, movable or why not) -> KernelReport

Sound: no access is left out, and a kernel that cannot be followed is immovable, with name and line.
`tessera_ptx.interp.run` runs a launch on NumPy and marks every touched byte.
"""

from tessera_ptx.analysis import analyze, analyze_launch, analyze_module
from tessera_ptx.errors import ParseError, PtxError
from tessera_ptx.extent import Extent, Intervals, LaunchConfig
from tessera_ptx.nodes import ParamHints
from tessera_ptx.parser import parse
from tessera_ptx.report import (
    AccessReport,
    IndirectReport,
    KernelReport,
    SymbolReport,
    explain,
    rows,
    sentences,
    to_json,
)
from tessera_ptx.store import report_for_launch, reports_for
from tessera_ptx.syntax import Module

__all__ = [
    "AccessReport",
    "Extent",
    "IndirectReport",
    "Intervals",
    "KernelReport",
    "LaunchConfig",
    "Module",
    "ParamHints",
    "ParseError",
    "PtxError",
    "SymbolReport",
    "analyze",
    "analyze_launch",
    "analyze_module",
    "explain",
    "parse",
    "report_for_launch",
    "reports_for",
    "rows",
    "sentences",
    "to_json",
]
