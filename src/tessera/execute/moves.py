"""Moves: the engine's list of moves of pages under way.

A move has a run per pair of devices. The source's worker gets the order, the destination's reports the end. A
failed move is cancelled at both ends before `Moved` says so: its pages can be used again at once.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from tessera.errors import MismatchError
from tessera.execute.hub import Hub
from tessera.execute.lanes import LoadedLane
from tessera.execute.messages import Cancel, MovePages
from tessera.execute.page_mover import WORD
from tessera.execute.stepper import Moved, PageMove, Route


@dataclass
class MoveUnderWay:
    move: PageMove
    homes: tuple[int | None, int | None]
    num_bytes: Counter[tuple[int, int]]
    # Run -> source and destination, until it has ended.
    runs: dict[int, tuple[int, int]]
    # Deadline of the move, or of its cancellation once it has failed.
    until_s: float
    began_s: float = field(default_factory=time.monotonic)
    failure: str = ""
    # (run, device) that have not confirmed the cancellation.
    ending: set[tuple[int, int]] = field(default_factory=set)


class Moves:
    def __init__(self, hub: Hub, timeout_s: float | None, tell: Callable[[Moved], None]) -> None:
        self._hub, self._timeout_s, self._tell = hub, timeout_s, tell
        self.under_way: list[MoveUnderWay] = []
        self.moved: Counter[tuple[int, int]] = Counter()

    def start(
        self,
        move: PageMove,
        routes: Sequence[Route],
        source: LoadedLane,
        destination: LoadedLane,
        new_run: Callable[[], int],
    ) -> None:
        for size in (size for route in routes for _, size in route.buffers):
            if size % WORD:
                message = f"a page has {size} bytes, no multiple of {WORD}"
                raise MismatchError(message, "Plan without moves.", f"move {move.number}")
        entry = MoveUnderWay(move, (source.home, destination.home), Counter(), {}, self._due_s())
        for route in routes:
            run, pair = new_run(), (route.source, route.destination)
            entry.runs[run] = pair
            entry.num_bytes[pair] += route.num_bytes
            pages = (list(route.from_pages), list(route.to_pages))
            order = MovePages(run, route.destination, *route.places, route.buffers, *pages)
            self._hub.order(route.source, order)
        self.under_way.append(entry)
        self._settle(entry)

    def done(self, device: int, run: int) -> bool:
        """The destination has all pages; False if this is no run of a move."""
        for entry in self.under_way:
            if entry.runs.get(run, (-1, -1))[1] == device:
                if not entry.failure:
                    del entry.runs[run]
                    self._settle(entry)
                return True
        return False

    def cancelled(self, run: int, device: int) -> None:
        for entry in list(self.under_way):
            entry.ending.discard((run, device))
            self._settle(entry)

    def fail(self, why: str, is_hit: Callable[[MoveUnderWay], bool], gone: Collection[int] = ()) -> None:
        for entry in list(self.under_way):
            if not entry.failure and is_hit(entry):
                entry.failure, entry.until_s = why, self._due_s()
                entry.ending = {(run, device) for run, ends in entry.runs.items() for device in ends}
                for run, device in entry.ending:
                    if device not in gone:
                        self._hub.order(device, Cancel(run))
            entry.ending = {(run, device) for run, device in entry.ending if device not in gone}
            self._settle(entry)

    def late(self) -> tuple[list[tuple[int, int]], set[int]]:
        """Cancels late moves; returns their pairs of devices, and devices that have not confirmed."""
        late = [entry for entry in self.under_way if entry.until_s <= time.monotonic()]
        silent = {device for entry in late if entry.failure for _, device in entry.ending}
        pairs = [pair for entry in late if not entry.failure for pair in entry.runs.values()]
        why = f"its pages have not arrived within {self._timeout_s:g} s" if late else ""
        self.fail(why, lambda entry: any(entry is other for other in late))
        return pairs, silent

    def _settle(self, entry: MoveUnderWay) -> None:
        if (not entry.failure and entry.runs) or entry.ending:
            return
        self.under_way.remove(entry)
        num_bytes = 0 if entry.failure else entry.num_bytes.total()
        if not entry.failure:
            self.moved += entry.num_bytes
        seconds = time.monotonic() - entry.began_s
        self._tell(Moved(entry.move.number, entry.failure, seconds, num_bytes))

    def _due_s(self) -> float:
        return float("inf") if self._timeout_s is None else time.monotonic() + self._timeout_s
