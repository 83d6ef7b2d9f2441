"""Models against measurements: how far the public tables and the fitted models are from a GPU's own times.

    python -m benchmarks.compare_profile benchmarks/results/launches_h200_202611.json --out benchmarks/results

The file holds the measured launches as `scripts/launch_rows.py` writes them (a folder written by
`gpu_profile.py` will do as well). Each distinct launch is priced from the best source present (public tables,
where the extra `tables` is installed and they cover it) and by the fitted models alone, and compared with its
measured time; and so are whole steps, with each launch counted as often as it runs. Overheads were
fitted to these same launches; so a third price takes them from a fit without the launch's own family of
models. Errors are of the model against the measurement. Launches that were not measured are left out of both
sides, and the share of the step that they would have been is shown by how sum and whole differ.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from scripts import launch_rows
from scripts.fit_overheads import left_out
from scripts.launch_rows import Row

from tessera.ir import Cost, Source
from tessera.profile.corrections import Term, packaged
from tessera.profile.estimate import price_works
from tessera.profile.tables import installed_tables

LONG_US = 30.0
MODELS = ("best", "fitted", "held_out")
PROBES = "probe"


@dataclass(frozen=True, slots=True)
class Point:
    """One distinct launch, measured and modelled."""

    step: str
    kernel: str
    op: str
    count: int
    measured_us: float
    # By model: "best", "fitted", and "held_out": the best source, overheads fitted without this family.
    modelled_us: dict[str, float]
    source: Source

    def error(self, model: str) -> float:
        """Error of the model, relative to the measurement."""
        return self.modelled_us[model] / self.measured_us - 1.0


def points(rows: Sequence[Row], gpu: str) -> list[Point]:
    """The measured launches beside their prices."""
    works, tables = [row.work for row in rows], installed_tables()
    best, fitted = price_works(works, gpu, tables), price_works(works, gpu, None)
    held: dict[int, Cost] = {}
    for family, coefficients in left_out(rows, gpu).items():
        terms = {name: Term(value) for name, value in coefficients.items()}
        places = [i for i, row in enumerate(rows) if row.family == family]
        priced = price_works([works[i] for i in places], gpu, tables, replace(packaged(), terms=terms))
        held.update(zip(places, priced, strict=True))
    return [
        Point(
            row.step,
            row.kernel,
            row.work.op.value,
            row.count,
            row.us,
            {"best": best[i].us, "fitted": fitted[i].us, "held_out": held[i].us},
            best[i].source,
        )
        for i, row in enumerate(rows)
    ]


def totals(found: Sequence[Point]) -> dict[str, float]:
    """Microseconds of the launches of a step, each as often as it runs."""
    sums = {"measured": sum(p.count * p.measured_us for p in found)}
    return sums | {m: sum(p.count * p.modelled_us[m] for p in found) for m in MODELS}


def summary(found: Iterable[Point]) -> dict[str, Any]:
    """Errors over some launches: the median of their sizes, and that of the launches above 30 us."""
    rows = list(found)
    long = [p for p in rows if p.measured_us >= LONG_US]
    sums = totals(rows)
    result: dict[str, Any] = {"distinct": len(rows), "long": len(long), "measured_us": sums["measured"]}
    for model in MODELS:
        result[model] = {
            "median_error": median(abs(p.error(model)) for p in rows) if rows else None,
            "median_error_long": median(abs(p.error(model)) for p in long) if long else None,
            "total_error": sums[model] / sums["measured"] - 1 if rows else None,
        }
    return result


def load(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a file, or of a folder that a GPU run wrote; and what is known of the whole."""
    if path.is_dir():
        return launch_rows.merged(launch_rows.from_profile(path)), launch_rows.about(path)
    return launch_rows.read(path), launch_rows.read_about(path)


def compare(path: Path, gpu: str) -> dict[str, Any]:
    """Everything in figures."""
    rows, about = load(path)
    everything = [p for p in points(rows, gpu) if not p.step.startswith(PROBES)]
    steps = []
    for name, known in about.pop("steps").items():
        found = [p for p in everything if p.step == name]
        if found:
            steps.append({"name": name, **known, **summary(found), "classes": by_class(found)})
        elif "failed" in known:
            steps.append({"name": name, **known})
    return {
        "machine": about,
        "gpu": gpu,
        "steps": steps,
        "classes": by_class(everything),
        "sources": {
            s.value: summary(p for p in everything if p.source is s) for s in {p.source for p in everything}
        },
        "all": summary(everything),
        "worst": _worst(everything),
    }


def by_class(found: Sequence[Point]) -> dict[str, Any]:
    """The errors of each class."""
    return {op: summary(p for p in found if p.op == op) for op in sorted({p.op for p in found})}


def _worst(found: Sequence[Point]) -> list[dict[str, Any]]:
    """The launches that the best source misjudges by most time."""
    ordered = sorted(found, key=lambda p: -p.count * abs(p.modelled_us["best"] - p.measured_us))
    return [
        {"kernel": p.kernel, "class": p.op, "count": p.count, "measured_us": p.measured_us, **p.modelled_us}
        | {"source": p.source.value}
        for p in ordered[:25]
    ]


# For people -----------------------------------------------------------------------------------------------

ABOUT = """'sum' is what the measured launches of a step add up to, 'whole' the step measured as one CUDA
graph. Errors are of the model against the measured sum: 'best' is the best source present (public tables
where they cover a launch, else the fitted models), 'fitted' the fitted models alone. Both use overheads
(index arithmetic, rows, floors, library factors) that were fitted to these very launches; 'held out' is
'best' with overheads fitted to the launches of the other families only: what to expect of a model that was
never measured. Where one family alone has some kind of launch, 'held out' has nothing to price it by. 'long'
launches take 30 us and more; the last two columns are medians over launches, best / held out."""


def table(found: dict[str, Any], command: str) -> str:
    """The results as Markdown."""
    about = found["machine"]
    lines = [
        "# Measured launches against tables and models",
        "",
        f"{about['gpu']}, torch {about['torch']}, transformers {about['transformers']}; "
        f"{about['layers']} layers at real widths, bf16. Command: `{command}`",
        "",
        ABOUT,
        "",
        "| step | launches (distinct) | sum us | whole us | sum / whole | best | fitted | held out "
        "| median error | of long ones |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_step_line(step) for step in found["steps"]),
        "",
        "| class | distinct (long) | share of time | best | fitted | held out "
        "| median error | of long ones |",
        "|---|---|---|---|---|---|---|---|",
    ]
    whole = found["all"]["measured_us"]
    named = [*found["classes"].items(), ("all", found["all"])]
    lines += [_class_line(name, row, whole) for name, row in named]
    lines += ["", "| source of the best price | distinct | share of time | best | fitted | held out "]
    lines[-1] += "| median error | of long ones |"
    lines += ["|---|---|---|---|---|---|---|---|"]
    lines += [_class_line(name, row, whole) for name, row in sorted(found["sources"].items())]
    return "\n".join(lines) + "\n"


def _step_line(step: dict[str, Any]) -> str:
    if "failed" in step:
        return _row(step["name"], f"failed: {step['failed']}", *[""] * 8)
    whole = step["whole_us"]
    return _row(
        step["name"],
        f"{step['num_launches']} ({step['num_distinct']}), {step['num_measured']} measured",
        f"{step['sum_us']:.0f}",
        f"{whole:.0f}" if whole else "-",
        f"{step['sum_us'] / whole:.3f}" if whole else "-",
        *_errors(step),
    )


def _class_line(name: str, row: dict[str, Any], whole: float) -> str:
    share = f"{row['measured_us'] / whole:.0%}" if whole else "-"
    return _row(name, f"{row['distinct']} ({row['long']})", share, *_errors(row))


def _errors(row: dict[str, Any]) -> list[str]:
    best, held = row["best"], row["held_out"]
    return [
        *(_signed(row[model]["total_error"]) for model in MODELS),
        f"{_size(best['median_error'])} / {_size(held['median_error'])}",
        f"{_size(best['median_error_long'])} / {_size(held['median_error_long'])}",
    ]


def _row(*cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def main() -> None:
    """Compares, prints and writes NAME.md and NAME.json."""
    parser = argparse.ArgumentParser(description="Models against measurements.")
    parser.add_argument("launches", type=Path, help="a file of rows, or a folder that gpu_profile.py wrote")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="profile_h200_202611")
    options = parser.parse_args()
    found = compare(options.launches, options.gpu)
    command = f"python -m benchmarks.compare_profile {options.launches} --gpu {options.gpu}"
    text = table(found, command)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.name}.md").write_text(text)
        (options.out / f"{options.name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
