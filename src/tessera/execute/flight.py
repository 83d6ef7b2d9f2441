"""Flight: a request in a slot; and which lanes there are for one.

The lanes of all loaded plans are numbered one after another. A policy is a plan; a request is admitted under
one and follows one of its lanes, or, when devices are lost, any lane that avoids them. Where lanes are of
unlike batches the lane comes first: only then is the request asked for its inputs and state.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from tessera.errors import MismatchError
from tessera.execute.schedule import LaneTable
from tessera.ir import Plan, Program, Run

Tensors = Mapping[str, torch.Tensor]


class Request(Protocol):
    """One unit of work, as the engine sees it. Asked again from the start, it must answer the same."""

    def state(self) -> Tensors:
        """The state of all its steps, as each is before the first run that uses it."""

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        """The inputs of the run-th run of a step, given the outputs of the run before it."""


@runtime_checkable
class AnyBatch(Protocol):
    """A request that can be had at every batch that a plan's lanes have."""

    def at(self, variant: int) -> Request:
        """The request at the batch of one of the plan's variants; asked again, the same."""


@dataclass
class RunResult:
    """What one request gave."""

    # Lane within its policy, and the policy.
    lane: int
    policy: int = 0
    # Outputs of every run in order.
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    # State after the last run, as flat bytes by name.
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    start_s: float = 0.0
    stop_s: float = 0.0
    # How often it was started again because a device was lost.
    restarts: int = 0
    # Why it has no result; empty if it has.
    error: str = ""
    # Where it was in flight; -1 where nobody says.
    slot: int = -1


@dataclass(frozen=True)
class Route:
    """One lane of one policy."""

    policy: int
    lane: int
    programs: tuple[Program, ...]
    # Devices that take part in any of its runs.
    devices: frozenset[int]
    # The variant that its requests are of, and the number of its first step among those of all variants.
    variant: int = 0
    first_step: int = 0


@dataclass
class Flight:
    """A request in a slot."""

    number: int
    slot: int
    # As it was given, and as it is at the batch of its lane.
    given: Request | AnyBatch
    request: Request
    route: int
    result: RunResult
    # (index of the program in its lane, run) still to do, last first.
    left: list[tuple[int, int]]
    # State that no run has used yet, by name.
    state: dict[str, torch.Tensor]
    # The current run: who has not answered yet, since when, and what came.
    missing: set[int] = field(default_factory=set)
    began_s: float = 0.0
    program: Program | None = None
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """For messages."""
        return f"request {self.number}"


class Routes:
    """The lanes of all plans, and which of them can still be followed."""

    def __init__(self, plans: Sequence[Plan], programs: Sequence[Sequence[Sequence[Program]]]) -> None:
        _check_alike(plans)
        self._plans = plans
        self.all = [
            _route(plans[policy], policy, lane, found)
            for policy, lanes in enumerate(programs)
            for lane, found in enumerate(lanes)
        ]
        self.lost: set[int] = set()
        self._tables: dict[int, tuple[LaneTable, list[int]]] = {}

    def open(self, policy: int | None = None) -> list[int]:
        """Numbers of the lanes that avoid every lost device, of one policy or of all."""
        return [
            n
            for n, route in enumerate(self.all)
            if not route.devices & self.lost and policy in (None, route.policy)
        ]

    def take(self, policy: int) -> int | None:
        """A lane for one request under a policy; of another policy where this one has none left."""
        for wanted in (policy, *(p for p in range(len(self._plans)) if p != policy)):
            lanes = self.open(wanted)
            if lanes:
                return lanes[self._table(wanted, lanes).take()]
        return None

    def give_back(self, route: int) -> None:
        """A request of this lane has ended."""
        table = self._tables.get(self.all[route].policy)
        if table is not None and route in table[1]:
            table[0].give_back(table[1].index(route))

    def lose(self, device: int) -> None:
        """No request may use this device from now on."""
        self.lost.add(device)
        self._tables = {}

    def reset(self) -> None:
        """Shares are counted anew."""
        self._tables = {}

    def _table(self, policy: int, lanes: list[int]) -> LaneTable:
        if policy not in self._tables:
            plan = self._plans[policy]
            chosen = [plan.lanes[self.all[n].lane] for n in lanes]
            table = plan.lane_table if len(chosen) == len(plan.lanes) else ()
            self._tables[policy] = (LaneTable(chosen, plan.slots, table), lanes)
        return self._tables[policy][0]


def _route(plan: Plan, policy: int, number: int, programs: Sequence[Program]) -> Route:
    lane = plan.lanes[number]
    devices = _devices(programs)
    return Route(policy, number, tuple(programs), devices, lane.variant, plan.first_step(lane))


def make_flight(
    number: int, slot: int, given: Request | AnyBatch, route: int, routes: Routes, origin_s: float
) -> Flight:
    """A request before its first run."""
    found = routes.all[route]
    request = given.at(found.variant) if isinstance(given, AnyBatch) else given
    left = [(i, run) for i, p in enumerate(found.programs) for run in range(p.count)][::-1]
    result = RunResult(found.lane, found.policy, start_s=time.monotonic() - origin_s, slot=slot)
    return Flight(number, slot, given, request, route, result, left, dict(request.state()))


def check_batches(plan: Plan, requests: Sequence[Request | AnyBatch]) -> None:
    """Raises MismatchError if the plan's lanes are of unlike batches and a request has one batch only."""
    if plan.variants and not all(isinstance(request, AnyBatch) for request in requests):
        batches = ", ".join(str(variant.batch) for variant in plan.every_variant)
        message = f"the plan has lanes of batch {batches}, and a request says what it is at one batch only"
        raise MismatchError(message, "Give requests that have `at(variant)`, or plan for one batch.")


def computes(program: Program) -> bool:
    """False for a program that only moves state."""
    return any(isinstance(i, Run) for column in program.instructions for i in column)


def participants(program: Program, taking: set[int]) -> list[int]:
    """Devices with something to do: instructions, an output to hand over, or state to take in."""
    holding = {device for _, device in program.outputs} | taking
    return [d for d, column in enumerate(program.instructions) if column or d in holding]


def _devices(programs: Sequence[Program]) -> frozenset[int]:
    found = {d for p in programs for d in participants(p, {device for _, device in p.homes})}
    return frozenset(found)


def _check_alike(plans: Sequence[Plan]) -> None:
    """Plans that run together are for the same steps on the same devices."""
    first = plans[0]
    for plan in plans[1:]:
        same = [g.trace.digest for g in plan.graphs] == [g.trace.digest for g in first.graphs]
        same &= len(plan.variants) == len(first.variants)
        if not same or plan.cluster != first.cluster or plan.unit.counts != first.unit.counts:
            raise MismatchError(
                f"the {plan.policy} plan is for other steps or devices than the {first.policy} plan",
                "Plan all policies from the same traces, for the same devices and link.",
            )
