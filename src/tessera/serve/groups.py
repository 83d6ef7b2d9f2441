"""Records of the router: groups of the loaded policies, sequences and pages on their way."""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import Microbatch
from tessera.ir import Group, Plan, Role, ServicePlan
from tessera.serve.answer import ActiveRequest
from tessera.serve.pages import PagePool, listed
from tessera.serve.records import Shape
from tessera.serve.sequences import SequenceBatch
from tessera.serve.step_inputs import Steps

# The first is current at the start.
Policies = tuple[ServicePlan, ...]


def plans_of(policies: Sequence[ServicePlan]) -> tuple[Plan, ...]:
    return tuple({id(plan): plan for policy in policies for plan in policy.plans}.values())


@dataclass(eq=False)
class RoutedGroup:
    group: Group
    lane: LoadedLane
    shape: Shape
    steps: Steps
    # Predicted seconds per token.
    prompt_s: float
    answer_s: float

    @property
    def role(self) -> Role:
        return self.group.role

    @property
    def home(self) -> int:
        assert self.lane.home is not None, "every group of a service plan has a home"
        return self.lane.home

    def is_like(self, other: "RoutedGroup") -> bool:
        return (self.lane, self.role, self.shape) == (other.lane, other.role, other.shape)


RoutedMicrobatch = Microbatch[ActiveRequest]


@dataclass(eq=False)
class MovingSequence:
    request: ActiveRequest
    source: RoutedMicrobatch
    destination: RoutedMicrobatch
    # None: both ends share one pool, and nothing is sent.
    pool: PagePool | None
    # Page tables at the destination; the first `num_sent` of each have arrived, are in flight, or are 0.
    pages: list[list[int]]
    num_sent: int
    num_expected: int
    in_flight: int = 0
    # Row at the destination while state by row is in flight, which goes alone.
    row: int | None = None
    # Abandoned: its pages are released when nothing is in flight.
    is_over: bool = False

    @property
    def ends(self) -> tuple[int, int]:
        """Numbers of both microbatches."""
        return self.source.number, self.destination.number

    def release(self) -> None:
        if self.pool is not None and not self.in_flight:
            self.pool.give_back(listed(self.pages))
            self.pages = []


@dataclass(frozen=True, eq=False)
class PagesInFlight:
    transit: MovingSequence
    # The source keeps them until they have arrived.
    pages: tuple[int, ...]


def batch_of(microbatch: RoutedMicrobatch) -> SequenceBatch:
    assert isinstance(microbatch.content, SequenceBatch)
    return microbatch.content
