"""Small records for tests: say what matters, the rest has a default."""

from collections.abc import Sequence

from tessera.analyze import build_graph
from tessera.ir import (
    Access,
    Buffer,
    BufferKind,
    Cluster,
    Cost,
    Costs,
    Device,
    DeviceKind,
    Kernel,
    Lane,
    Launch,
    Link,
    Objective,
    Origin,
    Placement,
    Plan,
    Region,
    Source,
    Step,
    Trace,
    WorkUnit,
    verify,
)

# (buffer, start, stop, "r" / "w" / "rw")
Touch = tuple[int, int, int, str]


def make_access(touch: Touch) -> Access:
    """An access of a dense range."""
    buffer, start, stop, mode = touch
    return Access(buffer, Region(start, stop - start), "r" in mode, "w" in mode, "a" in mode)


def make_trace(
    launches: Sequence[Sequence[Touch]],
    kinds: dict[int, BufferKind] | None = None,
    size_bytes: int = 64,
    kind: str = "decode",
) -> Trace:
    """A trace whose launches touch the given ranges; buffers not named in `kinds` are temporaries."""
    kinds = kinds or {}
    num = 1 + max(touch[0] for launch in launches for touch in launch)
    buffers = tuple(Buffer(f"b{i}", kinds.get(i, BufferKind.TEMPORARY), size_bytes) for i in range(num))
    kernel = Kernel("aten.test.default", Origin.ATEN, "test() -> ()")
    made = tuple(Launch(0, (), (), (), tuple(make_access(t) for t in launch)) for launch in launches)
    return Trace(Step("made", kind, 1, 8), (kernel,), buffers, made, ())


def make_chain(num_launches: int, size_bytes: int = 64) -> Trace:
    """Launch i reads buffer i and writes buffer i + 1."""
    touches = [[(i, 0, size_bytes, "r"), (i + 1, 0, size_bytes, "w")] for i in range(num_launches)]
    return make_trace(touches, {0: BufferKind.INPUT}, size_bytes)


def make_cluster(num: int = 2, latency_us: float = 1.0, gbps: float = 1.0) -> Cluster:
    """Devices d0, d1, ... joined by equal links."""
    devices = tuple(Device(f"d{i}", DeviceKind.EMU, "a100", 1 << 40) for i in range(num))
    links = tuple(
        Link(a.name, b.name, "wire", latency_us, gbps) for a in devices for b in devices if a is not b
    )
    return Cluster(devices, links)


def make_plan(
    traces: Sequence[Trace],
    placements: Sequence[Sequence[Sequence[int]]],
    counts: Sequence[int] | None = None,
    cluster: Cluster | None = None,
    us: float = 10.0,
    microbatches: int = 2,
) -> Plan:
    """A plan with one lane per placement, all at the same rate, every launch at the same cost."""
    cluster = cluster or make_cluster()
    unit = WorkUnit(tuple(build_graph(t) for t in traces), tuple(counts or [1] * len(traces)))
    costs = tuple(
        Costs(
            t.digest,
            cluster.devices,
            tuple((Cost(us, Source.FITTED, 0.1),) * len(cluster.devices) for _ in t.launches),
        )
        for t in traces
    )
    lanes = tuple(Lane(Placement(tuple(tuple(s) for s in p)), 1.0) for p in placements)
    plan = Plan(unit, cluster, costs, Objective.THROUGHPUT, "made", lanes, microbatches, 1.0, 1.0, 1.0, 1.0)
    verify(plan)
    return plan
