"""Spans sorted into tracks."""

from tessera.ir import Clock, Span, Timeline
from tessera.report.figures import rows, tracks, utilisation


def span(start_us: float, stop_us: float, track: str = "a") -> Span:
    """A transfer on a link if the track is named so, else a launch."""
    return Span(track, "x", 0, 0, start_us, stop_us, is_transfer=" -> " in track)


def test_devices_come_before_links_and_idle_ones_are_kept() -> None:
    """A named device has a track even if it did nothing, and links come last."""
    timeline = Timeline(Clock.SIMULATED, (span(0, 1, "a -> b"), span(1, 2, "a")), ((0, 0.0, 2.0),))

    assert ["b", "a", "a -> b"] == [t.name for t in tracks(timeline, ["b"])]


def test_overlapping_time_counts_once() -> None:
    """Two spans that share a microsecond are busy for their union."""
    timeline = Timeline(Clock.SIMULATED, (span(0, 2), span(1, 3)), ())

    assert {"a": 3.0} == timeline.busy_us()


def test_utilisation_is_busy_time_over_the_run() -> None:
    """A device busy for one of four microseconds is used by a quarter."""
    timeline = Timeline(Clock.SIMULATED, (span(0, 1),), ((0, 0.0, 4.0),))

    assert {"a": 0.25} == utilisation(timeline)


def test_nothing_is_used_in_an_empty_run() -> None:
    """Nothing ran, so nothing was busy."""
    timeline = Timeline(Clock.SIMULATED, (), ())

    assert {} == utilisation(timeline)


def test_overlapping_spans_go_to_further_rows() -> None:
    """A span that starts before the one above is over takes the next row; later ones reuse the first."""
    assert [0, 1, 0] == rows([span(0, 2), span(1, 3), span(2, 4)])
