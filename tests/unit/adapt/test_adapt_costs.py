"""Correcting costs from measured times, and sharing work out again among the same lanes."""

from dataclasses import replace

import pytest

from online_factory import split_plan
from tessera.adapt.drift import Factors, corrected, drift


def test_kernels_timed_one_by_one_give_their_own_factors() -> None:
    """One observation a kernel: its real over its planned time, all but for the pull of the prior."""
    seen = {"d0": [({"gemm": 10.0}, 12.0), ({"norm": 1.0}, 0.8)]}

    factors = corrected(seen, error=0.3)

    assert factors.of("gemm", "d0") == pytest.approx(1.2, rel=0.01)
    assert factors.of("norm", "d0") == pytest.approx(0.8, rel=0.01)


def test_steps_of_different_make_up_tell_kernels_apart() -> None:
    """Two sums of two kernels in different proportions have one solution."""
    planned = ({"gemm": 10.0, "norm": 1.0}, {"gemm": 2.0, "norm": 8.0})
    real = {"gemm": 1.3, "norm": 0.9}
    seen = {"d0": [(row, sum(us * real[k] for k, us in row.items())) for row in planned]}

    factors = corrected(seen, error=0.3)

    assert factors.of("gemm", "d0") == pytest.approx(1.3, rel=0.03)
    assert factors.of("norm", "d0") == pytest.approx(0.9, rel=0.03)


def test_one_sum_is_explained_by_all_its_kernels() -> None:
    """With one observation of many kernels the sum is met and no factor is negative or wild."""
    row = {f"k{n}": 5.0 for n in range(6)}

    factors = corrected({"d0": [(row, 36.0)]}, error=0.2)

    assert sum(us * factors.of(k, "d0") for k, us in row.items()) == pytest.approx(36.0, rel=0.02)
    assert all(1.0 < factors.of(k, "d0") < 1.4 for k in row)


def test_a_kernel_not_seen_is_as_wrong_as_its_device() -> None:
    """A device that is slow in all that was timed is slow in the rest; another device is not."""
    factors = corrected({"d0": [({"gemm": 10.0}, 20.0)]}, error=0.3)

    assert factors.of("conv", "d0") == pytest.approx(2.0, rel=0.02)
    assert 1.0 == factors.of("conv", "d1")


def test_drift_counts_from_the_common_factor() -> None:
    """Everything slower by half is no drift; one of two equal kernels slower by half is."""
    seen = {"d0": [({"gemm": 10.0}, 15.0), ({"norm": 10.0}, 15.0)]}

    assert drift(seen, Factors({("d0", "gemm"): 1.5, ("d0", "norm"): 1.5})) == pytest.approx(0.0)
    assert drift(seen, Factors({("d0", "gemm"): 1.5, ("d0", "norm"): 1.0})) == pytest.approx(0.2)


def test_factors_apply_to_price_lists() -> None:
    """Every launch of the kernel on the device, and no other price."""
    plan = split_plan()
    kernel = plan.unit.graphs[0].trace.kernels[0].name

    (costs,) = Factors({("d1", kernel): 2.0}).apply(plan.unit, plan.costs)

    assert [(10.0, 20.0)] * 4 == [tuple(c.us for c in row) for row in costs.costs]
    assert replace(costs, costs=plan.costs[0].costs) == plan.costs[0]
