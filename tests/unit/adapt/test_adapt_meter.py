"""The meter: counts in a window, and how much they vary."""

import numpy as np
import pytest

from tessera.adapt.monitor import Meter


def meter(window_s: float = 10.0, before_per_s: float = 0.0) -> Meter:
    """Watching from time zero."""
    made = Meter()
    made.window_s, made.before_per_s = window_s, before_per_s
    made.start(0.0)
    return made


def test_a_poisson_stream_has_a_dispersion_near_one() -> None:
    """Counts vary by their square root."""
    made, random = meter(), np.random.default_rng(0)
    for time in np.cumsum(random.exponential(0.1, 1000)):
        made.arrived(float(time))

    assert 1.0 <= made.dispersion < 2.5


def test_bursts_have_a_large_dispersion() -> None:
    """A hundred in one window of four, and hardly any in the others."""
    made = meter()
    for window in range(8):
        for n in range(100 if window % 4 == 0 else 10):
            made.arrived(10.0 * window + 0.05 * n)
    made.count(81.0)

    assert made.dispersion > 10.0


def test_a_load_that_has_changed_for_good_is_steady_again() -> None:
    """One fall is no burst."""
    made = meter()
    for rate, start in ((100, 0), (10, 5)):
        for window in range(start, start + (5 if rate == 100 else 9)):
            for n in range(rate):
                made.arrived(10.0 * window + 0.09 * n)
    made.count(139.9)

    assert pytest.approx(1.0) == made.dispersion


def test_clumps_have_a_large_dispersion_within_the_first_window() -> None:
    """Ten at a time, and as many one by one."""
    clumps, single = meter(), meter()
    for n in range(100):
        clumps.arrived(0.9 * (n // 10) + 0.001 * (n % 10))
        single.arrived(0.09 * n)

    assert clumps.dispersion > 5.0
    assert pytest.approx(1.0) == single.dispersion


def test_what_was_before_is_supposed() -> None:
    """A quarter of the window was watched; the rest is filled up at the rate supposed."""
    made = meter(10.0, before_per_s=2.0)
    made.arrived(1.0)

    assert pytest.approx(1 + 7.5 * 2.0) == made.count(2.5)


def test_a_long_silence_counts_as_empty_windows() -> None:
    """And takes no time to roll over, however long."""
    made = meter()
    made.arrived(1.0)

    assert 0.0 == made.count(1e9)


@pytest.mark.parametrize(("last", "windows"), [(100, 6), (80, 6), (60, 1)])
def test_windows_of_one_level_count_together(last: int, windows: int) -> None:
    """Six windows of a hundred; a last one of 80 may be chance, one of 60 is another load."""
    made = meter()
    for window in range(7):
        for n in range(100 if window < 6 else last):
            made.arrived(10.0 * window + 10.0 * (n + 0.5) / (100 if window < 6 else last))

    assert (last + 100 * (windows - 1), windows) == made.level(70.0 - 1e-9, 3.0, 8)
