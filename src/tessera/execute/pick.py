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


def try_all(
    plans: Sequence[Plan], run: Callable[[int], Sequence[RunResult]], rounds: int = ROUNDS
) -> list[Trial]:
    """Each plan's rate; `run(number)` runs the same requests under one of the plans."""
    rates: list[list[float]] = [[] for _ in plans]
    for _ in range(rounds):
        for number in range(len(plans)):
            rates[number].append(rate_per_s(run(number)))
    return [Trial(number, plan.policy, sum(rates[number]) / rounds) for number, plan in enumerate(plans)]


def pick(trials: Sequence[Trial]) -> Trial:
    """The fastest; the first one where it is as good."""
    best = max(trials, key=lambda t: t.per_s)
    return trials[0] if trials[0].per_s * (1.0 + MARGIN) >= best.per_s else best


def rate_per_s(results: Sequence[RunResult]) -> float:
    """Requests per second while the system was full: of every microbatch, from its second start to its last.

    Whole requests are counted over the time that they took, so that neither the filling at the start nor the
    emptying at the end counts, and nothing is assumed about how fast a request advances in between.
    """
    places: dict[int, list[RunResult]] = {}
    for result in results:
        places.setdefault(result.microbatch, []).append(result)
    return sum(_place_per_s(sorted(mine, key=lambda r: r.start_s)) for mine in places.values())


def _place_per_s(mine: Sequence[RunResult]) -> float:
    """One microbatch's rate; with few requests its first one counts too."""
    if len(mine) == 1:
        return 1.0 / (mine[0].stop_s - mine[0].start_s)
    first = 1 if len(mine) > 2 else 0
    return (len(mine) - 1 - first) / (mine[-1].start_s - mine[first].start_s)
