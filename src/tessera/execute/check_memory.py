"""check_memory: no two values of a program are in one place at one time, whoever is fast or slow.

Every user of a buffer on a device (a launch, a transfer that lands or leaves, the start and the end of the
step) gets the interval of that device's list in which it may run; see `check_program` for the rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.execute.case import Case, Order
from tessera.ir import BufferKind, Place, Recv, Run, Send, Wait


def check_memory(case: Case, order: Order) -> None:
    """Raises RuleBroken for the first two users of a byte that are not ordered."""
    _MemoryCheck(case, order).check()


@dataclass(frozen=True, slots=True)
class _User:
    """Something that reads or writes a buffer on one device, in positions of that device's list.

    It starts after everything before `first` is over, and is over when the instruction at `last` is.
    """

    first: int
    last: int
    writes: bool
    words: str

    def precedes(self, other: "_User") -> bool:
        """True if this one is over in every order before the other starts."""
        return self.last < other.first


class _MemoryCheck:
    def __init__(self, case: Case, order: Order) -> None:
        self._case, self._order = case, order

    def check(self) -> None:
        for device, places in enumerate(self._case.program.places):
            size = self._case.program.arena_bytes[device]
            outside = next((p for p in places if p.offset < 0 or p.stop > size), None)
            if outside is not None:
                what = f"buffer {outside.buffer} at {outside.offset}"
                raise self._case.broken("every place lies inside the arena", device, what)
            users = self._users(device)
            for buffer, found in users.items():
                self._check_buffer(device, buffer, found)
            self._check_places(device, places, users)

    def _users(self, device: int) -> dict[int, list[_User]]:
        """Buffer -> its users on a device; the start and the end of the step are users too."""
        trace = self._case.graph.trace
        users: dict[int, list[_User]] = {p.buffer: [] for p in self._case.program.places[device]}
        column = self._case.program.instructions[device]
        for position, instruction in enumerate(column):
            if isinstance(instruction, Run):
                for access in trace.launches[instruction.launch].accesses:
                    if access.buffer in users:
                        user = _User(
                            position, position, access.write or access.atomic, self._case.words(instruction)
                        )
                        users[access.buffer].append(user)
        for number, transfer in enumerate(self._case.program.transfers):
            if device in (transfer.src, transfer.dst):
                users[transfer.buffer].append(self._moving(device, number))
        for buffer, found in users.items():
            if trace.buffers[buffer].kind in (BufferKind.INPUT, BufferKind.STATE):
                found.append(_User(-1, -1, True, "the start of the step"))
        views = {name: view.buffer for name, view in trace.outputs}
        kept = {views[n] for n, d in self._case.program.outputs if d == device}
        kept |= {b for b, d in self._case.program.homes if d == device}
        for buffer in kept & users.keys():
            users[buffer].append(_User(len(column), len(column), False, "the end of the step"))
        return users

    def _moving(self, device: int, number: int) -> _User:
        """A transfer as its receiver or its sender sees it; one that nobody awaits may last to the end."""
        first = self._order.before[-1, number][device]
        if device == self._case.program.transfers[number].dst:
            return _User(first, self._case.at[Recv, number][1], True, self._case.words(Recv(number)))
        end = self._case.at.get((Wait, number), (device, len(self._case.program.instructions[device])))[1]
        return _User(self._case.at[Send, number][1], end, False, self._case.words(Send(number)))

    def _check_buffer(self, device: int, buffer: int, users: Sequence[_User]) -> None:
        for one in users:
            if not one.writes:
                continue
            for other in users:
                if other is not one and not one.precedes(other) and not other.precedes(one):
                    if (one.first, one.last) == (other.first, other.last):
                        continue  # two accesses of one launch
                    rule = "no two users of one byte are unordered"
                    what = f"buffer {buffer}: {one.words} and {other.words}"
                    raise self._case.broken(rule, device, what)

    def _check_places(
        self, device: int, places: Sequence[Place], users: Mapping[int, Sequence[_User]]
    ) -> None:
        """Buffers that share memory must not be alive at one time."""
        used = [p for p in places if users[p.buffer]]
        spans = np.array([(p.offset, p.stop) for p in used]).reshape(-1, 2)
        firsts = np.array([min(u.first for u in users[p.buffer]) for p in used])
        lasts = np.array([max(u.last for u in users[p.buffer]) for p in used])
        for index, place in enumerate(used):
            shares = (spans[:, 0] < place.stop) & (spans[:, 1] > place.offset)
            shares &= (firsts <= lasts[index]) & (lasts >= firsts[index])
            shares[index] = False
            if shares.any():
                other = used[int(np.flatnonzero(shares)[0])].buffer
                words = " and ".join(users[b][-1].words for b in (place.buffer, other))
                what = f"buffers {place.buffer} and {other} ({words})"
                raise self._case.broken("no two live values overlap in the arena", device, what)
