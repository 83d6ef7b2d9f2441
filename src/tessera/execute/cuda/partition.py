"""Partition: disjoint sets of SMs of one card, each a device of its own (`cuda:N/sm=K`).

The driver cuts a card into groups of its own size (say 15 of 8 SMs) and a rest that fills no group (12). A
part is made of whole groups, and one part may take the rest as well: 32 is 4 groups, 100 is 11 and the rest.
What came out of a split cannot be split again, so there is one split for all parts. A part that cannot be had
exactly is refused with what can. A part lives as long as the process. Parts share the card's memory, caches
and bandwidth; they are a test bed for unlike devices and no way to make one card faster.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.errors import WorkerError
from tessera.execute.cuda import driver


@dataclass(frozen=True, slots=True)
class Partition:
    """Some SMs of one card."""

    ordinal: int
    num_sms: int
    context: ctypes.c_void_p

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A new stream whose kernels run on these SMs only, in a graph as well."""
        return driver.green_stream(self.ordinal, self.context, priority)


def cut(ordinal: int, sizes: Sequence[int]) -> list[Partition]:
    """Partitions of these sizes, in this order, that share no SM."""
    groups, rest = driver.split_sms(driver.all_sms(ordinal))
    pieces = [*groups, *([rest] if rest.num_sms else [])]
    chosen = divide([g.num_sms for g in groups], rest.num_sms, sizes, f"cuda:{ordinal}")
    return [
        Partition(ordinal, size, driver.green_context(ordinal, [pieces[i] for i in part]))
        for size, part in zip(sizes, chosen, strict=True)
    ]


def divide(groups: Sequence[int], rest: int, sizes: Sequence[int], place: str) -> list[tuple[int, ...]]:
    """For each size the pieces that make it up: indices of groups, and `len(groups)` for the rest."""
    whole = sum(groups) + rest
    if sum(sizes) > whole:
        message = f"parts of {', '.join(map(str, sizes))} SMs do not fit the {whole} of the card"
        raise WorkerError(message, "Give smaller parts.", place)
    each = groups[0] if groups else whole
    odd = [i for i, size in enumerate(sizes) if size % each]
    takes_rest = odd[0] if odd else _in_need_of_rest(groups, rest, sizes)
    found, used = [], 0
    for index, size in enumerate(sizes):
        needed = size - rest if index == takes_rest else size
        if needed < 0 or needed % each or used + needed // each > len(groups):
            raise WorkerError(
                f"the driver cannot cut parts of {', '.join(map(str, sizes))} SMs: it offers {len(groups)} "
                f"groups of {each} and {rest} more",
                f"Use multiples of {each}; one part may have {rest} more.",
                place,
            )
        taken = range(used, used + needed // each)
        used += needed // each
        found.append((*taken, *([len(groups)] if index == takes_rest else [])))
    return found


def _in_need_of_rest(groups: Sequence[int], rest: int, sizes: Sequence[int]) -> int | None:
    """The part that is made with the rest where groups alone are too few; the rest must fill groups then."""
    if rest == 0 or sum(sizes) <= sum(groups) or rest % groups[0]:
        return None
    return max(range(len(sizes)), key=lambda i: sizes[i])
