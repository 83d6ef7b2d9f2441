"""A plan for a load: a service's configuration.

A group is microbatches of one size on one lane. Its role says what its sequences do there. They go from a
prompts group to an answers or mixed group, with their pages.

    data-parallel               one mixed group per device
    prefill-decode              prompts groups and answers groups
    prefill-decode-fractional   prompts groups and mixed groups
    layer-pipeline, attention-ffn, kernel-level   one mixed group whose lane covers several devices
    single                      one mixed group on one device

Groups pull work, so their shares are not planned. Expected figures come from the service's own scheduler on a
virtual clock.
"""

from dataclasses import dataclass
from enum import StrEnum

from tessera.ir.cluster import Cluster
from tessera.ir.plan import Plan


class Role(StrEnum):
    PROMPTS = "prompts"
    ANSWERS = "answers"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a service: lengths and limits."""

    # Mean tokens.
    prompt_tokens: int
    output_tokens: int
    # As `simulate.arrivals` draws them: fixed, uniform, geometric, lognormal.
    spread: str = "uniform"
    # Observed (prompt, answer) tokens, in place of the distribution.
    lengths: tuple[tuple[int, int], ...] = ()
    # Limits. Time per answer token (TPOT): the median over the requests of each group, so that half of the
    # requests keep it on every card. Time to the first token: the median over all requests.
    tpot_ms: float | None = None
    ttft_ms: float | None = None

    def excess(self, tpot_ms: float, ttft_ms: float) -> float:
        """Above 1: a limit is missed."""
        pairs = ((self.tpot_ms, tpot_ms), (self.ttft_ms, ttft_ms))
        return max((ms / limit for limit, ms in pairs if limit is not None), default=0.0)


@dataclass(frozen=True, slots=True)
class Expected:
    """Figures on a virtual clock, at full load."""

    tokens_per_s: float
    # Median over the requests of the slowest group, and 99th percentile over all.
    tpot_ms: float
    tpot_p99_ms: float
    # Median and 99th percentile over all requests.
    ttft_ms: float
    ttft_p99_ms: float
    # Share of the time that each device computes.
    busy: tuple[float, ...]
    # Runs by group and step of its plan.
    steps: tuple[tuple[int, ...], ...]
    clients: int
    pages_moved: int = 0

    def is_within(self, load: Load) -> bool:
        return load.excess(self.tpot_ms, self.ttft_ms) <= 1.0


@dataclass(frozen=True, slots=True)
class GroupSize:
    role: Role
    devices: tuple[str, ...]
    sequences: int
    tokens: int
    microbatches: int


@dataclass(frozen=True)
class Group:
    role: Role
    # One lane; the steps of its unit are the group's step sizes.
    plan: Plan
    # Per microbatch.
    sequences: int
    microbatches: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(g.trace.step.context for g in self.plan.graphs if g.trace.step.kind == "tokens")

    @property
    def pool_tokens(self) -> int:
        """Includes the unused page 0."""
        return self.plan.graphs[-1].trace.step.reserve

    @property
    def windows(self) -> tuple[int, ...]:
        return self.plan.graphs[-1].trace.step.windows or (0,)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.plan.cluster.names[d] for d in self.plan.used)

    @property
    def size(self) -> GroupSize:
        return GroupSize(self.role, self.devices, self.sequences, max(self.sizes), self.microbatches)


@dataclass(frozen=True, slots=True)
class Rival:
    policy: str
    groups: tuple[GroupSize, ...]
    expected: Expected


@dataclass(frozen=True)
class ServicePlan:
    model: str
    policy: str
    load: Load
    groups: tuple[Group, ...]
    # None: not rehearsed.
    expected: Expected | None = None
    rivals: tuple[Rival, ...] = ()
    # Tokens per second by busy time, any policy.
    bound_per_s: float | None = None

    @property
    def cluster(self) -> Cluster:
        return self.groups[0].plan.cluster

    @property
    def rival(self) -> Rival:
        """The plan as others are compared with it."""
        assert self.expected is not None, "it was rehearsed"
        return Rival(self.policy, tuple(group.size for group in self.groups), self.expected)

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(group.plan for group in self.groups)

    @property
    def clients(self) -> int:
        """A sequence in a prompts group has a place where it will answer."""
        answering = [group for group in self.groups if group.role is not Role.PROMPTS]
        return sum(group.sequences * group.microbatches for group in answering)
