"""How far modelled costs are from public measurements that they did not see.

    python -m benchmarks.bench_costs [--other FOLDER] [--out benchmarks/results/costs_202611]
    python -m benchmarks.bench_costs --published [--json]

--published holds modelled steps and kernels against an A100-PCIe and an L40S.

Without it, the extra `tables` is needed. Groups of rows (weight shapes, pairs of head counts, layers of
experts) are hidden whole, a fifth of them, the same that scripts/fit_costs.py holds out. For every GPU and
class, on the hidden rows only:

    table    interpolated in the same table without any hidden group
    point    interpolated without the row itself only, what `rel_error` is made of
    fitted   the model of fitted.json; it saw no hidden group of any version of the table

Rows count as they were timed: attention over a KV cache that fits the L2 cache ran from there, and is
modelled so. GEMMs that ran from the cache are left out, as everywhere. The sign test asks which of two GPUs
is faster, over shapes that both tables hold and whose times differ by more than 10 %; one line has the GEMMs
that ran from the cache as well, which the fitted model takes to read memory.

--other names a folder with `aic_gemm.parquet` (see scripts/fit_costs.py), in which A100 and L40S were timed
with one version of one stack; the sign test is repeated with its times as the truth. Nothing is measured
here: every figure compares a model with somebody's measurement.
"""

import argparse
import json
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.published import costs as published
from benchmarks.published.tables import costs_markdown

from tessera.errors import MissingExtra
from tessera.profile import OpClass, Tables, gpu, installed_tables
from tessera.profile.fitted import Array, fitted_rows
from tessera.profile.table_files import KINDS, MAX_EXPERT_ROWS, SYSTEMS, read_rows
from tessera.profile.tables import Surface, against_model

LONG_US = 30.0
MARGIN = 0.10
HELD_OUT = 5
# One row in so many is judged by leaving out itself alone.
POINT_STEP = 29
PAIRS = (
    ("l40s", "a100"),
    ("h100", "a100"),
    ("rtx-pro-6000", "a100"),
    ("l40s", "h200"),
    ("rtx-pro-6000", "h100"),
)
GROUPS = {
    OpClass.GEMM: ("n", "k"),
    OpClass.PREFILL: ("num_heads", "num_key_value_heads"),
    OpClass.DECODE: ("num_heads", "num_key_value_heads"),
    OpClass.GROUPED: ("hidden_size", "inter_size"),
}
VARIANT = {
    OpClass.GEMM: "bfloat16",
    OpClass.GROUPED: "bfloat16",
    OpClass.PREFILL: "128",
    OpClass.DECODE: "128",
}
# Stack of the tables in --other.
OTHER_STACK = "sglang 0.5.10"
Mask = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Judged:
    """The hidden rows of one table, and what each source says about them."""

    gpu: str
    op: OpClass
    table: str
    keys: list[tuple[float, ...]]
    us: Array
    from_table: Array
    fitted: Array
    # Expected by `rel_error`, interpolation only.
    point_errors: Array


def hidden(groups: Iterable[str]) -> Mask:
    """A fifth of the groups, as scripts/fit_costs.py chooses them."""
    return np.array([zlib.crc32(g.encode()) % HELD_OUT == 0 for g in groups])


def judge(tables: Tables, gpu_name: str, op: OpClass, with_cached: bool = False) -> Judged | None:
    """Hides a fifth of the groups and asks for them."""
    source = tables.choice(gpu_name, op, VARIANT[op]).source
    if source is None:
        return None
    rows = read_rows(source.file, VARIANT[op], tables.cache_to)
    base, may, wrong = against_model(rows, gpu(gpu_name))
    kept = np.flatnonzero((may | with_cached) & ~wrong)
    if op is OpClass.GROUPED:
        # The others are never priced from a table.
        c = rows.columns
        kept = kept[(c["num_tokens"] * c["topk"] <= MAX_EXPERT_ROWS * c["num_experts"])[kept]]
    labels = zip(*(rows.columns[c][kept] for c in GROUPS[op]), strict=True)
    out = hidden("/".join(str(x) for x in label) for label in labels)
    places, us, base = KINDS[op].places(rows.columns)[kept], rows.us[kept], base[kept]
    residual = np.log(us / base)
    guess, _ = Surface(places[~out], residual[~out]).at(places[out])
    keys = list(zip(*(rows.columns[c][kept][out].tolist() for c in KINDS[op].columns), strict=True))
    point = _points(places, residual)[us[::POINT_STEP] >= LONG_US]
    modelled = base[out]
    return Judged(gpu_name, op, source.file.name, keys, us[out], modelled * np.exp(guess), modelled, point)


def _points(places: Array, residual: Array) -> Array:
    """Relative errors with each judged point left out alone."""
    off = []
    for i in range(0, len(residual), POINT_STEP):
        rest = np.arange(len(residual)) != i
        near = rest & (np.abs(places - places[i]).max(axis=1) <= 2.0)
        if near.sum() >= 8:
            guess, _ = Surface(places[near], residual[near]).at(places[i][None])
            off.append(float(np.exp(guess[0] - residual[i])) - 1.0)
        else:
            off.append(float("nan"))
    return np.abs(np.array(off, dtype=np.float64))


def errors(judged: Judged) -> dict[str, Any]:
    """Median and mean relative errors of both sources, of all rows and of long kernels."""
    long = judged.us >= LONG_US
    found: dict[str, Any] = {"gpu": judged.gpu, "class": judged.op.value, "table": judged.table}
    found |= {"rows": len(judged.us), "long_rows": int(long.sum())}
    for name, predicted in (("table_errors", judged.from_table), ("fitted_errors", judged.fitted)):
        off = np.abs(predicted / judged.us - 1)
        found[name] = {"median": _round(np.median(off)), "mean": _round(off.mean())}
        found[name] |= {"long_median": _round(np.median(off[long])), "long_mean": _round(off[long].mean())}
    point = judged.point_errors[np.isfinite(judged.point_errors)]
    found["point_long_median"] = _round(np.median(point)) if point.size else None
    return found


def sign(first: Judged, second: Judged) -> dict[str, Any] | None:
    """How often each source says rightly which GPU is faster, by the tables' own times."""
    i, j = matched(first, second)
    if len(i) < 30:
        return None
    return _signs(first, second, (i, j), np.log(first.us[i] / second.us[j]), "the tables themselves")


def matched(first: Judged, second: Judged) -> tuple[Index, Index]:
    """Where both hold the same shape."""
    places = {key: j for j, key in enumerate(second.keys)}
    both = [(i, places[key]) for i, key in enumerate(first.keys) if key in places]
    return np.array([i for i, _ in both], dtype=np.intp), np.array([j for _, j in both], dtype=np.intp)


def _signs(
    first: Judged, second: Judged, rows: tuple[Index, Index], truth: Array, what: str
) -> dict[str, Any]:
    i, j = rows
    clear = np.abs(truth) > np.log(1 + MARGIN)
    found: dict[str, Any] = {"pair": f"{first.gpu} against {second.gpu}", "class": first.op.value}
    found |= {"truth": what, "shapes": int(clear.sum())}
    for name, a, b in (
        ("table", first.from_table, second.from_table),
        ("fitted", first.fitted, second.fitted),
    ):
        ratio = np.log(a[i] / b[j])
        found[name] = _round((np.sign(ratio[clear]) == np.sign(truth[clear])).mean())
        found[f"{name}_ratio_error"] = _round(np.median(np.abs(np.exp(ratio - truth) - 1)))
    return found


def other_truth(folder: Path, first: Judged, second: Judged) -> dict[str, Any]:
    """The sign test against another measurement, in which both GPUs ran the same version."""
    from scripts.cost_tables import read

    d = read(folder, "aic_gemm.parquet")
    times = {}
    for name in (first.gpu, second.gpu):
        rows = (d["system"] == SYSTEMS[name]) & (d["src"] == OTHER_STACK) & (d["gemm_dtype"] == "bfloat16")
        keys = zip(*(d[c][rows].astype(float).tolist() for c in ("m", "n", "k")), strict=True)
        times[name] = dict(zip(keys, d["us"][rows].tolist(), strict=True))
    i, j = matched(first, second)
    ratios = [
        np.log(times[first.gpu].get(key, np.nan) / times[second.gpu].get(key, np.nan))
        for key in (first.keys[n] for n in i)
    ]
    truth = np.array(ratios)
    known = np.isfinite(truth)
    return _signs(first, second, (i[known], j[known]), truth[known], f"{OTHER_STACK} on both")


def _round(value: Any) -> float:
    return round(float(value), 4)


def unseen_gpus() -> list[dict[str, Any]]:
    """The class model on GPUs whose own row is put aside, and the fits of classes without tables."""
    own = {(f.gpu, f.op, f.family): f for f in fitted_rows().fits}
    return [
        {"gpu": x.gpu, "class": x.op.value, "family": x.family, "like": x.kinship, "class_mean": x.mean_error,
         "fitted_mean": own[x.gpu, x.op, x.family].mean_error}
        for x in fitted_rows().left_out
    ]  # fmt: skip


def markdown(document: dict[str, Any]) -> str:
    """The figures as tables."""
    lines = ["# Errors of modelled costs, on rows they did not see", ""]
    lines += [f"Command: `{document['command']}`. Tables: {document['package']}. Nothing was run on a GPU:"]
    lines += ["every figure compares a model with a public measurement. Median (mean) relative error, %.", ""]
    lines += ["| GPU | class | table | hidden rows | table, all | table, ≥30 µs | one row left out, ≥30 µs"
              " | fitted, all | fitted, ≥30 µs |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for e in document["errors"]:
        t, f, point = e["table_errors"], e["fitted_errors"], e["point_long_median"]
        cells = [_pair(t, ""), _pair(t, "long_"), f"{point:.1%}" if point is not None else "-"]
        cells += [_pair(f, ""), _pair(f, "long_")]
        lines.append(f"| {e['gpu']} | {e['class']} | {e['table']} | {e['rows']:,} | {' | '.join(cells)} |")
    lines += [
        "",
        "Which of two GPUs is faster, said rightly, over hidden shapes that differ by more than 10 %:",
        "",
    ]
    lines += ["| pair | class | truth | shapes | table | fitted |", "|---|---|---|---|---|---|"]
    for s in document["signs"]:
        right = f"{s['table']:.1%} | {s['fitted']:.1%}"
        lines.append(f"| {s['pair']} | {s['class']} | {s['truth']} | {s['shapes']:,} | {right} |")
    lines += ["", "The class model, for a GPU whose own measurements are put aside, against its own fit"]
    lines += ["(mean relative error on that GPU's rows):", ""]
    lines += ["| GPU | class | dtypes | lenders share | class model | own fit |", "|---|---|---|---|---|---|"]
    for u in document["unseen"]:
        lines.append(f"| {u['gpu']} | {u['class']} | {u['family']} | {u['like']} | {u['class_mean']:.1%} | {u['fitted_mean']:.1%} |")  # fmt: skip  # noqa: E501
    return "\n".join(lines) + "\n"


def _pair(found: dict[str, float], prefix: str) -> str:
    return f"{found[prefix + 'median']:.1%} ({found[prefix + 'mean']:.1%})"


def run(other: Path | None) -> dict[str, Any]:
    """Every figure."""
    tables = installed_tables()
    if tables is None:
        raise MissingExtra("aiconfigurator-core", "tables")
    from importlib.metadata import version

    judged = {(g, op): judge(tables, g, op) for op in KINDS for g in SYSTEMS}
    found = {key: j for key, j in judged.items() if j is not None}
    pairs = [(op, a, b) for op in KINDS for a, b in PAIRS if (a, op) in found and (b, op) in found]
    signs = [sign(found[a, op], found[b, op]) for op, a, b in pairs]
    gemm = [found[g, OpClass.GEMM] for g in ("l40s", "a100")]
    cached = [judge(tables, g, OpClass.GEMM, with_cached=True) for g in ("l40s", "a100")]
    if cached[0] and cached[1]:
        all_rows = sign(cached[0], cached[1])
        signs.insert(1, all_rows and all_rows | {"truth": "the tables themselves, with GEMMs from the cache"})
    if other:
        signs.insert(0, other_truth(other, gemm[0], gemm[1]))
    rows = [errors(j) for j in found.values()]
    return {
        "command": "python -m benchmarks.bench_costs" + (" --other FOLDER" if other else ""),
        "package": f"aiconfigurator-core {version('aiconfigurator-core')}",
        "errors": rows,
        "signs": [s for s in signs if s],
        "unseen": unseen_gpus(),
    }


def _lines(document: dict[str, Any]) -> str:
    """JSON with one record a line."""
    parts = []
    for key, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(x)}" for x in value) + "\n ]"
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def main() -> None:
    """Judges, prints, writes."""
    parser = argparse.ArgumentParser(description="Errors of modelled costs on rows they did not see.")
    parser.add_argument("--other", type=Path)
    parser.add_argument("--published", action="store_true", help="compare with timed steps and kernels")
    parser.add_argument("--json", action="store_true", help="print JSON; with --published")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/costs_202611"))
    args = parser.parse_args()
    if args.published:
        compared = published.document()
        print(json.dumps(compared, indent=1) if args.json else costs_markdown(compared))
        return
    document = run(args.other)
    text = markdown(document)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    args.out.with_suffix(".json").write_text(_lines(document), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
