"""The accuracy table of docs/ptx-corpus.md: `python corpus/make_corpus.py --table`.

A pointer parameter is *exact* when the analysis gives the read, write and atomic flags of its golden
sentence, *over-approximated* when it gives more, and *missed* when it gives fewer (an update reads and
writes). Parameters of kernels that the analysis stops on are counted apart: nothing is claimed for
them. *Interpreter-checked* kernels have a launch whose touched bytes are compared with the announced
ones.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import checks
import numpy as np

from tessera_ptx.interp import Result
from tessera_ptx.report import AccessReport, KernelReport

MARKER = "<!-- made by: python corpus/make_corpus.py --docs -->"
PARTS = {"cuda": "CUDA C++ (nvcc)", "triton": "Triton", "hand": "written by hand"}


@dataclass(slots=True)
class Counts:
    """One line of the table."""

    kernels: int = 0
    pointers: int = 0
    exact: int = 0
    extra: int = 0
    missed: int = 0
    immovable: int = 0
    held: int = 0  # pointer parameters of immovable kernels
    checked: int = 0


def flags(entry: Any) -> tuple[bool, bool, bool]:
    """Read, write and atomic of a record that has them; an update is a read and a write too."""
    read, write, atomic = (bool(entry[k]) for k in ("read", "write", "atomic"))
    return read or atomic, write or atomic, atomic


def verdict(row: dict[str, Any], report: KernelReport, pointer: dict[str, Any]) -> str:
    """exact, extra or missed for one pointer parameter."""
    access = report.access(pointer["param"], pointer["offset"])
    got = (False,) * 3
    if access is not None:
        got = flags({"read": access.read, "write": access.write, "atomic": access.atomic})
    want = flags(pointer)
    if any(w and not g for w, g in zip(want, got, strict=True)):
        return "missed"
    return "exact" if want == got else "extra"


def count(rows: list[dict[str, Any]]) -> Counts:
    """The table's numbers for some rows."""
    total = Counts()
    for row in rows:
        report = checks.report_of(row)
        total.kernels += 1
        total.pointers += len(row["pointers"])
        total.checked += checks.is_runnable(row)
        if not report.movable:
            total.immovable += 1
            total.held += len(row["pointers"])
            continue
        found = Counter(verdict(row, report, pointer) for pointer in row["pointers"])
        total.exact += found["exact"]
        total.extra += found["extra"]
        total.missed += found["missed"]
    return total


def render() -> str:
    """The tables as Markdown."""
    lines = [
        "| part | architecture | kernels | pointer parameters | exact | over-approximated | missed "
        "| immovable kernels (their pointers) | interpreter-checked |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = checks.rows()
    for part, title in PARTS.items():
        for arch in sorted({row["arch"] for row in rows if row["part"] == part}):
            some = [row for row in rows if (row["part"], row["arch"]) == (part, arch)]
            lines.append(_line(title, "as written" if arch == "any" else arch, count(some)))
    lines.append(_line("**all**", "", count(rows)))
    return "\n".join([*lines, "", *_extents(rows), "", *_reasons(rows), "", *_extras(rows)])


def write_docs(text: str) -> None:
    """Replace the tables of docs/ptx-corpus.md, which stand at its end behind the marker."""
    page = checks.HERE.parent / "docs" / "ptx-corpus.md"
    head = page.read_text().partition(MARKER)[0]
    page.write_text(f"{head}{MARKER}\n\n{text}\n")


def _line(title: str, arch: str, c: Counts) -> str:
    cells = [
        title,
        arch,
        c.kernels,
        c.pointers,
        c.exact,
        c.extra,
        c.missed,
        f"{c.immovable} ({c.held})",
        c.checked,
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def extent_verdict(access: AccessReport, launch: Any, result: Result) -> str:
    """How the announced bytes of one access compare with the touched ones, in one launch."""
    home = result.pointers.get((access.param, access.offset))
    if home is None or access.is_tensor_map:
        return "tensor map" if home is not None else "not given"
    seen = result.masks[home[0]]
    touched = seen.read | seen.write | seen.atomic
    announced = np.zeros(touched.size, bool)
    extent = access.extent.resolve(checks.static_launch(launch))
    for low, high in extent.spans:
        first = 0 if low is None else max(home[1] + low, 0)
        announced[first : touched.size if high is None else max(home[1] + high, 0)] = True
    if (announced == touched).all():
        return "proved equal" if extent.exact else "equal"
    return "wider" if all(None not in span for span in extent.spans) else "whole buffer"


def _extents(rows: list[dict[str, Any]]) -> list[str]:
    """Announced against touched bytes, one launch for each checked kernel."""
    names = ("proved equal", "equal", "wider", "whole buffer", "tensor map")
    lines = [f"| accessed pointers, one launch each | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for part, title in PARTS.items():
        found: Counter[str] = Counter()
        for row in rows:
            report = checks.report_of(row)
            if row["part"] == part and report.movable and checks.is_runnable(row):
                launch, result = checks.run_row(row, 1)
                found.update(extent_verdict(access, launch, result) for access in report.accesses)
        lines.append(f"| {title} | {' | '.join(str(found[name]) for name in names)} |")
    return lines


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Why kernels are immovable: the first reason, without its line and names."""
    found: dict[str, set[str]] = {}
    for row in rows:
        report = checks.report_of(row)
        if not report.movable:
            reason = re.sub(r"^line \d+: ", "", report.why[0])
            found.setdefault(reason, set()).add(row["kernel"])
    lines = ["| immovable because | kernels |", "|---|---|"]
    return lines + [f"| {reason} | {', '.join(sorted(names))} |" for reason, names in sorted(found.items())]


def _extras(rows: list[dict[str, Any]]) -> list[str]:
    """Which pointers are over-approximated."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        report = checks.report_of(row)
        for pointer in row["pointers"] if report.movable else ():
            if verdict(row, report, pointer) == "extra":
                found.setdefault((row["kernel"], pointer["name"]), set()).add(row["arch"])
    if not found:
        return ["No pointer parameter is over-approximated."]
    lines = ["| over-approximated | pointer | architectures |", "|---|---|---|"]
    return lines + [f"| {k} | {n} | {', '.join(sorted(a))} |" for (k, n), a in sorted(found.items())]
