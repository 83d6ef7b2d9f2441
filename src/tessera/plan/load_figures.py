"""Target and figures of a load."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tessera import ir


@dataclass(frozen=True, slots=True)
class Target:
    """Answer length and latency limits."""

    # Answer tokens per request; a unit without decodes counts rows.
    output_tokens: int
    tpot_ms: float | None = None
    ttft_ms: float | None = None

    def allows(self, tpot_ms: float, ttft_ms: float) -> bool:
        in_time = self.tpot_ms is None or tpot_ms <= self.tpot_ms * (1 + 1e-9)
        return in_time and (self.ttft_ms is None or ttft_ms <= self.ttft_ms * (1 + 1e-9))


@dataclass(frozen=True, slots=True)
class Option:
    """A policy's simulated figures at one point."""

    policy: str
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    # Device name -> rows of a microbatch.
    batch: dict[str, int]
    microbatches: int
    # Rows of one prefill; empty without prefills.
    prefill_batch: dict[str, int] = field(default_factory=dict)
    # Rent and modelled energy; None if unknown.
    usd_per_hour: float | None = None
    joules_per_token: float | None = None

    @property
    def usd_per_million_tokens(self) -> float | None:
        return None if self.usd_per_hour is None else self.usd_per_hour * 1e6 / 3600 / self.tokens_per_s

    def figure(self, objective: ir.Objective) -> float:
        if objective is ir.Objective.COST:
            return 1.0 / self.usd_per_million_tokens if self.usd_per_million_tokens else 0.0
        if objective is ir.Objective.ENERGY:
            return 1.0 / self.joules_per_token if self.joules_per_token else 0.0
        return self.tokens_per_s

    def keeps(self, target: Target) -> bool:
        return target.allows(self.tpot_ms, self.ttft_ms)


@dataclass(frozen=True)
class Comparison:
    """A plan's figures beside those of other policies."""

    # The plan's policy.
    policy: str
    chosen: Option
    # One per policy that applies.
    baselines: tuple[Option, ...]
    objective: ir.Objective = ir.Objective.THROUGHPUT

    def ratio_to(self, other: Option) -> float:
        """The plan's figure relative to an option's."""
        return self.chosen.figure(self.objective) / other.figure(self.objective)

    @property
    def best_baseline(self) -> Option | None:
        return max(self.baselines, key=lambda o: o.figure(self.objective), default=None)


@dataclass(frozen=True, kw_only=True)
class LoadPlan(Comparison):
    """The plan for a load, and every coarse policy at its best."""

    plan: ir.Plan
    # All simulated options.
    options: tuple[Option, ...]

    @property
    def frontier(self) -> tuple[Option, ...]:
        """Pareto front of each policy: throughput and time per token."""
        kept: list[Option] = []
        for policy in dict.fromkeys(o.policy for o in self.options):
            best = 0.0
            for option in sorted(
                (o for o in self.options if o.policy == policy), key=lambda o: (o.tpot_ms, -o.tokens_per_s)
            ):
                if option.tokens_per_s > best:
                    kept.append(option)
                    best = option.tokens_per_s
        return tuple(kept)


def against(plan: ir.Plan, options: Sequence[Option], target: Target) -> ir.Plan:
    """The plan with its baselines, in work units of the plan."""
    tokens = plan.batch * max(1, target.output_tokens)
    rates = tuple(ir.Baseline(o.policy, o.tokens_per_s / tokens, None) for o in options)
    return replace(plan, baselines=rates)


def together(listed: Sequence[Option], policy: str = "data-parallel") -> Option:
    """Options side by side: rates, rents and powers add up."""
    rents = [o.usd_per_hour for o in listed if o.usd_per_hour is not None]
    watts = [o.joules_per_token * o.tokens_per_s for o in listed if o.joules_per_token is not None]
    tokens_per_s = sum(o.tokens_per_s for o in listed)
    return Option(
        policy,
        tokens_per_s,
        max(o.tpot_ms for o in listed),
        max(o.ttft_ms for o in listed),
        {name: b for o in listed for name, b in o.batch.items()},
        sum(o.microbatches for o in listed),
        {name: b for o in listed for name, b in o.prefill_batch.items()},
        sum(rents) if len(rents) == len(listed) else None,
        sum(watts) / tokens_per_s if len(watts) == len(listed) else None,
    )


def replicas_within(options: Sequence[Option]) -> list[Option]:
    """Data-parallel options for each time per token that some device reaches."""
    single = [o for o in options if o.policy == "single"]
    found = []
    for limit in {o.tpot_ms for o in single}:
        best: dict[str, Option] = {}
        for option in single:
            (device,) = option.batch
            if option.tpot_ms <= limit and (
                device not in best or option.tokens_per_s > best[device].tokens_per_s
            ):
                best[device] = option
        found.append(together(list(best.values())))
    return found
