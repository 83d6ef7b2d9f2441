"""Lanes: the lanes of all loaded plans, and which one the next microbatch takes.

One rule for services, runs and simulations: the lane furthest below its share of the open microbatches,
counting the new one; the first of equals. A plan's lane table gives the shares (entry i is the lane of
microbatch i), else the lanes' rates. With all microbatches open each keeps its lane from request to request.

Lanes of all plans ever loaded are numbered consecutively, so that a microbatch can finish on a lane of a plan
that was replaced. Imports no torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.errors import MismatchError
from tessera.execute.lower import homes_of, outputs_of
from tessera.ir import Lane, Plan


class LaneShares:
    """The rule, over lanes counted from 0."""

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
    """Of the open microbatches, how many each lane should have: by a plan's lane table, or by rates."""
    if not table:
        return [lane.rate_per_s for lane in lanes]
    counts = Counter(table)
    return [float(counts[i]) or 1e-9 for i in range(len(lanes))]


@dataclass(frozen=True, eq=False)
class LoadedLane:
    """One lane of a plan that is, or was, loaded."""

    # Among the lanes of all plans that were ever loaded.
    number: int
    plan: Plan
    # The plan's number when it was loaded, and the lane's within the plan.
    policy: int
    index: int
    # Names of the devices that take part in any of its steps.
    devices: frozenset[str]

    @property
    def lane(self) -> Lane:
        return self.plan.lanes[self.index]


class Lanes:
    """The lanes of the plans that are loaded, and which of them can be followed now."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.all: list[LoadedLane] = []
        # Devices that cannot be used now.
        self.lost: set[str] = set()
        # Of each plan that is loaded: its first lane's number, and who is on its lanes.
        self._tables: list[tuple[int, LaneShares]] = []
        self.load(plans)

    def load(self, plans: Sequence[Plan]) -> tuple[LoadedLane, ...]:
        """Takes up plans in place of those before; gives the new lanes."""
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
        """Loaded lanes that avoid every lost device, of one policy or of all."""
        tables = self._tables if policy is None else self._tables[policy : policy + 1]
        found = [self.all[first + i] for first, table in tables for i in range(len(table.open))]
        return [lane for lane in found if not lane.devices & self.lost]

    def take(self, policy: int) -> LoadedLane | None:
        """A lane for one microbatch under a policy; of another where it has none; None: there is none."""
        for wanted in (policy, *(p for p in range(len(self._tables)) if p != policy)):
            first, table = self._tables[wanted]
            allowed = [lane.index for lane in self.open(wanted)]
            if allowed:
                return self.all[first + table.take(allowed)]
        return None

    def give_back(self, number: int) -> None:
        """A microbatch has left its lane; of a plan that was replaced, nobody counts."""
        for first, table in self._tables:
            if 0 <= number - first < len(table.open):
                table.give_back(number - first)


def devices_of(plan: Plan, index: int) -> frozenset[str]:
    """Names of the devices that a lane needs: for launches, for state, and for outputs."""
    lane, names = plan.lanes[index], plan.cluster.names
    found: set[int] = set()
    for graph, place in zip(plan.unit_of(lane).graphs, lane.placement.devices, strict=True):
        found |= {*place, *(device for _, device in homes_of(graph, place))}
        found |= {device for _, device in outputs_of(graph, place)}
    return frozenset(names[device] for device in found)


def check_alike(plans: Sequence[Plan]) -> None:
    """Plans that are loaded together are for the same steps on the same devices."""
    first = plans[0]
    for plan in plans[1:]:
        same = [g.trace.digest for g in plan.graphs] == [g.trace.digest for g in first.graphs]
        same &= len(plan.variants) == len(first.variants)
        if not same or plan.cluster != first.cluster or plan.unit.counts != first.unit.counts:
            message = f"the {plan.policy} plan is for other steps or devices than the {first.policy} plan"
            remedy = "Plan all policies from the same traces, for the same devices and link."
            raise MismatchError(message, remedy)
