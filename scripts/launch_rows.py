"""Measured launches as rows: what `fit_overheads.py` fits and `compare_profile.py` compares.

    python -m scripts.launch_rows DIR... --out benchmarks/results/launches_h200_202611.json

Each DIR holds what `benchmarks/gpu_profile.py` wrote on a GPU. A row is one distinct launch: which family of
models, which step, the work counted from it, how often the step runs it and how long it took. Work is kept as
counted, without tensors: when the rules of `counts.py` or `overheads.py` change, the rows must be made again.
"""

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from tessera.ir import Trace
from tessera.profile.counts import OpClass, Work
from tessera.profile.estimate import works

# Keys of a whole step.
STEP_KEYS = ("num_launches", "num_distinct", "num_measured", "sum_us", "whole_us", "clock_mhz")


@dataclass(frozen=True, slots=True)
class Row:
    """One distinct launch of one step."""

    # Family of models: "llama-3-8b".
    family: str
    # "llama-3-8b decode, torch".
    step: str
    kernel: str
    count: int
    us: float
    work: Work


def from_profile(folder: Path) -> Iterator[Row]:
    """The rows of a measured profile; launches that were not measured are left out."""
    profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    traces = json.loads(gzip.decompress((folder / "launches.json.gz").read_bytes()))
    for measured in profile["rows"]:
        step = f"{measured['name']}, {measured['front']}"
        if step not in traces:
            continue
        counted = works(msgspec.convert(traces[step], Trace))
        for launch in measured["launches"]:
            work = counted[launch["place"]]
            if launch["us"] and work.op is not OpClass.ALLOCATION:
                family = measured["name"].split()[0]
                us = round(launch["us"], 3)
                yield Row(family, step, launch["kernel"], launch["count"], us, work)


def merged(rows: Iterator[Row]) -> list[Row]:
    """Launches of one step that differ in nothing a model sees are one row, with their mean time."""
    kept: dict[tuple[str, str, Work], list[Row]] = {}
    for row in rows:
        kept.setdefault((row.step, row.kernel, row.work), []).append(row)
    return [_mean(alike) for alike in kept.values()]


def _mean(alike: Sequence[Row]) -> Row:
    count = sum(r.count for r in alike)
    us = sum(r.count * r.us for r in alike) / count
    first = alike[0]
    return Row(first.family, first.step, first.kernel, count, round(us, 3), first.work)


def about(folder: Path) -> dict[str, Any]:
    """What a profile was measured on, and its steps as wholes."""
    profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    steps = {}
    for row in profile["rows"]:
        why = row.get("skipped") or str(row.get("error", "")).strip().splitlines()[-1:]
        known = {key: row[key] for key in STEP_KEYS if key in row}
        steps[f"{row['name']}, {row['front']}"] = known or {"failed": why}
    columns = ["step", "kernel", "launches", "us", "work", "overhead"]
    return {**profile["machine"], "layers": profile["layers"], "columns": columns, "steps": steps}


def write(path: Path, rows: Sequence[Row], head_of: dict[str, Any]) -> None:
    """One row a line; what is empty is left out."""
    lines = [json.dumps(_packed(row), separators=(",", ":")) for row in rows]
    head = json.dumps(head_of)
    path.write_text(f'{{"about": {head},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def _packed(row: Row) -> list[Any]:
    work = {k: v for k, v in asdict(row.work).items() if v}
    overhead = work.pop("overhead", ())
    return [row.step, row.kernel, row.count, row.us, work, dict(overhead)]


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    return [_unpacked(*packed) for packed in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def read_about(path: Path) -> dict[str, Any]:
    """The head of a file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["about"]
    return found


def _unpacked(
    step: str, kernel: str, count: int, us: float, work: dict[str, Any], overhead: dict[str, float]
) -> Row:
    counted = Work(
        OpClass(work["op"]),
        work["dtype"],
        work.get("flops", 0.0),
        work.get("num_bytes", 0),
        tuple(work.get("shape", ())),
        overhead=tuple(overhead.items()),
    )
    return Row(step.split(maxsplit=1)[0], step, kernel, count, us, counted)


def main() -> None:
    """Reads profiles and writes their rows; of a step that was measured twice, the first."""
    parser = argparse.ArgumentParser(description="Measured launches as rows.")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    heads = [about(folder) for folder in options.folders]
    rows: list[Row] = []
    for folder in options.folders:
        seen = {row.step for row in rows}
        rows += [row for row in merged(from_profile(folder)) if row.step not in seen]
    steps = {name: known for head in reversed(heads) for name, known in head["steps"].items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, rows, {**heads[0], "steps": steps})
    print(f"{len(rows)} rows, {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
