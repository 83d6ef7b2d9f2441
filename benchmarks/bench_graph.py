"""How long the dependency graph of a trace takes, and how that grows with the number of launches.

    python benchmarks/bench_graph.py [TRACE ...] [--sizes 1000 3000 10000 30000] [--json]

Made-up traces, each with about as many launches as asked for:
  layers   a decoder: weights, activations, residuals, in-place updates, state, a mask that everybody reads
  slices   one cache filled by as many disjoint rows as there are launches, read as a whole now and then
  columns  the same with columns, whose byte ranges interleave
  loop     a row written and all rows read in turn, each read before the next write
  readers  one buffer written a few times and read by all others
Traces given by name (from `tessera capture`) are measured beside them. `growth` is the time per launch
against the smallest size of the same shape: 1.0 is linear. `MB` is the peak of memory while building.
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tessera import ir
from tessera.analyze import build_graph

# What the issue asks for: this many launches in this time on one core.
LIMIT_LAUNCHES, LIMIT_S = 30_000, 5.0

WIDTH = 1 << 14
Touch = tuple[int, ir.Region, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One trace."""

    shape: str
    launches: int
    accesses: int
    edges: int
    seconds: float
    growth: float
    peak_mb: float


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="traces from `tessera capture`")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1_000, 3_000, 10_000, 30_000])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args()
    rows = []
    for shape, make in SHAPES.items():
        first: Row | None = None
        for size in options.sizes:
            row = measure(shape, make(size), first)
            first = first or row
            rows.append(row)
    rows += [measure(path.name, ir.load(ir.Trace, path), None) for path in options.traces]
    print_json(rows) if options.json else print_table(rows)


def measure(shape: str, trace: ir.Trace, first: Row | None) -> Row:
    """The better of two runs, and the memory of a third."""
    best = min(timed(trace) for _ in range(2))
    tracemalloc.start()
    graph = build_graph(trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    num = len(trace.launches)
    growth = best / num / (first.seconds / first.launches) if first else 1.0
    accesses = sum(len(x.accesses) for x in trace.launches)
    return Row(shape, num, accesses, len(graph.edges), best, growth, peak / 1e6)


def timed(trace: ir.Trace) -> float:
    """Seconds of one build, by the time this process computed: other work on the machine does not count."""
    started = time.process_time()
    build_graph(trace)
    return time.process_time() - started


def layers(num: int) -> ir.Trace:
    """Repeated layers of fifteen launches."""
    made = Made()
    whole = ir.Region(0, WIDTH)
    half, rest = ir.Region(0, 64, ((WIDTH // 128, 128),)), ir.Region(64, 64, ((WIDTH // 128, 128),))
    mask = made.launch([], ir.BufferKind.TEMPORARY)
    stream = made.launch([(made.buffer(ir.BufferKind.INPUT), whole, "r")])
    shared = made.buffer(ir.BufferKind.WEIGHT)
    while made.num_launches < num:
        weights = [(made.buffer(ir.BufferKind.WEIGHT), whole, "r"), (shared, whole, "r")]
        cache = made.buffer(ir.BufferKind.STATE)
        normed = made.launch([(stream, whole, "r"), *weights])
        query, key, value = (made.launch([(normed, whole, "r"), *weights]) for _ in range(3))
        made.launch([(query, half, "rw"), (mask, whole, "r")], None)
        made.launch([(query, rest, "rw"), (mask, whole, "r")], None)
        made.launch([(cache, half, "rw"), (key, whole, "r")], None)
        made.launch([(cache, rest, "rw"), (value, whole, "r")], None)
        seen = made.launch([(query, whole, "r"), (cache, whole, "r"), (mask, whole, "r")])
        out = made.launch([(seen, whole, "r"), *weights])
        stream = made.launch([(stream, whole, "r"), (out, whole, "r")])
        gate, up = (made.launch([(stream, whole, "r"), *weights]) for _ in range(2))
        made.launch([(gate, whole, "rw"), (up, whole, "r")], None)
        made.launch([(stream, whole, "rw"), (gate, whole, "r")], None)
    return made.trace()


def slices(num: int) -> ir.Trace:
    """Row after row of one cache."""
    return cache_of(num, lambda i: ir.Region(i * 256, 256))


def columns(num: int) -> ir.Trace:
    """Column after column of one cache of 64 rows."""
    return cache_of(num, lambda i: ir.Region(i * 4, 4, ((64, num * 4),)))


def cache_of(num: int, part: Callable[[int], ir.Region]) -> ir.Trace:
    """Every launch writes its own part of one cache; eight read all of it."""
    made = Made(size_bytes=num * 256)
    cache = made.buffer(ir.BufferKind.STATE)
    for i in range(num):
        made.launch([(cache, part(i), "w")], None)
        if i % max(1, num // 8) == 1:
            made.launch([(cache, ir.Region(0, num * 256), "r")])
    return made.trace()


def loop(num: int) -> ir.Trace:
    """Token after token: write the next row of one cache, read all of it, go on with what was read."""
    made = Made(size_bytes=num * 128)
    cache, whole = made.buffer(ir.BufferKind.STATE), ir.Region(0, num * 128)
    last = made.launch([])
    for i in range(num // 2):
        made.launch([(cache, ir.Region(i * 256, 256), "w"), (last, whole, "r")], None)
        last = made.launch([(cache, whole, "r")])
    return made.trace()


def readers(num: int) -> ir.Trace:
    """One table rewritten ten times, read by everybody in between."""
    made = Made()
    table, whole = made.buffer(ir.BufferKind.STATE), ir.Region(0, WIDTH)
    for i in range(num):
        if i % (num // 10) == 0:
            made.launch([(table, whole, "rw")], None)
        else:
            made.launch([(table, whole, "r")])
    return made.trace()


class Made:
    """A trace in the making."""

    def __init__(self, size_bytes: int = WIDTH) -> None:
        self._size_bytes = size_bytes
        self._buffers: list[ir.Buffer] = []
        self._launches: list[ir.Launch] = []

    @property
    def num_launches(self) -> int:
        """Launches so far."""
        return len(self._launches)

    def buffer(self, kind: ir.BufferKind) -> int:
        """A new buffer's number."""
        self._buffers.append(ir.Buffer(f"b{len(self._buffers)}", kind, self._size_bytes))
        return len(self._buffers) - 1

    def launch(self, touches: Sequence[Touch], makes: ir.BufferKind | None = ir.BufferKind.TEMPORARY) -> int:
        """A launch; returns the buffer it makes, or its first argument."""
        accesses = [ir.Access(b, r, read="r" in how, write="w" in how) for b, r, how in touches]
        made = self.buffer(makes) if makes else touches[0][0]
        if makes:
            accesses.append(ir.Access(made, ir.Region(0, self._size_bytes), write=True))
        self._launches.append(ir.Launch(0, (), (), (), tuple(accesses)))
        return made

    def trace(self) -> ir.Trace:
        """The finished trace."""
        kernel = ir.Kernel("aten.made.default", ir.Origin.ATEN)
        step = ir.Step("made", "decode", 1, 1)
        return ir.Trace(step, (kernel,), tuple(self._buffers), tuple(self._launches), ())


SHAPES: dict[str, Callable[[int], ir.Trace]] = {
    "layers": layers,
    "slices": slices,
    "columns": columns,
    "loop": loop,
    "readers": readers,
}


def print_json(rows: list[Row]) -> None:
    """For machines."""
    large = [r for r in rows if r.launches >= LIMIT_LAUNCHES]
    within = all(r.seconds * LIMIT_LAUNCHES / r.launches <= LIMIT_S for r in large) if large else None
    print(json.dumps({"rows": [asdict(r) for r in rows], "limit_s": LIMIT_S, "within": within}, indent=2))


def print_table(rows: list[Row]) -> None:
    """For people."""
    heads = ("shape", "launches", "accesses", "edges", "seconds", "growth", "MB")
    print(f"{heads[0]:24}" + "".join(f"{head:>10}" for head in heads[1:]))
    for r in rows:
        counts = f"{r.launches:10,}{r.accesses:10,}{r.edges:10,}"
        print(f"{r.shape[:24]:24}{counts}{r.seconds:10.3f}{r.growth:10.2f}{r.peak_mb:10.1f}")


if __name__ == "__main__":
    main()
