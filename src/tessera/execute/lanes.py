"""Lanes of all loaded plans, and which one the next microbatch takes.

Rule: the lane furthest below its share of the open microbatches, counting the new one; the first of equals. A
plan's lane table gives the shares (entry i is the lane of microbatch i), else the lanes' rates.

Lanes of all plans ever loaded are numbered consecutively, so that a microbatch can finish on a lane of a
replaced plan. Imports no torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.errors import MismatchError
from tessera.execute.lower import homes_of, outputs_of
from tessera.ir import Lane, Plan


class LaneShares:
    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self.open = [0] * len(shares)

    def take(self, allowed: Sequence[int] | None = None) -> int:
        lanes = range(len(self._shares)) if allowed is None else allowed
        lane = min(lanes, key=lambda i: ((self.open[i] + 1) / self._shares[i], i))
        self.open[lane] += 1
        return lane

    def give_back(self, lane: int) -> None:
        self.open[lane] -= 1


def shares_of(lanes: Sequence[Lane], table: Sequence[int] = ()) -> list[float]:
    """Share of the open microbatches per lane, by the plan's lane table or by rates."""
    if not table:
        return [lane.rate_per_s for lane in lanes]
    counts = Counter(table)
    return [float(counts[i]) or 1e-9 for i in range(len(lanes))]


@dataclass(frozen=True, eq=False)
class LoadedLane:
    # Number among the lanes of all plans ever loaded.
    number: int
    plan: Plan
    # Number of the plan, and of the lane within it.
    policy: int
    index: int
    # Devices of any of its steps.
    devices: frozenset[str]

    @property
    def lane(self) -> Lane:
        return self.plan.lanes[self.index]


class Lanes:
    """Lanes of the loaded plans, and which are usable now."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.all: list[LoadedLane] = []
        # Lost devices.
        self.lost: set[str] = set()
        # Per loaded plan: number of its first lane, and its shares.
        self._tables: list[tuple[int, LaneShares]] = []
        self.load(plans)

    def load(self, plans: Sequence[Plan]) -> tuple[LoadedLane, ...]:
        """Replaces the loaded plans; returns the new lanes."""
        check_alike([*([self.all[0].plan] if self.all else []), *plans])
        first = len(self.all)
        self._tables = []
        for policy, plan in enumerate(plans):
            self._tables.append((len(self.all), LaneShares(shares_of(plan.lanes, plan.lane_table))))
            for index in range(len(plan.lanes)):
                devices = devices_of(plan, index)
                self.all.append(LoadedLane(len(self.all), plan, policy, index, devices))
        return tuple(self.all[first:])

    def open(self, policy: int | None = None) -> list[LoadedLane]:
        """Loaded lanes without a lost device, of one policy or of all."""
        tables = self._tables if policy is None else self._tables[policy : policy + 1]
        found = [self.all[first + i] for first, table in tables for i in range(len(table.open))]
        return [lane for lane in found if not lane.devices & self.lost]

    def take(self, policy: int) -> LoadedLane | None:
        """A lane for one microbatch: of the policy, else of another; None: none is usable."""
        for wanted in (policy, *(p for p in range(len(self._tables)) if p != policy)):
            first, table = self._tables[wanted]
            allowed = [lane.index for lane in self.open(wanted)]
            if allowed:
                return self.all[first + table.take(allowed)]
        return None

    def give_back(self, number: int) -> None:
        """A microbatch has left its lane; lanes of replaced plans are not counted."""
        for first, table in self._tables:
            if 0 <= number - first < len(table.open):
                table.give_back(number - first)


def devices_of(plan: Plan, index: int) -> frozenset[str]:
    """Devices that a lane needs for launches, state or outputs."""
    lane, names = plan.lanes[index], plan.cluster.names
    found: set[int] = set()
    for graph, place in zip(plan.unit_of(lane).graphs, lane.placement.devices, strict=True):
        found |= {*place, *(device for _, device in homes_of(graph, place))}
        found |= {device for _, device in outputs_of(graph, place)}
    return frozenset(names[device] for device in found)


def check_alike(plans: Sequence[Plan]) -> None:
    """Raises unless plans are for the same steps on the same devices."""
    first = plans[0]
    for plan in plans[1:]:
        same = [g.trace.digest for g in plan.graphs] == [g.trace.digest for g in first.graphs]
        same &= len(plan.variants) == len(first.variants)
        if not same or plan.cluster != first.cluster or plan.unit.counts != first.unit.counts:
            message = f"the {plan.policy} plan is for other steps or devices than the {first.policy} plan"
            remedy = "Plan all policies from the same traces, for the same devices and link."
            raise MismatchError(message, remedy)
