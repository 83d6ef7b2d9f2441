"""Hold the analysis against the interpreter on kernels from elsewhere.

    python corpus/check_unseen.py FILE.ptx ...

The PTX must come from CUDA C++: which parameters are pointers is read from the mangled names (by c++filt).
Every kernel is launched with random arguments, large buffers and small numbers; a launch that faults is tried
again with others. For each file it prints, added up so far:

    kernels, movable    and those that are movable
    launched            kernels with a launch that ran to its end
    touched, exact      pointers that these launches touched; exact: just by the flags that are announced
    const written       pointers to const that are said to be written: too much for certain
    missed              bytes touched that were not announced

A launch need not show all that a kernel may do: pointers that are not exact are not all announced too much.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tessera_ptx import (
    KernelReport,
    LaunchConfig,
    Module,
    ParamHints,
    analyze_launch,
    analyze_module,
    parse,
)
from tessera_ptx.errors import InterpreterFault
from tessera_ptx.interp import Result, run
from tessera_ptx.syntax import Function

BUFFER_BYTES = 1 << 18
ATTEMPTS = 6
MAX_STEPS = 5_000
# Kernels of one template that are launched.
PER_TEMPLATE = 2
WHOLE = {
    "int": np.int32,
    "unsigned int": np.uint32,
    "long": np.int64,
    "unsigned long": np.uint64,
    "short": np.int16,
}
FLOATS = {"float": np.float32, "double": np.float64}


def main(paths: list[str]) -> int:
    counts: Counter[str] = Counter()
    for path in paths:
        check_file(Path(path), counts)
        print(f"{Path(path).name}: " + ", ".join(f"{counts[k]} {k}" for k in COLUMNS), flush=True)
    return 1 if counts["missed"] else 0


COLUMNS = ("kernels", "movable", "launched", "touched", "exact", "const written", "missed")


def check_file(path: Path, counts: Counter[str]) -> None:
    """Adds the kernels of one file."""
    text = path.read_text()
    module = parse(text, path.name)
    reports = analyze_module(module)
    entries = {e.name: e for e in module.entries if e.defined}
    shown = subprocess.run(["c++filt"], input="\n".join(entries), capture_output=True, text=True, check=True)
    chance = np.random.default_rng(0)
    templates: Counter[str] = Counter()
    for plain, name in zip(reports, shown.stdout.splitlines(), strict=True):
        report, entry, kinds = plain, entries[plain.name], parameters(name)
        counts["kernels"] += 1
        if len(kinds) != len(entry.params) or any(p.size > 8 for p in entry.params):
            counts["movable"] += report.movable
            continue
        pointers = frozenset(i for i, kind in enumerate(kinds) if "*" in kind)
        given = ParamHints(pointers, frozenset(range(len(kinds))) - pointers)
        if not report.movable or any(a.param in given.numbers for a in report.accesses):
            report = analyze_launch(module, reports, report.name, given)
        counts["movable"] += report.movable
        counts["const written"] += sum(a.write and kinds[a.param].endswith("const*") for a in report.accesses)
        templates[re.sub(r"<.*", "", name)] += 1
        if report.movable and templates[re.sub(r"<.*", "", name)] <= PER_TEMPLATE:
            check_kernel(module, entry, report, kinds, chance, counts)


def check_kernel(
    module: Module, entry: Function, report: KernelReport, kinds: list[str], chance: Any, counts: Counter[str]
) -> None:
    """One launch that runs, compared with what is announced for it."""
    for attempt in range(ATTEMPTS):
        args = [argument(kind, chance, attempt) for kind in kinds]
        fixed = entry.attributes.get("reqntid") or entry.attributes.get("maxntid") or (128,)
        block = (*(fixed if np.prod(fixed) <= 256 or "reqntid" in entry.attributes else (128,)), 1, 1)[:3]
        grid = (int(chance.integers(1, 4)), int(chance.integers(1, 3)), 1)
        try:
            result = run(module, entry.name, grid, block, args, max_steps=MAX_STEPS)
        except InterpreterFault:
            continue
        counts["launched"] += 1
        numbers = {i: int(a) for i, a in enumerate(args) if isinstance(a, int)}
        counts["missed"] += missed(report, LaunchConfig(grid, block, numbers), result)
        for place, kind in enumerate(kinds):
            if "*" in kind:
                access, seen = report.access(place), result.touched(place)
                told = (access.read, access.write) if access else (False, False)
                read, write = (seen.read | seen.atomic).any(), (seen.write | seen.atomic).any()
                counts["touched"] += bool(read or write)
                counts["exact"] += bool(read or write) and told == (read, write)
        return


def missed(report: KernelReport, launch: LaunchConfig, result: Result) -> int:
    """How many bytes a launch touched that were not announced."""
    masks = {name: np.zeros((3, data.nbytes), bool) for name, data in result.buffers.items()}
    for access in report.accesses:
        buffer, start = result.pointers[access.param, access.offset]
        size = masks[buffer].shape[1]
        kinds = np.array([access.read or access.atomic, access.write or access.atomic, access.atomic])
        for low, high in access.extent.resolve(launch).inside(-start, size - start):
            masks[buffer][:, start + low : start + high] |= kinds[:, None]
    variables = {f":{symbol.name}" for symbol in report.symbols}
    return sum(
        int((np.stack([seen.read, seen.write, seen.atomic]) & ~masks[name]).sum())
        for name, seen in result.masks.items()
        if name not in variables
    )


def parameters(name: str) -> list[str]:
    """The types of a demangled function's parameters."""
    depth, found = 0, [""]
    for letter in reversed(name):
        depth += letter in ")>]}"
        depth -= letter in "(<[{"
        if depth == 0 and letter == "(":
            break
        if depth == 1 and letter == ",":
            found.append("")
        elif depth and not (depth == 1 and letter == ")"):
            found[-1] += letter
    return [f[::-1].strip() for f in reversed(found) if f.strip()]


def argument(kind: str, chance: Any, attempt: int) -> Any:
    """A random argument; indices that lie in memory are small."""
    base = kind.replace("const", "").replace("*", "").strip()
    if "*" in kind and base in WHOLE:
        size = BUFFER_BYTES // np.dtype(WHOLE[base]).itemsize
        return chance.integers(0, (2, 4, 16)[attempt % 3], size).astype(WHOLE[base])
    if "*" in kind:
        dtype = np.dtype(FLOATS.get(base, np.float16))
        return chance.standard_normal(BUFFER_BYTES // dtype.itemsize).astype(dtype)
    if base in FLOATS:
        return FLOATS[base](chance.random())
    return (
        int(chance.integers(0, 2))
        if base == "bool"
        else 1 << int(chance.integers(0, 8 if attempt < 5 else 4))
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
