"""Repeats: a machine that remembers. What it has done once from some state it does not work out again.

A boundary is where a slot has finished a run. From a boundary, and given which runs are begun there, a
machine always does the same until the next boundary; so that stretch is kept as an edge from state to state,
with its duration and the busy time in it. Requests that join or leave a batch do not change what devices and
links do, which is why a busy server repeats itself and a hundred thousand requests take seconds. States are
merged when all their times agree to a millionth of a microsecond; that is all that is lost.

A run whose times are its own (jitter) is marked by a negative number: what it takes part in is not kept.
"""

from dataclasses import dataclass, field

from tessera.simulate.machine import Key, Machine, State, Work

# States kept; beyond that all are forgotten, which costs time and changes nothing.
MAX_STATES = 5000


@dataclass(slots=True)
class _Node:
    """A boundary that was seen."""

    state: State
    # Numbers of the works begun here -> what follows.
    edges: dict[tuple[int, ...], "_Edge"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Edge:
    """From one boundary to the next."""

    us: float
    # Age of the slot that finishes, among those in flight with those begun.
    finished: int
    # Ages of the slots that stay, in the order of the next state.
    staying: tuple[int, ...]
    busy_us: tuple[float, ...]
    node: _Node


class Repeats:
    """Drives a machine in absolute time: start, run_until, drop."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.now_us = 0.0
        self.busy_us = [0.0] * len(machine.busy_us)
        self._marked = tuple(machine.busy_us)
        self._nodes: dict[Key, _Node] = {}
        self._slots: list[int] = []
        self._begun: list[tuple[int, Work]] = []
        # The last boundary; None if somebody interfered since. And when it was: the machine's own zero.
        self._node: _Node | None = self._intern(machine.state())
        self._since_us = 0.0
        self._is_current = True  # the machine itself is where we are
        self._is_boundary = True  # nothing has happened since the boundary
        self.num_followed = self.num_worked_out = 0

    def start(self, slot: int, work: Work) -> None:
        """Begins a run now."""
        if self._node is not None and not self._slots and not self._begun:
            self._since_us = self.now_us  # nothing runs: this moment is as good a boundary
            self._is_current, self._is_boundary = False, True
        if self._node is not None and self._is_boundary:
            self._begun.append((slot, work))
            if self._is_current:
                self._machine.start(slot, work)
            return
        self._catch_up()
        self._node = None
        self._machine.start(slot, work)

    def run_until(self, limit_us: float | None) -> int | None:
        """The slot whose run has finished, now; None if the limit comes first or nothing runs."""
        if self._node is not None:
            edge = self._node.edges.get(tuple([work.number for _, work in self._begun]))
            if edge is not None:
                return self._follow(edge, limit_us)
        self._catch_up()
        slot = self._machine.run_until(None if limit_us is None else limit_us - self._since_us)
        self.now_us = self._since_us + self._machine.now_us
        self._is_boundary = slot is not None
        if slot is not None:
            self._arrive(slot)
        return slot

    def drop(self, slot: int) -> None:
        """Forgets a slot's run wherever it is."""
        self._catch_up()
        self._node = None
        self._machine.drop(slot)

    def _follow(self, edge: _Edge, limit_us: float | None) -> int | None:
        stop = self._since_us + edge.us
        if limit_us is not None and stop > limit_us:
            self._is_current = self._is_boundary = False
            self.now_us = max(self.now_us, limit_us)
            return None
        self.num_followed += 1
        slots = self._slots + [slot for slot, _ in self._begun]
        self._slots = [slots[age] for age in edge.staying]
        self._begun = []
        self._node, self._since_us, self.now_us = edge.node, stop, stop
        self._is_current, self._is_boundary = False, True
        busy = self.busy_us
        for index, us in enumerate(edge.busy_us):
            busy[index] += us
        return slots[edge.finished]

    def _catch_up(self) -> None:
        """Brings the machine to where we are."""
        if self._is_current:
            return
        assert self._node is not None, "a machine that was interfered with is current"
        self._machine.restore(self._node.state, self._slots)
        self._marked = tuple(self._machine.busy_us)
        for slot, work in self._begun:
            self._machine.start(slot, work)
        if not self._is_boundary:
            finished = self._machine.run_until(self.now_us - self._since_us)
            assert finished is None, "no run ends before the next boundary"
        self._is_current = True

    def _arrive(self, slot: int) -> None:
        """The machine stands at a boundary: remember it, and how one gets there."""
        self.num_worked_out += 1
        machine = self._machine
        node = self._intern(machine.state())
        busy = tuple([b - a for a, b in zip(self._marked, machine.busy_us, strict=True)])
        numbers = tuple([work.number for _, work in self._begun])
        if self._node is not None and min(numbers, default=0) >= 0:
            age = {s: index for index, s in enumerate([*self._slots, *(s for s, _ in self._begun)])}
            staying = tuple([age[s] for s in machine.slots])
            self._node.edges[numbers] = _Edge(machine.now_us, age[slot], staying, busy, node)
        for index, us in enumerate(busy):
            self.busy_us[index] += us
        self._marked = tuple(machine.busy_us)
        self._node, self._since_us, self._slots, self._begun = node, self.now_us, machine.slots, []
        machine.rebase()

    def _intern(self, state: State) -> _Node:
        if any(work.number < 0 for work in state.works):
            return _Node(state)
        if len(self._nodes) >= MAX_STATES:
            self._nodes.clear()
        return self._nodes.setdefault(state.key(), _Node(state))
