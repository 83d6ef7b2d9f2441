"""Fits the terms of `tessera.profile.corrections` to launches of one GPU and writes them to corrections.json.

    python -m scripts.fit_overheads benchmarks/results/launches_h200_202611.json [--out .../corrections.json]

The time of bytes and operations is the fitted models' (no tables), so that the script needs nothing else.
Loss: soft absolute log ratio, long launches weighing more. Errors are of families of models left out of the
fit, one at a time: what the coefficients say about launches of a model they have not seen.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scripts.launch_rows import Row, read

from tessera.profile.corrections import Term, load, save, with_overhead
from tessera.profile.fitted import model_of, price_many
from tessera.profile.gpus import gpu
from tessera.profile.overheads import TERMS, Scope

Array = npt.NDArray[np.float64]
Coefficients = dict[str, float]

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


def fit_overheads(rows: Sequence[Row], gpu_name: str) -> Coefficients:
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
        coefficients = _coefficients(theta, terms)
        us = [
            with_overhead(u, t0, w.overhead, spec, coefficients)
            for u, t0, w in zip(base, floors, works, strict=True)
        ]
        return np.concatenate([weight * np.log(np.array(us) / measured), PRIOR * (theta - start)])

    if not terms:
        return {}
    found = least_squares(off, start, loss="soft_l1", f_scale=SOFT)
    return _coefficients(np.asarray(found.x), terms, digits=3)


def _coefficients(theta: Array, terms: Sequence[str], digits: int = 15) -> Coefficients:
    values = [float(f"{x:.{digits}g}") for x in np.exp(theta)]
    return dict(zip(terms, values, strict=True))


def price(rows: Sequence[Row], coefficients: Coefficients, gpu_name: str) -> list[float]:
    """The time of each by the fitted models and these coefficients."""
    spec = gpu(gpu_name)
    base = price_many([row.work for row in rows], gpu_name)
    return [
        with_overhead(cost.us, model_of(row.work, spec).params.t0_us, row.work.overhead, spec, coefficients)
        for row, cost in zip(rows, base, strict=True)
    ]


def left_out(rows: Sequence[Row], gpu_name: str) -> dict[str, Coefficients]:
    """For every family of models, the coefficients fitted to all the others."""
    families = dict.fromkeys(row.family for row in rows)
    return {f: fit_overheads([row for row in rows if row.family != f], gpu_name) for f in families}


def judged(
    rows: Sequence[Row], coefficients: Coefficients, others: dict[str, Coefficients], gpu_name: str
) -> dict[str, Term]:
    """The terms with the mean relative error of the launches that have each, and how it was found."""
    own = dict(zip(map(id, rows), price(rows, coefficients, gpu_name), strict=True))
    found = {}
    for term, coefficient in coefficients.items():
        having = [row for row in rows if any(term == name for name, _ in row.work.overhead)]
        seen = [row for row in having if term in others[row.family]]
        times = {id(r): p for f, w in others.items() for r, p in _priced(seen, f, w, gpu_name)}
        used, prices, how, least = (
            (seen, times, "family left out", 0.0)
            if seen
            else (having, own, "one family only: assumed", ONE_FAMILY_ERROR)
        )
        errors = [abs(prices[id(row)] / row.us - 1) for row in used]
        error = max(least, round(float(np.mean(errors)), 4))
        found[term] = Term(coefficient, error, f"{how}, {len(used)} launches")
    return found


def _priced(
    rows: Sequence[Row], family: str, coefficients: Coefficients, gpu_name: str
) -> list[tuple[Row, float]]:
    own = [row for row in rows if row.family == family]
    return list(zip(own, price(own, coefficients, gpu_name), strict=True))


def main() -> None:
    """Reads the rows, fits, writes."""
    parser = argparse.ArgumentParser(description="Fit the cost of overheads to measured launches.")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--out", type=Path, default=Path("src/tessera/profile/corrections.json"))
    args = parser.parse_args()
    rows = read(args.rows)
    terms = judged(rows, fit_overheads(rows, args.gpu), left_out(rows, args.gpu), args.gpu)
    before = load(args.out)
    about = {**before.about, "terms": f"launches of five model families, {args.rows.name}"}
    save(replace(before, gpu=args.gpu, about=about, terms=terms), args.out)
    for name, term in terms.items():
        print(f"{name:14s} {term.coefficient:>9.4g}  error {term.rel_error:.1%} ({term.judged_by})")


if __name__ == "__main__":
    main()
