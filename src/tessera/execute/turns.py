"""Turns: no step waits for other microbatches' shorter steps for longer than it takes itself.

A device prefers what is over soonest. The step that answers goes on is shorter than the one that reads a
prompt, and a microbatch that is never empty begins one after the other: left alone, they would keep a prompt
on the same device waiting for good. So a step should be done in PATIENCE times what it takes alone. Past it,
shorter steps of other microbatches that share a device with it are not started until it has ended. Who was
held back so waits for the steps that were late then, and for no other, so nobody waits for ever. What runs is
never stopped.

Alone, a step takes what the plan's costs say for its busiest device, or the least it was seen to take where
that is more: devices that compute on a CPU in place of a GPU are slower than their plans.

Where a microbatch is one request the rule is not needed: its short steps end. Imports no torch.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tessera.execute.lanes import LoadedLane

# A step may take as many times as long as it would alone: it waits for others at most as long as it works.
PATIENCE = 2.0


@dataclass(slots=True, eq=False)
class StepCost:
    # Device -> seconds of its launches, by the plan's costs.
    busy_s: Mapping[str, float]
    # Alone; the busiest device's, until it is seen.
    alone_s: float
    # The least it took; None: it was not run yet.
    least_s: float | None = None

    def seen(self, seconds: float) -> None:
        if self.least_s is None or seconds < self.least_s:
            self.least_s = seconds
            self.alone_s = max(seconds, max(self.busy_s.values(), default=0.0))


def costs_of(lane: LoadedLane) -> tuple[StepCost, ...]:
    """Of every step of a lane, in the order of its unit."""
    names, found = lane.plan.cluster.names, []
    places = lane.lane.placement.devices
    # Of a plan that nobody priced nothing is known to be late.
    priced = lane.plan.costs_of(lane.lane) or (None,) * len(places)
    for costs, place in zip(priced, places, strict=True):
        busy_s: dict[str, float] = defaultdict(float)
        for launch, device in enumerate(place):
            busy_s[names[device]] += costs.us(launch, device) * 1e-6 if costs is not None else 0.0
        found.append(StepCost(dict(busy_s), max(busy_s.values(), default=0.0)))
    return tuple(found)


class Turns:
    """Steps under way, and microbatches that let one go first. Microbatches are numbers here."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        # Microbatch -> (when its step should be done, how long that takes alone, what it needs).
        self._running: dict[int, tuple[float, float, StepCost]] = {}
        # Microbatch -> those whose steps must end before its own starts.
        self._held: dict[int, set[int]] = {}

    def holds(self, microbatch: int, cost: StepCost, scale: float, now_s: float) -> bool:
        """Must it wait with this step? Then `end` will name it. If not, the step counts as started."""
        alone_s = cost.alone_s * scale
        late = [
            other
            for other, (due_s, other_s, its) in self._running.items()
            if due_s < now_s and other_s > alone_s and not its.busy_s.keys().isdisjoint(cost.busy_s)
        ]
        if late:
            self._held[microbatch] = set(late)
            return True
        self._running[microbatch] = (now_s + self._patience * alone_s, alone_s, cost)
        return False

    def start(self, microbatch: int, cost: StepCost, scale: float, now_s: float) -> None:
        alone_s = cost.alone_s * scale
        self._running[microbatch] = (now_s + self._patience * alone_s, alone_s, cost)

    def end(self, *microbatches: int) -> list[int]:
        """Steps of these are over, or they are lost; who may start then."""
        for number in microbatches:
            self._running.pop(number, None)
        if not self._held:
            return []
        for number in microbatches:
            self._held.pop(number, None)
        free = []
        for held, by in list(self._held.items()):
            by.difference_update(microbatches)
            if not by:
                del self._held[held]
                free.append(held)
        return free
