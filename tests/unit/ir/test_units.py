"""Numbers as people read them."""

import pytest

from tessera.ir.units import duration, percent, quantile, rate, ratio, size


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 us"), (0.04, "0.04 us"), (3.14159, "3.14 us"), (999.7, "1.00 ms"), (2.5e6, "2.50 s")],
)
def test_duration_picks_the_unit(us: float, text: str) -> None:
    """A time is shown in the unit that leaves three digits, also where rounding reaches the next one."""
    assert text == duration(us)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (65_536, "65.5 KB"), (16_060_000_000, "16.1 GB")],
)
def test_size_is_decimal(num_bytes: int, text: str) -> None:
    """A kilobyte is 1000 bytes, as in link rates."""
    assert text == size(num_bytes)


def test_rates_ratios_and_percentages() -> None:
    """Rates separate thousands, ratios have two places, small percentages one."""
    shown = (rate(12345.6), ratio(1.184), percent(0.873), percent(0.042), percent(0))

    assert ("12,346/s", "1.18x", "87 %", "4.2 %", "0 %") == shown


@pytest.mark.parametrize(("num", "median", "most"), [(1, 0, 0), (2, 0, 1), (3, 1, 2), (100, 49, 98)])
def test_quantiles_of_few_and_many_values(num: int, median: int, most: int) -> None:
    """The 99th percentile of few values is the largest."""
    assert (median, most) == (quantile(range(num), 0.5), quantile(range(num), 0.99))
