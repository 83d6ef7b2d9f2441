"""A few measured launches correct the prices of a card, and of what is like them."""

from pathlib import Path

import pytest

from profile_factories import emulated, estimate, unary_trace
from tessera.errors import ArtifactError
from tessera.ir import Cost, Source
from tessera.ir.files import cache_folder
from tessera.profile import OpClass, Work, sureness_of, works
from tessera.profile.corrections import (
    Corrections,
    MeasuredWork,
    calibration_of,
    chosen,
    load,
    save,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration_of.cache_clear()


def work(num_bytes: int, op: OpClass = OpClass.COPY) -> Work:
    """Some bytes moved."""
    return Work(op, "bfloat16", 0.0, num_bytes, (), (("index", 4.0),))


def cost(us: float, rel_error: float = 0.5) -> Cost:
    """A model's price."""
    return Cost(us, Source.CLASS, rel_error)


def test_the_launches_that_carry_most_error_are_chosen() -> None:
    """Long ones that are surely known, and short ones that are not, come last."""
    long_unsure, long_sure, short = work(300), work(200, OpClass.GEMM), work(100, OpClass.NORM)
    costs = [cost(100.0), cost(100.0, 0.01), cost(1.0)]

    assert [long_unsure] == chosen([long_unsure, long_sure, short], costs, 1)
    assert [long_unsure, long_sure] == chosen([long_unsure, long_sure, short], costs, 2)


def test_launches_that_repeat_count_as_often() -> None:
    """A short launch of every layer outweighs a longer one at the end."""
    often, once = work(1), work(2, OpClass.GEMM)

    assert [often] == chosen([often] * 32 + [once], [cost(5.0)] * 32 + [cost(20.0)], 1)


def test_a_measured_launch_takes_its_time_and_others_its_ratio() -> None:
    """Three launches of a class at twice their price teach that the others take twice theirs."""
    rows = tuple(MeasuredWork(work(n), 20.0, 10.0) for n in (1, 2, 3))
    found = Corrections("l40s", rows=rows)
    known, other = found.apply_rows(work(2), cost(10.0)), found.apply_rows(work(9), cost(7.0))

    assert (20.0, Source.MEASURED) == (known.us, known.source)
    assert (14.0, Source.CLASS) == (other.us, other.source)
    assert known.rel_error < other.rel_error < 0.5


def test_one_launch_teaches_nothing_of_its_class() -> None:
    """It may be an exception."""
    found = Corrections("l40s", rows=(MeasuredWork(work(1), 20.0, 10.0),))

    assert cost(7.0) == found.apply_rows(work(9), cost(7.0))


def test_what_is_kept_is_what_was_made() -> None:
    """Works, overheads and times come back."""
    made = Corrections("l40s", {"gpu": "NVIDIA L40S"}, rows=(MeasuredWork(work(1), 20.0, 10.0),))
    save(made, cache_folder("calibrations") / "l40s.json")

    assert made == calibration_of("l40s")


def test_prices_of_a_calibrated_card_use_it() -> None:
    """And those of another do not."""
    trace = unary_trace("aten.neg.default", 1 << 20)
    plain = estimate(trace, emulated("l40s", "a100"), False).costs[0]
    save(
        Corrections("l40s", rows=(MeasuredWork(works(trace)[0], 77.0, 1.0),)),
        cache_folder("calibrations") / "l40s.json",
    )
    found = estimate(trace, emulated("l40s", "a100"), False).costs[0]

    assert (77.0, Source.MEASURED) == (found[0].us, found[0].source)
    assert plain[1] == found[1]


def test_a_broken_calibration_is_said_with_its_place(tmp_path: Path) -> None:
    """One line, and what to do."""
    (tmp_path / "l40s.json").write_text("{}")

    with pytest.raises(ArtifactError, match="calibrate"):
        load(tmp_path / "l40s.json")


def test_classes_that_are_wrong_alike_add_up() -> None:
    """Two launches of one class at ±50 % are a step of ±50 %; of two classes, of less."""
    same = sureness_of((w, "l40s", cost(1.0), 1.0) for w in (work(1), work(2)))
    unlike = sureness_of((w, "l40s", cost(1.0), 1.0) for w in (work(1), work(2, OpClass.GEMM)))

    assert 0.5 == pytest.approx(same.rel_error)
    assert 0.36 > unlike.rel_error
