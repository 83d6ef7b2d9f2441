"""Throughput of a run, read off its timeline.

Counting completions misleads on short runs: requests that start together finish together, in bursts. So work
is counted instead, as fractions of a request: a span's share of its request's busy time. The window is the
time in which the system was full: from the first completion to the start of the last request. A request of
a larger batch counts as the work units it holds.
"""

from tessera.ir import Timeline


def throughput_per_s(timeline: Timeline) -> float:
    """Work units per second while the system was full; of a run too short for that, over the whole run."""
    weights = _weights(timeline)
    total: dict[int, float] = {}
    begun: dict[int, float] = {}
    work = [span for span in timeline.spans if not span.is_transfer]
    for span in work:
        total[span.request] = total.get(span.request, 0.0) + span.stop_us - span.start_us
        begun.setdefault(span.request, span.start_us)
    start = min((stop for _, _, stop in timeline.requests), default=0.0)
    stop = max(begun.values(), default=0.0)
    if stop <= start:
        return sum(weights.values()) / (timeline.makespan_us * 1e-6) if timeline.makespan_us else 0.0
    done = 0.0
    for span in work:
        inside = min(span.stop_us, stop) - max(span.start_us, start)
        if inside > 0.0:
            done += weights[span.request] * inside / total[span.request]
    return done / ((stop - start) * 1e-6)


def _weights(timeline: Timeline) -> dict[int, float]:
    """Request -> its work units."""
    numbers = [number for number, _, _ in timeline.requests]
    return dict(zip(numbers, timeline.weights or [1.0] * len(numbers), strict=True))
