"""Muster: which caller becomes the worker of which device.

A caller that says its rank gets that device and no other. One that says none gets a device that is left,
once there are enough of them: before, a caller that says its rank may still come. Devices whose worker was
started for them are for that worker alone. Who is not needed is a spare where the gate is kept open, and a
mistake where not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.errors import MismatchError
from tessera.execute.gate import Caller, Gate
from tessera.execute.messages import ANY_RANK

PLANS_REMEDY = "Copy the same plan files everywhere."
RANK_REMEDY = "Give each its own --rank."


@dataclass
class Muster:
    """The callers of one start."""

    gate: Gate
    names: Sequence[str]
    # Device -> the rank under which its worker calls.
    ranks: Sequence[int]
    # Of the plans; what a worker that has plans must say.
    digest: str
    # Devices whose worker was started for them.
    started: frozenset[int]
    keeps_gate: bool
    _found: dict[int, Caller] = field(default_factory=dict)
    _anyone: list[Caller] = field(default_factory=list)
    _spares: list[Caller] = field(default_factory=list)

    def missing(self) -> list[int]:
        """Devices that no caller is for, as far as it is known now."""
        left = [d for d in range(len(self.names)) if d not in self._found]
        open_to_all = [d for d in left if d not in self.started]
        given = set(open_to_all[: len(self._anyone)])
        return [d for d in left if d not in given]

    def add(self, caller: Caller) -> None:
        """Takes a caller in, keeps it for later, or sends it away."""
        rank, digest = caller.hello.rank, caller.hello.digest
        if digest not in ("", self.digest):
            self._send_away_with_plans(caller)
        elif rank == ANY_RANK:
            self._anyone.append(caller)
        elif rank not in self.ranks:
            self._send_away_with_rank(caller)
        elif self.ranks.index(rank) in self._found:
            self._add_second(caller)
        else:
            self._found[self.ranks.index(rank)] = caller

    def complete(self) -> dict[int, Caller] | None:
        """Device -> its worker, when there is one for each; those that left meanwhile are none."""
        self._found = {d: c for d, c in self._found.items() if c.is_there()}
        self._anyone = [c for c in self._anyone if c.is_there()]
        if self.missing():
            return None
        left = [d for d in range(len(self.names)) if d not in self._found]
        found = self._found | dict(zip(left, self._anyone, strict=False))
        self._spares += self._anyone[len(left) :]
        self._found, self._anyone = {}, []
        return found

    def disperse(self) -> None:
        """Whoever has no device waits at the gate again; one that was started for this muster leaves."""
        for caller in (*self._found.values(), *self._anyone, *self._spares):
            if caller.hello.digest:
                caller.pipe.close()
            else:
                self.gate.put_back(caller)
        self._found, self._anyone, self._spares = {}, [], []

    def _send_away_with_plans(self, caller: Caller) -> None:
        if self.keeps_gate:
            self.gate.send_away(caller, "it brought plans", "Start `tessera worker`, which needs none.")
            return
        caller.refuse("it has other plans", PLANS_REMEDY)
        rank = caller.hello.rank
        place = f"device {self.names[self.ranks.index(rank)]}" if rank in self.ranks else f"rank {rank}"
        raise MismatchError("it has other plans", PLANS_REMEDY, place)

    def _send_away_with_rank(self, caller: Caller) -> None:
        if self.keeps_gate:  # of a device that the service is planned without at present
            self._spares.append(caller)
            return
        remedy = f"There are {len(self.ranks)}, from 0."
        self.gate.send_away(caller, f"there is no rank {caller.hello.rank}", remedy)

    def _add_second(self, caller: Caller) -> None:
        if self.keeps_gate:
            self._spares.append(caller)
            return
        what = f"two processes say they are rank {caller.hello.rank}"
        caller.refuse(what, RANK_REMEDY)
        raise MismatchError(what, RANK_REMEDY, "--rank")
