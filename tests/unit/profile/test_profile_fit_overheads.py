"""The cycles of overheads come from measured launches, by scripts that can be run again."""

from pathlib import Path

import numpy as np
import pytest
from scripts.fit_overheads import fit_overheads, left_out, price
from scripts.launch_rows import Row, read, write

from tessera.profile import OpClass, Work
from tessera.profile.corrections import packaged

ROWS = Path(__file__).parents[3] / "benchmarks" / "results" / "launches_h200_202611.json"


def rows_of(family: str, overheads: dict[str, float]) -> list[Row]:
    """Launches that take exactly what these overheads say."""
    works = [
        Work(OpClass.ELEMENTWISE, "bfloat16", 0.0, 4 * n, overhead=(("dim", 2.0 * n), ("index", float(n))))
        for n in (1_000_000, 4_000_000, 30_000_000)
    ]
    works += [Work(OpClass.SAMPLING, "bfloat16", 0.0, 4096, overhead=(("topk_floor", 1.0),))]
    made = [Row(family, f"{family} decode, torch", "k", 1, 1.0, work) for work in works]
    times = price(made, overheads, "h200")
    return [Row(r.family, r.step, r.kernel, 1, us, r.work) for r, us in zip(made, times, strict=True)]


def test_the_fit_finds_the_cycles_that_made_the_times() -> None:
    """Given launches that follow the model, the model's own cycles come back."""
    true = {"index": 0.8, "dim": 0.1, "topk_floor": 9000.0}
    found = fit_overheads(rows_of("a", true), "h200")

    assert found["topk_floor"] == pytest.approx(9000.0, rel=0.05)
    assert found["index"] + 2 * found["dim"] == pytest.approx(1.0, rel=0.05)


def test_a_family_left_out_lends_nothing() -> None:
    """Where one family alone has a term, the fit without it does not know the term."""
    true = {"index": 0.8, "dim": 0.1, "topk_floor": 9000.0}
    rows = rows_of("a", true) + [r for r in rows_of("b", true) if r.work.op is not OpClass.SAMPLING]
    without = left_out(rows, "h200")

    assert "topk_floor" not in without["a"]
    assert "topk_floor" in without["b"]


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    """What is written is read again."""
    rows = rows_of("a", {})
    write(tmp_path / "rows.json", rows, {})

    assert rows == read(tmp_path / "rows.json")


@pytest.mark.slow
def test_the_package_holds_what_the_script_makes_of_the_committed_launches() -> None:
    """corrections.json has the terms of a new fit, and prices its rows as well.

    Coefficients themselves may differ: floors of terms trade with those of the fitted models.
    """
    rows = read(ROWS)
    found, held = fit_overheads(rows, "h200"), packaged().coefficients
    measured = np.array([row.us for row in rows])
    new, old = (
        np.average(np.abs(np.log(np.array(price(rows, terms, "h200")) / measured)), weights=measured)
        for terms in (found, held)
    )

    assert found.keys() == held.keys()
    assert old < 1.01 * new
