"""The fitting script finds what it should, on tables made up for the purpose."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tessera.profile import OpClass, gpu
from tessera.profile.fitted import Loads, Params, peaks_of, predict

REPOSITORY = Path(__file__).parents[3]
Array = npt.NDArray[np.float64]
TRUE = Params(t0_us=4.0, ec=0.6, em=0.75, p=2.0, tile=0.1, split_us=1.0)


@pytest.fixture
def _repository_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))


def made_up_rows() -> tuple[Loads, Array, list[str]]:
    """GEMMs of 60 weight shapes, timed by the model itself with 5 % of noise."""
    rng = np.random.default_rng(0)
    n, k = (np.repeat(rng.integers(64, 16384, 60), 10).astype(np.float64) for _ in range(2))
    m, zeros = rng.integers(1, 8192, 600).astype(np.float64), np.zeros(600)
    shapes = np.array([np.ones(600), m, n, k])
    loads = Loads(2 * m * n * k, 2 * (m * k + n * k + m * n), shapes, zeros, zeros)
    us = predict(TRUE, loads, peaks_of(gpu("a100"), "bfloat16"))
    return loads, us * rng.uniform(0.95, 1.05, us.size), [f"{i // 10}" for i in range(600)]


@pytest.mark.usefixtures("_repository_on_path")
def test_the_fit_recovers_the_parameters_it_was_fed() -> None:
    """From noisy times of a known model come its parameters, and a held-out error as large as the noise."""
    from scripts import cost_tables, fit_costs

    table = cost_tables.Table("a100", OpClass.GEMM, "f16", "bfloat16", "made up", *made_up_rows())
    fit = fit_costs.fit_one(table)

    assert fit.params.ec == pytest.approx(0.6, rel=0.05)
    assert fit.params.em == pytest.approx(0.75, rel=0.1)
    assert fit.params.tile > 0
    assert 0.015 < fit.mean_error < 0.035
    assert 600 == fit.num_fitted + fit.num_held_out


@pytest.mark.usefixtures("_repository_on_path")
def test_assumed_parameters_stay_as_they_were_set() -> None:
    """What the rows cannot tell is not invented."""
    from scripts import cost_tables, fit_costs

    assumed = {"t0_us": 3.0, "em": 0.8}
    table = cost_tables.Table("a100", OpClass.GEMM, "f16", "bfloat16", "made up", *made_up_rows(), assumed)
    fit = fit_costs.fit_one(table)

    assert (3.0, 0.8, ("t0_us", "em")) == (fit.params.t0_us, fit.params.em, fit.assumed)


@pytest.mark.usefixtures("_repository_on_path")
def test_groups_are_held_out_whole() -> None:
    """No weight shape is both fitted and tested."""
    from scripts import cost_tables, fit_costs

    table = cost_tables.Table("a100", OpClass.GEMM, "f16", "bfloat16", "made up", *made_up_rows())
    held = fit_costs.held_out_mask(table)
    groups = np.array(table.group)

    assert 0 < held.sum() < held.size
    assert not set(groups[held]) & set(groups[~held])
