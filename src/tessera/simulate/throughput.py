"""Throughput of a run, read off its timeline.

Counting completions misleads on short runs: requests that start together finish together, in bursts. So work
is counted instead, as fractions of a request: a span's share of its request's busy time. The window is the
time in which the system was full: from the first completion to the start of the last request.
"""

from tessera.ir import Timeline


def throughput_per_s(timeline: Timeline) -> float:
    """Requests per second while the system was full; of a run too short for that, over the whole run."""
    total: dict[int, float] = {}
    begun: dict[int, float] = {}
    work = [span for span in timeline.spans if not span.is_transfer]
    for span in work:
        total[span.request] = total.get(span.request, 0.0) + span.stop_us - span.start_us
        begun.setdefault(span.request, span.start_us)
    start = min((stop for _, _, stop in timeline.requests), default=0.0)
    stop = max(begun.values(), default=0.0)
    if stop <= start:
        return len(timeline.requests) / (timeline.makespan_us * 1e-6) if timeline.makespan_us else 0.0
    done = 0.0
    for span in work:
        inside = min(span.stop_us, stop) - max(span.start_us, start)
        if inside > 0.0:
            done += inside / total[span.request]
    return done / ((stop - start) * 1e-6)
