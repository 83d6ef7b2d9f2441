"""Figures of a plan for a load beside those of other policies, each at its own best."""

from dataclasses import dataclass

from tessera.errors import PlanInfeasible
from tessera.ir import Objective


def times_text(tpot_ms: float, ttft_ms: float) -> str:
    each, first = (f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" for ms in (tpot_ms, ttft_ms))
    return f"{each} ms a token and {first} ms to the first"


def too_slow(what: str, tpot_ms: float, ttft_ms: float) -> PlanInfeasible:
    message = f"no {what} keeps to the limits: the nearest takes {times_text(tpot_ms, ttft_ms)}"
    return PlanInfeasible(message, "Allow more time, or add a faster device.")


@dataclass(frozen=True, slots=True)
class Option:
    policy: str
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    # Device name -> sequences.
    batch: dict[str, int]
    microbatches: int
    # Rent and modelled energy; None if unknown.
    usd_per_hour: float | None = None
    joules_per_token: float | None = None

    @property
    def usd_per_million_tokens(self) -> float | None:
        return None if self.usd_per_hour is None else self.usd_per_hour * 1e6 / 3600 / self.tokens_per_s

    def figure(self, objective: Objective) -> float:
        return objective.figure(self.tokens_per_s, self.usd_per_hour, self.joules_per_token)


@dataclass(frozen=True)
class Comparison:
    policy: str
    chosen: Option
    baselines: tuple[Option, ...]
    objective: Objective = Objective.THROUGHPUT

    def ratio_to(self, other: Option) -> float:
        return self.chosen.figure(self.objective) / other.figure(self.objective)

    @property
    def best_baseline(self) -> Option | None:
        return max(self.baselines, key=lambda o: o.figure(self.objective), default=None)
