"""Golden sentences to machine-readable truth.

A golden file says, in sentences written from the kernels' source, what each kernel takes and touches:

    axpy takes y*, x*, a, n                        parameters in order; a star marks a pointer
    axpy reads x, y; writes y                      what a launch may do; `updates` is atomic
    k writes module gbuf                           a variable of the module
    k reads table; indirect through table          buffers named only by what `table` holds
    k is immovable: it calls vprintf               the only honest answer
    k may be immovable: a function calls itself    stopping is honest, an exact answer is better
    on sm_90: k reads a, scratch                   holds for these architectures only

`name (2+8)` places a name at byte 8 of parameter 2 (fields of structs); without it, names follow the
parameter list. Files are named `<part>_<theme>.txt`; the subject is the kernel's name, for Triton the
build's. Triton adds two pointers to every list, `global_scratch` and `profile_scratch`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ARCHS = ("sm_80", "sm_89", "sm_90")
PLACED = re.compile(r"^([\w.]+)(\*?)(?:\s*\((\d+)\+(\d+)\))?$")
SENTENCE = re.compile(
    r"^(?:on ([\w, ]+): )?(\w+) (takes|is immovable:|may be immovable:|reads|writes|updates|indirect)\s*(.*)$"
)
FLAG = {"reads": "read", "writes": "write", "updates": "atomic"}


def sentences(path: Path) -> Iterator[tuple[tuple[str, ...], str, str, str]]:
    """Each line as (architectures or (), kernel, verb, rest)."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = SENTENCE.match(line)
        if found is None:
            raise ValueError(f"{path.name}:{number}: no sentence of the golden language: {line!r}")
        archs, kernel, verb, rest = found.groups()
        yield tuple(a.strip() for a in archs.split(",")) if archs else (), kernel, verb, rest


def taken(rest: str, part: str) -> dict[str, dict[str, Any]]:
    """The parameters of a `takes` sentence by name."""
    items = [item.strip() for item in rest.split(",")]
    placed = any("(" in item for item in items)
    if part == "triton" and not placed:
        items += ["global_scratch*", "profile_scratch*"]
    names: dict[str, dict[str, Any]] = {}
    for index, item in enumerate(items):
        found = PLACED.match(item)
        if found is None or (placed and found[3] is None):
            raise ValueError(f"no parameter: {item!r}")
        param, offset = (int(found[3]), int(found[4])) if placed else (index, 0)
        names[found[1]] = {
            "name": found[1], "param": param, "offset": offset, "pointer": bool(found[2]),
            "read": False, "write": False, "atomic": False,
        }  # fmt: skip
    return names


def describe(record: dict[str, Any], text: str) -> None:
    """Add the clauses of one sentence (`reads a, b; writes module c`) to a kernel's record."""
    for clause in text.split(";"):
        verb, rest = clause.strip().split(" ", 1)
        for name in (n.strip() for n in rest.split(",")):
            if verb == "indirect":
                record["indirect"].append(name.removeprefix("through "))
            elif name.startswith("module "):
                symbol = record["symbols"].setdefault(
                    name[7:], {"name": name[7:], "read": False, "write": False, "atomic": False}
                )
                symbol[FLAG[verb]] = True
            else:
                record["names"][name][FLAG[verb]] = True


def kernels_of(path: Path, arch: str) -> Iterator[dict[str, Any]]:
    """The truth of one golden file for one architecture."""
    part, theme = path.stem.split("_", 1)
    records: dict[str, dict[str, Any]] = {}
    for archs, kernel, verb, rest in sentences(path):
        if archs and arch not in archs:
            continue
        if verb == "takes":
            records[kernel] = {
                "part": part, "theme": theme, "kernel": kernel, "arch": arch, "names": taken(rest, part),
                "symbols": {}, "indirect": [], "immovable": "", "may_be_immovable": "",
            }  # fmt: skip
        elif verb == "is immovable:":
            records[kernel]["immovable"] = rest
        elif verb == "may be immovable:":
            records[kernel]["may_be_immovable"] = rest
        else:
            describe(records[kernel], f"{verb} {rest}")
    yield from records.values()


def ptx_file(part: str, theme: str, kernel: str, arch: str) -> str:
    """Where the PTX of a kernel lies, relative to the corpus."""
    if part == "hand":
        return f"hand/{theme}.ptx"
    return f"ptx/{arch}/{theme if part == 'cuda' else kernel}.ptx"


def truth() -> list[dict[str, Any]]:
    """One record per kernel and architecture whose PTX is checked in."""
    rows = []
    for path in sorted((HERE / "golden").glob("*.txt")):
        for arch in ARCHS if not path.name.startswith("hand") else ("any",):
            for record in kernels_of(path, arch):
                file = ptx_file(record["part"], record["theme"], record["kernel"], arch)
                text = HERE / file
                if not text.exists():
                    continue
                record["ptx"] = file
                # A Triton build may rename a kernel; the entry's own name is in the text.
                entry = (
                    re.search(r"\.entry\s+([\w$]+)", text.read_text()) if record["part"] == "triton" else None
                )
                record["entry"] = entry[1] if entry else record["kernel"]
                names = record.pop("names").values()
                record["pointers"] = [
                    {k: v for k, v in n.items() if k != "pointer"} for n in names if n["pointer"]
                ]
                record["symbols"] = list(record["symbols"].values())
                rows.append(record)
    return rows


def write_truth() -> None:
    """Make `truth.json` anew."""
    lines = ",\n".join(" " + json.dumps(row, sort_keys=True) for row in truth())
    (HERE / "truth.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    write_truth()
