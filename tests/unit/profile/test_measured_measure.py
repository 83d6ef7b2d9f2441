"""Measuring a trace: each distinct launch once, kept at once, reconciled with the whole step."""

from pathlib import Path

import pytest

from measured_factory import CPU, H200, FakeTimer, opener
from profile_factories import TraceMaker, emulated, estimate, gemm_trace
from tessera.errors import DeviceGone
from tessera.ir import Source, Trace
from tessera.profile.measured import Measured, combine, measure


def three_kinds() -> Trace:
    """Five launches of three kinds: small products, a large one, and an allocation."""
    make = TraceMaker()
    weights = make.tensor((64, 64))
    for rows in (8, 8, 512):
        make.launch("aten.mm.default", (make.tensor((rows, 64)), weights), make.tensor((rows, 64)))
    make.launch("aten.empty.memory_format", ((8, 8),), make.tensor((8, 8)))
    make.launch("aten.mm.default", (make.tensor((8, 64)), weights), make.tensor((8, 64)))
    return make.done()


def measured(trace: Trace, timer: FakeTimer, path: Path) -> Measured:
    """The H200 measured by a fake timer."""
    return measure(trace, H200, timer, opener(path))


def test_alike_launches_are_timed_once_and_all_priced(tmp_path: Path) -> None:
    """The weight is cold for the first product only, so five launches are three measurements."""
    timer = FakeTimer()
    found = measured(three_kinds(), timer, tmp_path / "s")

    assert [0, 1, 2] == timer.timed
    assert [True, True, True, False, True] == [t is not None for t in found.timings]


def test_launches_between_are_run_so_that_inputs_exist(tmp_path: Path) -> None:
    """The step is walked up to the last launch that is timed."""
    timer = FakeTimer()
    measured(three_kinds(), timer, tmp_path / "s")

    assert [0, 1] == timer.ran


def test_a_second_command_times_nothing(tmp_path: Path) -> None:
    """Everything is in the store."""
    measured(three_kinds(), FakeTimer(whole_us=99.0), tmp_path / "s")
    timer = FakeTimer(us=lambda launch: 77.0)
    found = measured(three_kinds(), timer, tmp_path / "s")

    assert ([], 0) == (timer.timed, found.num_timed)
    assert (10.0, 99.0) == (found.timings[0].us if found.timings[0] else 0, found.whole and found.whole.us)


def test_a_lost_device_loses_nothing_that_was_measured(tmp_path: Path) -> None:
    """The error passes through; the next command goes on behind the launch that killed it."""
    with pytest.raises(DeviceGone):
        measured(three_kinds(), FakeTimer(lost_at=1), tmp_path / "s")
    timer = FakeTimer()
    found = measured(three_kinds(), timer, tmp_path / "s")

    assert [2] == timer.timed
    assert found.timings[0] is not None
    assert "the device was lost here" in found.missed[0].why


def test_a_launch_that_cannot_be_timed_is_named_and_modelled(tmp_path: Path) -> None:
    """Its reason is kept, and its price is the next source's."""
    trace = three_kinds()
    found = measured(trace, FakeTimer(failing={2: "it waits for the host"}), tmp_path / "s")
    costs, _ = combine(trace, (H200,), {"cuda:0": found})

    assert ("aten.mm.default", (2,), "it waits for the host") == (
        found.missed[0].kernel,
        found.missed[0].launches,
        found.missed[0].why,
    )
    assert costs.us(2, 0) == estimate(trace, emulated("h200")).us(2, 0)
    assert [Source.MEASURED, Source.MEASURED] == [costs.costs[i][0].source for i in (0, 1)]


def test_measured_launches_are_scaled_to_the_whole_step(tmp_path: Path) -> None:
    """Four products of 10 us in a step of 44 us cost 11 us each, and the gap is part of their error."""
    trace = three_kinds()
    found = measured(trace, FakeTimer(whole_us=44.0), tmp_path / "s")
    costs, sums = combine(trace, (H200,), {"cuda:0": found})
    (row,) = (sums["cuda:0"],)

    assert (40.0, 44.0) == (row.sum_us, row.whole_us)
    assert 1.1 == pytest.approx(row.scale)
    assert 44.0 == pytest.approx(costs.total_us(0))
    assert 0.1 == pytest.approx(costs.costs[0][0].rel_error)


def test_a_whole_that_cannot_be_right_scales_nothing(tmp_path: Path) -> None:
    """A factor of ten is a mistake somewhere, and is said."""
    trace = three_kinds()
    found = measured(trace, FakeTimer(whole_us=400.0), tmp_path / "s")
    _, sums = combine(trace, (H200,), {"cuda:0": found})

    assert 1.0 == sums["cuda:0"].scale
    assert "too far apart" in sums["cuda:0"].notes[0]


def test_a_throttling_device_is_named(tmp_path: Path) -> None:
    """A launch whose clock stays low after several tries is kept, with its clock in a note."""
    timer = FakeTimer(mhz=1000.0)
    timer.clocks = [1500.0]
    found = measured(gemm_trace(8, 8, 8), timer, tmp_path / "s")

    assert "cuda:0 throttles or is busy: it began at 1500 MHz" in found.notes[-1]
    assert "0 (aten.mm.default) at 1000 MHz" in found.notes[-1]


def test_a_clock_that_comes_back_is_measured_again_without_a_note(tmp_path: Path) -> None:
    """The first try is thrown away."""
    timer = FakeTimer(mhz=1500.0)
    timer.clocks = [1500.0, 900.0]
    found = measured(gemm_trace(8, 8, 8), timer, tmp_path / "s")

    assert [0, 0] == timer.timed
    assert not any("throttles" in note for note in found.notes)


def test_an_unknown_device_prices_what_it_could_not_time_by_its_own_ratios(tmp_path: Path) -> None:
    """A CPU has no model: the ratio of its other launches to a known GPU stands in, at a wide error."""
    trace = three_kinds()
    model = estimate(trace, emulated("a100"))
    timer = FakeTimer(us=lambda launch: 7.0 * model.us(launch, 0), failing={2: "no"}, device="some CPU")
    found = measure(trace, CPU, timer, opener(tmp_path / "s"))
    costs, _ = combine(trace, (CPU,), {"cpu": found})

    assert 7.0 * model.us(2, 0) == pytest.approx(costs.us(2, 0))
    assert (Source.CLASS, True) == (costs.costs[2][0].source, costs.costs[2][0].rel_error >= 0.5)


def test_measured_and_emulated_devices_stand_side_by_side(tmp_path: Path) -> None:
    """Each column has its own source."""
    trace = gemm_trace(512, 512, 512)
    devices = (H200, *emulated("l40s"))
    found = measured(trace, FakeTimer(), tmp_path / "s")
    costs, _ = combine(trace, devices, {"cuda:0": found})

    assert Source.MEASURED is costs.costs[0][0].source
    assert Source.MEASURED is not costs.costs[0][1].source
