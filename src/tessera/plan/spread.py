"""Spread: kernel-level placements of a lane with interleaved microbatches and few crossings.

Each crossing is a wait that other microbatches must fill, so a placement that only balances busy times can
run at half of its bound. A coarse placement (attention-ffn) crosses rarely, but is not balanced. Segments of
its busiest device (consecutive launches between two crossings that touch no state) move to its least busy
one, in an order that is even over the step and the same for all step sizes, so that few weights are held
twice. The simulated rate decides how many; the bound by busy time excludes most numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tessera.ir import BufferKind, Costs, Graph, Placement, WorkUnit

Place = tuple[int, ...]
# Runs of one step per second.
StepRate = Callable[[int, Place], float]
Fits = Callable[[Placement], bool]


@dataclass(frozen=True)
class Spread:
    unit: WorkUnit
    costs: tuple[Costs, ...]
    rate: StepRate
    fits: Fits = lambda placement: True

    def best_of(self, placements: Iterable[Placement]) -> Placement:

        def seconds(steps: list[tuple[float, Place]]) -> float:
            return sum(num / rate for num, (rate, _) in zip(self.unit.counts, steps, strict=True))

        options = []
        for start in placements:
            best = [self._best(step, start) for step in range(len(start.devices))]
            if not self.fits(Placement(tuple(place for _, place in best))):  # weights held twice
                best = [(self.rate(step, place), place) for step, place in enumerate(start.devices)]
            options.append(best)
        return Placement(tuple(place for _, place in min(options, key=seconds)))

    def _best(self, step: int, start: Placement) -> tuple[float, Place]:
        busy_us, place = self.costs[step].busy_us, start.devices[step]
        variants = [place, *variants_of(self.unit.graphs[step], place, busy_us(place))]
        bounds = [(1e6 / max(busy_us(variant)), variant) for variant in variants]
        best = 0.0, place
        for bound, variant in sorted(bounds, reverse=True):
            if bound <= best[0]:
                break
            if self.fits(Placement((*start.devices[:step], variant, *start.devices[step + 1 :]))):
                best = max(best, (self.rate(step, variant), variant))
        return best


def variants_of(graph: Graph, place: Place, busy_us: Sequence[float]) -> Iterator[Place]:
    """Moves 1, 2, ... segments."""
    used = sorted(set(place), key=lambda device: busy_us[device])
    trace, least, busiest = graph.trace, used[0], used[-1]
    states = set(trace.buffers_of(BufferKind.STATE))
    bound = {n for n, x in enumerate(trace.launches) if any(a.buffer in states for a in x.accesses)}
    runs = [list(run) for device, run in groupby(range(len(place)), place.__getitem__) if device == busiest]
    segments = [run for run in runs if bound.isdisjoint(run)]
    moved = list(place)
    for number in even_order(len(segments)) if least != busiest else ():
        for launch in segments[number]:
            moved[launch] = least
        yield tuple(moved)


def even_order(num: int) -> list[int]:
    """The first numbers of any count are spread evenly: bits reversed."""
    bits = max(1, (num - 1).bit_length())
    return [n for n in (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)) if n < num]
