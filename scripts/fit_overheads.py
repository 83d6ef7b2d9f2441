"""Fits the cycles of `tessera.profile.overhead_model` to launches of one GPU and writes overheads.json.

    python -m scripts.fit_overheads benchmarks/results/launches_h200_202611.json [--out .../overheads.json]

The time of bytes and operations is the fitted models' (no tables), so that the script needs nothing else.
Loss: soft absolute log ratio, long launches weighing more. Errors are of families of models left out of the
fit, one at a time: what the coefficients say about launches of a model they have not seen.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scripts.launch_rows import Row, read

from tessera.profile.fitted import model_of, price_many
from tessera.profile.gpus import gpu
from tessera.profile.overhead_model import Overheads, with_overhead
from tessera.profile.overheads import TERMS, Scope

Array = npt.NDArray[np.float64]

# Weight of a launch by its length: a launch of 30 us counts once.
FULL_WEIGHT_US, LEAST_WEIGHT, MOST_WEIGHT = 30.0, 0.5, 2.0
SOFT = 0.15
# Where the search begins, and where a whisper of a prior holds terms that the rows do not tell apart: cycles
# an element, or a factor; a row or a key is many elements.
START = {Scope.ALL: 0.5, Scope.ONE: 3.0, Scope.FLOOR: 2000.0, Scope.FACTOR: 1.3}
START_OF_MANY = {"row": 50.0}
PRIOR = 0.02
# The error of a term that one family alone has: its fit follows few launches too well to be believed.
ONE_FAMILY_ERROR = 0.25


def fit_overheads(rows: Sequence[Row], gpu_name: str) -> Overheads:
    """The coefficients that price these launches best; no errors yet."""
    spec = gpu(gpu_name)
    used = [row for row in rows if any(TERMS[t] is not Scope.STREAM for t, _ in row.work.overhead)]
    works = [row.work for row in used]
    base = [cost.us for cost in price_many(works, gpu_name)]
    floors = [model_of(work, spec).params.t0_us for work in works]
    measured = np.array([row.us for row in used])
    weight = np.clip((measured / FULL_WEIGHT_US) ** 0.5, LEAST_WEIGHT, MOST_WEIGHT)
    present = {name for work in works for name, _ in work.overhead}
    terms = [t for t, scope in TERMS.items() if t in present and scope is not Scope.STREAM]
    start = np.log([START_OF_MANY.get(t, START[TERMS[t]]) for t in terms])

    def off(theta: Array) -> Array:
        overheads = _overheads(theta, terms, gpu_name)
        us = [
            with_overhead(u, t0, w.overhead, spec, overheads)
            for u, t0, w in zip(base, floors, works, strict=True)
        ]
        return np.concatenate([weight * np.log(np.array(us) / measured), PRIOR * (theta - start)])

    if not terms:
        return Overheads(gpu_name, {}, {})
    found = least_squares(off, start, loss="soft_l1", f_scale=SOFT)
    return _overheads(np.asarray(found.x), terms, gpu_name, digits=3)


def _overheads(theta: Array, terms: Sequence[str], gpu_name: str, digits: int = 15) -> Overheads:
    values = [float(f"{x:.{digits}g}") for x in np.exp(theta)]
    return Overheads(gpu_name, dict(zip(terms, values, strict=True)), {})


def price(rows: Sequence[Row], overheads: Overheads) -> list[float]:
    """The time of each by the fitted models and these overheads."""
    spec = gpu(overheads.gpu)
    base = price_many([row.work for row in rows], overheads.gpu)
    return [
        with_overhead(cost.us, model_of(row.work, spec).params.t0_us, row.work.overhead, spec, overheads)
        for row, cost in zip(rows, base, strict=True)
    ]


def left_out(rows: Sequence[Row], gpu_name: str) -> dict[str, Overheads]:
    """For every family of models, the coefficients fitted to all the others."""
    families = dict.fromkeys(row.family for row in rows)
    return {f: fit_overheads([row for row in rows if row.family != f], gpu_name) for f in families}


def term_errors(
    rows: Sequence[Row], overheads: Overheads, others: dict[str, Overheads]
) -> dict[str, tuple[float, str]]:
    """Mean relative error of the launches with each term, and how it was found."""
    own = dict(zip(map(id, rows), price(rows, overheads), strict=True))
    found = {}
    for term in overheads.coefficients:
        having = [row for row in rows if any(term == name for name, _ in row.work.overhead)]
        seen = [row for row in having if term in others[row.family].coefficients]
        times = {id(r): p for f, w in others.items() for r, p in _priced(seen, f, w)}
        judged, prices, how, least = (
            (seen, times, "family left out", 0.0)
            if seen
            else (having, own, "one family only: assumed", ONE_FAMILY_ERROR)
        )
        errors = [abs(prices[id(row)] / row.us - 1) for row in judged]
        found[term] = (max(least, round(float(np.mean(errors)), 4)), f"{how}, {len(judged)} launches")
    return found


def _priced(rows: Sequence[Row], family: str, overheads: Overheads) -> list[tuple[Row, float]]:
    own = [row for row in rows if row.family == family]
    return list(zip(own, price(own, overheads), strict=True))


def main() -> None:
    """Reads the rows, fits, writes."""
    parser = argparse.ArgumentParser(description="Fit the cost of overheads to measured launches.")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--out", type=Path, default=Path("src/tessera/profile/overheads.json"))
    args = parser.parse_args()
    rows = read(args.rows)
    overheads = fit_overheads(rows, args.gpu)
    errors = term_errors(rows, overheads, left_out(rows, args.gpu))
    terms = {
        term: {"coefficient": value, "rel_error": errors[term][0], "judged_by": errors[term][1]}
        for term, value in overheads.coefficients.items()
    }
    lines = ",\n".join(f"  {json.dumps(term)}: {json.dumps(row)}" for term, row in terms.items())
    data = f"launches of five model families, {args.rows.name}"
    args.out.write_text(
        f'{{\n "gpu": "{args.gpu}",\n "data": "{data}",\n "terms": {{\n{lines}\n }}\n}}\n', encoding="utf-8"
    )
    for term, row in terms.items():
        print(f"{term:14s} {row['coefficient']:>9.4g}  error {row['rel_error']:.1%} ({row['judged_by']})")


if __name__ == "__main__":
    main()
