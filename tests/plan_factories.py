"""Small made-up work units, clusters and prices for the planner's tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tessera import ir
from tessera.plan.arrays import Labels
from tessera.plan.pricing.pricer import Prices
from tessera.plan.problem import Problem

MiB = 1 << 20
# Producer, readers, bytes.
Flow = tuple[int, tuple[int, ...], int]
# Name -> (launches that touch it, bytes).
Named = dict[str, tuple[tuple[int, ...], int]]


@dataclass
class Draft:
    """One step to be built."""

    num: int
    flows: Sequence[Flow] = ()
    states: Named = field(default_factory=dict)
    weights: Named = field(default_factory=dict)
    scopes: Sequence[str] = ()
    names: Sequence[str] = ()
    immovable: Sequence[int] = ()
    kind: str = "decode"


def make_graph(draft: Draft) -> ir.Graph:
    """The graph of a draft: one buffer per flow, groups by shared state."""
    buffers: list[ir.Buffer] = []
    touched: list[list[ir.Access]] = [[] for _ in range(draft.num)]

    def add(
        name: str, kind: ir.BufferKind, size: int, readers: Sequence[int], writers: Sequence[int]
    ) -> None:
        buffers.append(ir.Buffer(name, kind, size))
        whole = ir.Region(0, size)
        for launch in readers:
            touched[launch].append(ir.Access(len(buffers) - 1, whole, read=True))
        for launch in writers:
            touched[launch].append(ir.Access(len(buffers) - 1, whole, write=True))

    for n, (producer, readers, size) in enumerate(draft.flows):
        add(f"t{n}", ir.BufferKind.TEMPORARY, size, readers, (producer,))
    for name, (launches, size) in draft.states.items():
        add(name, ir.BufferKind.STATE, size, launches, ())
    for name, (launches, size) in draft.weights.items():
        add(name, ir.BufferKind.WEIGHT, size, launches, ())
    names = draft.names or ["k"] * draft.num
    kernels = tuple(ir.Kernel(x, ir.Origin.ATEN) for x in sorted(set(names)))
    index = {k.name: i for i, k in enumerate(kernels)}
    runs = tuple(
        ir.Launch(
            kernel=index[names[i]],
            args=(),
            kwargs=(),
            outputs=(),
            accesses=tuple(touched[i]),
            scope=draft.scopes[i] if draft.scopes else "",
            immovable="it prints" if i in draft.immovable else "",
        )
        for i in range(draft.num)
    )
    step = ir.Step("made-up", draft.kind, 1, 16)
    trace = ir.Trace(step, kernels, tuple(buffers), runs, ())
    values = tuple(ir.Value(n, p, tuple(r), 0, size) for n, (p, r, size) in enumerate(draft.flows))
    groups = _merge([launches for launches, _ in draft.states.values()])
    return ir.Graph(trace, (), values, groups)


def _merge(sets: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    merged: list[set[int]] = []
    for item in sets:
        mine = set(item)
        for other in [m for m in merged if m & mine]:
            merged.remove(other)
            mine |= other
        merged.append(mine)
    return tuple(tuple(sorted(m)) for m in merged)


def make_unit(*drafts: Draft, counts: Sequence[int] = ()) -> ir.WorkUnit:
    """A unit of drafted steps."""
    return ir.WorkUnit(tuple(make_graph(d) for d in drafts), tuple(counts) or (1,) * len(drafts), "made-up")


def chain(num: int, sizes: Sequence[int] | int = MiB) -> Draft:
    """Every launch reads what the one before it made."""
    listed = [sizes] * (num - 1) if isinstance(sizes, int) else sizes
    return Draft(num, [(i, (i + 1,), size) for i, size in enumerate(listed)])


def make_cluster(
    num: int = 2, gbps: float = 25.0, latency_us: float = 5.0, memory: Sequence[int] | int = 1 << 40
) -> ir.Cluster:
    """Fully joined devices d0, d1, ..."""
    sizes = [memory] * num if isinstance(memory, int) else memory
    devices = tuple(ir.Device(f"d{i}", ir.DeviceKind.EMU, "g", sizes[i]) for i in range(num))
    links = tuple(
        ir.Link(a.name, b.name, "wire", latency_us, gbps) for a in devices for b in devices if a != b
    )
    return ir.Cluster(devices, links)


def make_costs(
    unit: ir.WorkUnit, cluster: ir.Cluster, us: Sequence[Sequence[Sequence[float]]], rel_error: float = 0.0
) -> tuple[ir.Costs, ...]:
    """us[step][launch][device]."""
    return tuple(
        ir.Costs(
            graph.trace.digest,
            cluster.devices,
            tuple(tuple(ir.Cost(x, ir.Source.FITTED, rel_error) for x in row) for row in rows),
        )
        for graph, rows in zip(unit.graphs, us, strict=True)
    )


def random_case(
    seed: int, num: int = 7, devices: int = 2, steps: int = 2
) -> tuple[ir.WorkUnit, tuple[ir.Costs, ...], ir.Cluster]:
    """A small random work unit: fan-outs, shared state that joins the steps, unlike costs."""
    rng = np.random.default_rng(seed)
    drafts = []
    for step in range(steps):
        flows: list[Flow] = []
        for i in range(num - 1):
            later = rng.permutation(np.arange(i + 1, num))[: rng.integers(1, 4)]
            flows.append((i, tuple(sorted(int(x) for x in later)), int(rng.integers(1, 400_000))))
        kv = tuple(sorted(int(x) for x in rng.permutation(num)[:2]))
        drafts.append(Draft(num, flows, states={"kv": (kv, 50_000)}, kind=("prefill", "decode")[step % 2]))
    unit = make_unit(*drafts, counts=[1 + 2 * (s % 2) for s in range(steps)])
    cluster = make_cluster(devices, gbps=float(rng.uniform(5, 50)), latency_us=float(rng.uniform(0, 8)))
    us = rng.uniform(1, 40, (steps, num, devices)).tolist()
    return unit, make_costs(unit, cluster, us), cluster


def layered(
    num_layers: int, steps: Sequence[str] = ("prefill", "decode"), counts: Sequence[int] = (1, 8)
) -> ir.WorkUnit:
    """A decoder-like model: per layer norm, qkv, attention (state), out, norm, up, down, with residuals."""
    return make_unit(*(_layered_step(num_layers, kind) for kind in steps), counts=counts)


PER_LAYER = ("norm", "qkv", "attention", "out", "up", "down")


def _layered_step(num_layers: int, kind: str) -> Draft:
    flows: list[Flow] = []
    scopes: list[str] = []
    names: list[str] = []
    states: Named = {}
    weights: Named = {}
    size = 4 * MiB if kind == "prefill" else 64 * 1024
    width = len(PER_LAYER)
    for layer in range(num_layers):
        base = layer * width
        flows += [(base + j, (base + j + 1,), size) for j in range(2)]
        flows.append((base + 2, (base + 3,), size))
        flows.append((base + 3, (base + 4, base + 5), size))
        flows.append((base + 4, (base + 5,), 3 * size))
        if layer + 1 < num_layers:
            flows.append((base + 5, (base + width, base + width + 3), size))
        inner = ["norm", "attn.qkv", "attn", "attn.out", "mlp.up", "mlp.down"]
        scopes += [f"model.layers.{layer}.{x}" for x in inner]
        names += PER_LAYER
        states[f"kv{layer}"] = ((base + 2,), 8 * MiB)
        weights |= {f"w{layer}.{j}": ((base + j,), 16 * MiB) for j in (1, 3, 4, 5)}
    return Draft(num_layers * width, flows, states, weights, scopes, names, kind=kind)


def layered_case(
    num_layers: int = 4, gbps: float = 25.0, memory: Sequence[int] | int = 1 << 40, rel_error: float = 0.0
) -> tuple[ir.WorkUnit, tuple[ir.Costs, ...], ir.Cluster]:
    """Device 0 is good at attention, device 1 at the rest."""
    unit = layered(num_layers)
    cluster = make_cluster(2, gbps=gbps, memory=memory)
    prefill = {"norm": (20, 18), "qkv": (200, 120), "attention": (90, 300), "out": (150, 90)}
    prefill |= {"up": (500, 300), "down": (400, 260)}
    decode = {"norm": (3, 3), "qkv": (20, 14), "attention": (30, 70), "out": (12, 9)}
    decode |= {"up": (45, 30), "down": (40, 26)}
    us = [
        [list(map(float, table[x])) for _ in range(num_layers) for x in PER_LAYER]
        for table in (prefill, decode)
    ]
    return unit, make_costs(unit, cluster, us, rel_error), cluster


@dataclass(frozen=True)
class Told:
    """A simulator that says what it is told to."""

    per_s: Callable[[ir.Plan], float]

    def __call__(self, plan: ir.Plan) -> float:
        return self.per_s(plan)

    quick = settled = __call__


def priced(problem: Problem, prices: Prices, labels: Labels) -> float:
    """Cost of a placement."""
    node_us = problem.load_us[np.arange(problem.num_nodes), labels]
    cost = float(((prices.device + prices.path)[labels] * node_us).sum())
    move = prices.link * problem.wire_us + prices.path * problem.transfer_us
    cost += float(move[problem.crossings(labels)].sum())
    if prices.memory is not None:
        held = problem.resident(prices.microbatches).bytes_on(labels, problem.num_devices)
        cost += float(prices.memory @ held)
    return cost
