"""pick: which of several plans is fastest on these devices, found by running each.

Costs and simulation know neither every contention on a device nor a card's own order of launches. So plans
that are loaded together can be tried out before they are used: each runs the same requests, in turns, so that
a drift of the clock meets all alike. The first plan is kept unless another one is clearly faster.

Give at least five requests a microbatch: of fewer, most are run while the pipeline fills or empties.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.execute.offline import RunResult
from tessera.ir import Plan

ROUNDS = 2
# Another plan must be faster by this share to be picked over the first.
MARGIN = 0.02
# Requests a microbatch in every round.
EACH = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """What one plan reached."""

    plan: int
    policy: str
    per_s: float


def try_all(plans: Sequence[Plan], run: Callable[[int], Sequence[RunResult]]) -> list[Trial]:
    """Each plan's rate; `run(number)` runs the same requests under one of the plans."""
    rates: list[list[float]] = [[] for _ in plans]
    for _ in range(ROUNDS):
        for number in range(len(plans)):
            rates[number].append(rate_per_s(run(number)))
    return [Trial(number, plan.policy, sum(rates[number]) / ROUNDS) for number, plan in enumerate(plans)]


def pick(trials: Sequence[Trial]) -> Trial:
    """The fastest; the first one where it is as good."""
    best = max(trials, key=lambda t: t.per_s)
    return trials[0] if trials[0].per_s * (1.0 + MARGIN) >= best.per_s else best


def rate_per_s(results: Sequence[RunResult]) -> float:
    """Requests per second while the system was full; of a list too short for that, over the whole of it.

    Full is from when as many have ended as there are microbatches until the last one is begun.
    """
    stops = sorted(result.stop_s for result in results)
    num = len({result.microbatch for result in results})
    full_s, last_s = stops[min(num, len(stops)) - 1], max(result.start_s for result in results)
    ended = [stop for stop in stops[num:] if stop <= last_s]
    if not ended:
        return len(stops) / (stops[-1] - min(result.start_s for result in results))
    return len(ended) / (ended[-1] - full_s)
