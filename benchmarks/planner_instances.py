"""Made-up planning instances: layers of several model families on devices of unlike strengths.

A family is a list of launches a layer: scope, what it reads (launches back), compute work, memory work,
relative size of what it makes. A device has a speed for either kind of work; a launch takes the larger of the
two times plus a constant, shaken by a few percent. Nothing here is measured on a GPU.
"""

from dataclasses import dataclass

import numpy as np

from tessera import ir

Row = tuple[str, tuple[int, ...], float, float, float]

DENSE: tuple[Row, ...] = (
    ("input_layernorm", (1,), 0.0, 0.1, 1.0),
    ("self_attn.q_proj", (1,), 1.0, 0.6, 1.0),
    ("self_attn.k_proj", (2,), 0.3, 0.2, 0.25),
    ("self_attn.v_proj", (3,), 0.3, 0.2, 0.25),
    ("self_attn.rotary", (3, 2), 0.0, 0.1, 1.2),
    ("self_attn.cache", (1, 2), 0.0, 0.1, 0.1),
    ("self_attn", (2, 1), 0.8, 1.8, 1.0),
    ("self_attn.o_proj", (1,), 1.0, 0.6, 1.0),
    ("residual", (1, 9), 0.0, 0.1, 1.0),
    ("post_attention_layernorm", (1,), 0.0, 0.1, 1.0),
    ("mlp.gate_proj", (1,), 2.5, 1.2, 3.5),
    ("mlp.up_proj", (2,), 2.5, 1.2, 3.5),
    ("mlp.act", (2, 1), 0.0, 0.3, 3.5),
    ("mlp.down_proj", (1,), 2.5, 1.2, 1.0),
    ("residual", (1, 6), 0.0, 0.1, 1.0),
)
MOE: tuple[Row, ...] = (
    *DENSE[:10],
    ("mlp.router", (1,), 0.1, 0.1, 0.05),
    *((f"mlp.experts.e{i}", (2 + i, 1 + i), 0.9 + 0.2 * i, 0.5, 0.5) for i in range(6)),
    ("mlp.combine", (6, 5, 4, 3, 2, 1), 0.0, 0.2, 1.0),
    ("residual", (1, 10), 0.0, 0.1, 1.0),
)
SSM: tuple[Row, ...] = (
    ("norm", (1,), 0.0, 0.1, 1.0),
    ("mixer.in_proj", (1,), 2.5, 1.2, 4.0),
    ("mixer.conv", (1,), 0.1, 0.4, 2.0),
    ("mixer.x_proj", (1,), 0.3, 0.2, 0.2),
    ("mixer", (2, 1), 0.5, 2.0, 2.0),
    ("mixer.gate", (1, 4), 0.0, 0.3, 2.0),
    ("mixer.out_proj", (1,), 1.5, 0.8, 1.0),
    ("residual", (1, 8), 0.0, 0.1, 1.0),
)
DIFFUSION: tuple[Row, ...] = (
    ("norm1", (2,), 0.0, 0.2, 1.0),
    ("norm1_context", (2,), 0.0, 0.05, 0.1),
    ("attn.qkv", (2,), 3.0, 1.0, 3.0),
    ("attn.qkv_context", (2,), 0.3, 0.2, 0.3),
    ("attn", (2, 1), 3.0, 1.0, 1.1),
    ("attn.out", (1,), 1.0, 0.5, 1.0),
    ("attn.out_context", (2,), 0.1, 0.1, 0.1),
    ("ff.up", (2,), 4.0, 1.5, 4.0),
    ("ff.up_context", (2,), 0.4, 0.2, 0.4),
    ("ff.down_context", (1,), 0.4, 0.2, 0.1),
    ("ff.down", (3,), 4.0, 1.5, 1.0),
    ("residual_context", (2, 11), 0.0, 0.05, 0.1),
    ("residual", (2, 13), 0.0, 0.2, 1.0),
)
FAMILIES = {"dense": DENSE, "moe": MOE, "ssm": SSM, "diffusion": DIFFUSION}
# Launches of a layer that share its state, by family.
STATE = {"dense": (5, 6), "moe": (5, 6), "ssm": (2, 4)}
# Steps: kind, runs, bytes of a value, microseconds of a unit of work, weight of memory work.
STEPS = {
    "diffusion": (("denoise", 28, 4 << 20, 100.0, 1.0),),
    "random": (("decode", 16, 1 << 20, 40.0, 1.0),),
}
SERVING = (("prefill", 1, 4 << 20, 100.0, 0.5), ("decode", 64, 256 << 10, 12.0, 2.0))
# (compute speed, memory speed) of each kind of device.
KINDS = ((1.0, 0.5), (0.45, 1.0), (0.9, 0.8), (0.3, 0.7), (0.6, 0.3), (0.5, 0.5), (0.8, 0.35), (0.25, 0.9))
LINKS = {"pcie4": (10.0, 25.0), "ib100": (15.0, 11.2), "nvlink": (13.0, 286.0)}

Case = tuple[ir.WorkUnit, tuple[ir.Costs, ...], ir.Cluster]


@dataclass(frozen=True, slots=True)
class Spec:
    """One instance."""

    family: str
    launches: int
    devices: int = 2
    kinds: int = 2
    link: str = "pcie4"
    seed: int = 0

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"{self.family}-{self.launches}-d{self.devices}k{self.kinds}-{self.link}-s{self.seed}"


def make_case(spec: Spec) -> Case:
    """About as many launches as asked for."""
    rng = np.random.default_rng(spec.seed)
    steps = STEPS.get(spec.family, SERVING)
    layer = _random_layer(rng) if spec.family == "random" else FAMILIES[spec.family]
    num_layers = max(2, spec.launches // (len(steps) * len(layer)))
    state = STATE.get(spec.family, ())
    graphs = tuple(_graph(layer, num_layers, state, kind, size) for kind, _, size, _, _ in steps)
    unit = ir.WorkUnit(graphs, tuple(runs for _, runs, _, _, _ in steps), spec.name)
    cluster = _cluster(spec)
    speeds = np.array([KINDS[i % spec.kinds] for i in range(spec.devices)])
    taste = rng.uniform(0.75, 1.25, (len(layer), spec.kinds))
    costs = []
    for graph, (_, _, _, unit_us, memory) in zip(graphs, steps, strict=True):
        work = np.array([[row[2], memory * row[3]] for row in layer])
        us = (
            unit_us
            * (work[:, None, :] / speeds[None]).max(axis=2)
            * taste[:, np.arange(spec.devices) % spec.kinds]
        )
        shaken = np.tile(us + 2.0, (num_layers, 1)) * rng.uniform(0.97, 1.03, (num_layers * len(layer), 1))
        rows = tuple(tuple(ir.Cost(x, ir.Source.FITTED, 0.1) for x in row) for row in shaken.tolist())
        costs.append(ir.Costs(graph.trace.digest, cluster.devices, rows))
    return unit, tuple(costs), cluster


def _random_layer(rng: np.random.Generator) -> tuple[Row, ...]:
    """Twenty launches that read one to three of the last eight."""
    rows: list[Row] = []
    for i in range(20):
        reads = tuple(sorted({int(x) for x in rng.integers(1, 9, rng.integers(1, 4))}))
        compute, memory = rng.uniform(0, 2, 2).tolist()
        rows.append((f"op{i}", reads, compute, memory, float(rng.uniform(0.1, 1.5))))
    return tuple(rows)


def _cluster(spec: Spec) -> ir.Cluster:
    latency, gbps = LINKS[spec.link]
    devices = tuple(
        ir.Device(f"emu:{i}", ir.DeviceKind.EMU, f"g{i % spec.kinds}", 1 << 45) for i in range(spec.devices)
    )
    links = tuple(
        ir.Link(a.name, b.name, spec.link, latency, gbps) for a in devices for b in devices if a != b
    )
    return ir.Cluster(devices, links)


def _graph(layer: tuple[Row, ...], num_layers: int, state: tuple[int, ...], kind: str, size: int) -> ir.Graph:
    """A step of repeated layers."""
    num = num_layers * len(layer)
    readers: list[list[int]] = [[] for _ in range(num)]
    for launch in range(num):
        for back in layer[launch % len(layer)][1]:
            if launch >= back:
                readers[launch - back].append(launch)
    sizes = [int(size * layer[i % len(layer)][4]) for i in range(num)]
    buffers = [ir.Buffer(f"t{i}", ir.BufferKind.TEMPORARY, n) for i, n in enumerate(sizes)]
    accesses = [[ir.Access(i, ir.Region(0, sizes[i]), write=True)] for i in range(num)]
    for producer, listed in enumerate(readers):
        for reader in listed:
            accesses[reader].append(ir.Access(producer, ir.Region(0, sizes[producer]), read=True))
    groups: list[tuple[int, ...]] = []
    for n in range(num_layers if state else 0):
        buffers.append(ir.Buffer(f"state{n}", ir.BufferKind.STATE, 8 << 20))
        groups.append(tuple(n * len(layer) + i for i in state))
        for launch in groups[-1]:
            accesses[launch].append(ir.Access(len(buffers) - 1, ir.Region(0, 8 << 20), read=True))
    names = [f"{i // len(layer)}.{layer[i % len(layer)][0]}" for i in range(num)]
    launches = tuple(
        ir.Launch(i % len(layer), (), (), (), tuple(accesses[i]), f"model.layers.{names[i]}")
        for i in range(num)
    )
    kernels = tuple(ir.Kernel(f"k{n}", ir.Origin.ATEN) for n in range(len(layer)))
    values = tuple(ir.Value(i, i, tuple(sorted(set(r))), 0, sizes[i]) for i, r in enumerate(readers))
    trace = ir.Trace(ir.Step("layered", kind, 1, 1024), kernels, tuple(buffers), launches, ())
    return ir.Graph(trace, (), values, tuple(groups))
