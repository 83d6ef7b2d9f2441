"""What steps say of the costs."""

from types import SimpleNamespace

import pytest

from online_factory import split_plan
from tessera.adapt.monitor import MeasuredSteps, planned_us


def test_steps_are_averaged_by_lane_and_device() -> None:
    """Two launches of 10 us on each device; d1 took twice as long, as the mean of two steps says."""
    plan = split_plan()
    lane = SimpleNamespace(number=0, plan=plan, index=0)
    times = MeasuredSteps()
    times.add(lane, 0, {"d0": 20e-6, "d1": 30e-6})
    times.add(lane, 0, {"d0": 20e-6, "d1": 50e-6})
    kernel = plan.graphs[0].trace.kernels[0].name
    found = times.take()

    assert {"d0": [{kernel: 20.0}], "d1": [{kernel: 20.0}]} == {d: [p for p, _ in found[d]] for d in found}
    assert [20.0, 40.0] == pytest.approx([found[device][0][1] for device in ("d0", "d1")])
    assert {} == times.take()


def test_planned_times_are_those_of_the_launches_there() -> None:
    """By device and kernel."""
    found = planned_us(split_plan(), 0, 0)

    assert {"d0": 20.0, "d1": 20.0} == {
        device: sum(us for _, us in kernels) for device, kernels in found.items()
    }
