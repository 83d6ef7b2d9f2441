"""From samples to a number and its interval."""

import random

from tessera.profile.store import timing, until


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    """400 sets of skewed samples: about 95 % of the intervals hold the true median."""
    chance = random.Random(1)
    true_median = 2**0.5

    def covers() -> bool:
        found = timing([(1 - chance.random()) ** -0.5 for _ in range(40)])
        # The interval is not centred on the median, so its half is taken on either side.
        return abs(found.us - true_median) <= 2 * found.half_us

    assert sum(covers() for _ in range(400)) >= 380


def test_equal_samples_are_sure() -> None:
    """No spread, no error."""
    assert (5.0, 0.0) == (timing([5.0] * 10).us, timing([5.0] * 10).rel_error)


def test_one_outlier_does_not_move_the_number() -> None:
    """A median forgets the slowest."""
    assert 5.0 == timing([5.0] * 20 + [500.0]).us


def test_noise_around_zero_is_no_time_and_no_certainty() -> None:
    """A launch that takes nothing has an error of all of it."""
    found = timing([-0.2, -0.1, 0.1, -0.1, 0.2, -0.3, 0.0, -0.1])

    assert (0.0, 1.0) == (found.us, found.rel_error)


def test_timing_stops_when_it_is_sure() -> None:
    """Steady samples need few repeats, scattered ones go on."""
    enough = until(cap_s=1.0)

    assert enough([5.0] * 8, 0.01)
    assert not enough([1.0, 9.0] * 8, 0.01)


def test_timing_stops_when_its_time_is_up() -> None:
    """However scattered."""
    assert until(cap_s=1.0)([1.0, 9.0] * 8, 1.5)


def test_few_samples_are_never_enough_while_there_is_time() -> None:
    """Three equal samples may be luck."""
    assert not until(cap_s=1.0)([5.0] * 3, 0.5)
