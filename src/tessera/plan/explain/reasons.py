"""Reasons: why a kernel runs where it does, as the price of having it elsewhere.

For each of the heaviest kernels, all launches of it that the main lane runs on its usual device are moved to
every other device in turn, and the mix is priced again at the same shares. What is said is exact for that
move alone; several moves together may pay where each alone does not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tessera.plan.problem import Column, Labels, Mix, Problem

MAX_REASONS = 8
# A change of the period below this is none.
SAME = 1e-3


@dataclass(frozen=True, slots=True)
class Reason:
    """One kernel in one kind of module: where it runs, and what the best other place would cost."""

    kernel: str
    scope: str
    device: str
    other: str
    # Per request: own time here and there, and transfers that the move would add (or save, if negative).
    here_us: float
    there_us: float
    transfers_us: float
    # Time between two requests by busy time, after the move, as a multiple of before.
    period: float

    @property
    def sentence(self) -> str:
        """In words."""
        moved = "save" if self.transfers_us < 0 else "add"
        transfers = f"and {moved} {_ms(abs(self.transfers_us))} of transfers" if self.transfers_us else ""
        what = f"{self.kernel} in {self.scope or 'the model'} runs on {self.device}"
        times = f"{_ms(self.there_us)} instead of {_ms(self.here_us)}"
        price = f"on {self.other} it would take {times} {transfers}".rstrip()
        return f"{what}: {price}, {self._effect}."

    @property
    def _effect(self) -> str:
        if self.period > 1 + SAME:
            return f"and each request {self.period - 1:.1%} longer"
        if self.period < 1 - SAME:
            return f"and busy time alone {1 - self.period:.1%} less; the plan is better as simulated"
        return "with no change of the rate"


def _ms(us: float) -> str:
    return f"{us / 1e3:.3g} ms"


def reasons(
    problem: Problem,
    mix: Mix,
    kernels: dict[tuple[str, str], Labels],
    weight_of: Callable[[Column], float] = lambda column: 1.0,
) -> tuple[Reason, ...]:
    """kernels: (kernel, scope) -> its nodes, heaviest first; the problem is the main lane's.

    weight_of: work units in a request of a column, where lanes are of unlike batches.
    """
    if problem.num_devices < 2:
        return ()
    main = int(np.argmax(mix.shares))
    weight = weight_of(mix.columns[main])
    found = (_reason(problem, mix, main, name, nodes, weight) for name, nodes in kernels.items())
    return tuple(r for r in found if r is not None)[:MAX_REASONS]


def _reason(
    problem: Problem, mix: Mix, main: int, name: tuple[str, str], nodes: Labels, weight: float
) -> Reason | None:
    column = mix.columns[main]
    placed = column.labels[nodes]
    here = int(np.bincount(placed, minlength=problem.num_devices).argmax())
    moved = nodes[placed == here]
    options = []
    for there in range(problem.num_devices):
        if there != here:
            labels = column.labels.copy()
            labels[moved] = there
            if problem.is_allowed(labels):
                options.append((_period(mix, main, problem.column(labels), weight), there))
    if not options:
        return None
    period, there = min(options)
    labels = column.labels.copy()
    labels[moved] = there
    here_us, there_us = (float(problem.load_us[moved, d].sum()) for d in (here, there))
    added = problem.column(labels).path_us - column.path_us * weight - (there_us - here_us)
    names = problem.cluster.names
    return Reason(*name, names[here], names[there], here_us, there_us, added, period)


def _period(mix: Mix, main: int, column: Column, weight: float) -> float:
    moved = column.busy_us / weight - mix.columns[main].busy_us
    return float((mix.busy_us + mix.shares[main] * moved).max() / mix.busy_us.max())
