"""How long planning takes and how far from the bound it ends, on made-up layered models.

    python benchmarks/bench_planner.py [--sizes 200 1000 5000 20000] [--devices 2] [--json]

An instance is a decoder: repeated layers with attention state, residuals and a gated MLP, once as a
prefill and once as a decode step that repeats. Costs come from a seed: two unlike devices, each better
at some kernels, every layer's cost shaken by a few percent. Nothing here is measured on a GPU.

`build` is the time to make the arrays, `solve` the whole call (arrays, baselines, linear program,
checks of the finished plan), both with the traces' digests known, as they are after loading. `gap` is the
distance of throughput from its bound, `lat. gap` that of one request's time from its lower bound: each
means something only under its own objective.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tessera import ir
from tessera.plan import PlanConfig, solve
from tessera.plan.latency import Clock, bound_us
from tessera.plan.problem import build

# Per launch of a layer: scope, what it reads (offsets back to its producers), relative work, bytes out.
LAYER: tuple[tuple[str, tuple[int, ...], float, float], ...] = (
    ("input_layernorm", (1,), 0.1, 1.0),
    ("self_attn.q_proj", (1,), 1.0, 1.0),
    ("self_attn.k_proj", (2,), 0.3, 0.25),
    ("self_attn.v_proj", (3,), 0.3, 0.25),
    ("self_attn.rotary", (3, 2), 0.1, 1.2),
    ("self_attn.cache", (1, 2), 0.1, 0.1),
    ("self_attn", (2, 1), 1.5, 1.0),
    ("self_attn.o_proj", (1,), 1.0, 1.0),
    ("residual", (1, 9), 0.1, 1.0),
    ("post_attention_layernorm", (1,), 0.1, 1.0),
    ("mlp.gate_proj", (1,), 2.5, 3.5),
    ("mlp.up_proj", (2,), 2.5, 3.5),
    ("mlp.act", (2, 1), 0.3, 3.5),
    ("mlp.down_proj", (1,), 2.5, 1.0),
    ("residual", (1, 6), 0.1, 1.0),
)
ATTENTION = 6
WIDTH_BYTES = {"prefill": 8 << 20, "decode": 256 << 10}


@dataclass(frozen=True, slots=True)
class Row:
    """One instance."""

    launches: int
    devices: int
    objective: str
    build_s: float
    solve_s: float
    throughput_per_s: float
    bound_per_s: float
    gap: float
    lanes: int
    best_baseline: str
    gain: float
    latency_us: float
    # How far one request's time is above its lower bound, as a fraction of it.
    latency_gap: float


def make_graph(num_layers: int, kind: str) -> ir.Graph:
    """A decoder step of repeated layers."""
    size = WIDTH_BYTES[kind]
    num = num_layers * len(LAYER)
    readers: list[list[int]] = [[] for _ in range(num)]
    for launch in range(num):
        for back in LAYER[launch % len(LAYER)][1]:
            if launch >= back:
                readers[launch - back].append(launch)
    sizes = [int(size * LAYER[i % len(LAYER)][3]) for i in range(num)]
    buffers = [ir.Buffer(f"t{i}", ir.BufferKind.TEMPORARY, n) for i, n in enumerate(sizes)]
    buffers += [ir.Buffer(f"kv{n}", ir.BufferKind.STATE, 32 << 20) for n in range(num_layers)]
    accesses = [[ir.Access(i, ir.Region(0, sizes[i]), write=True)] for i in range(num)]
    for producer, listed in enumerate(readers):
        for reader in listed:
            accesses[reader].append(ir.Access(producer, ir.Region(0, sizes[producer]), read=True))
    groups = tuple((n * len(LAYER) + ATTENTION - 1, n * len(LAYER) + ATTENTION) for n in range(num_layers))
    for layer, group in enumerate(groups):
        for launch in group:
            accesses[launch].append(ir.Access(num + layer, ir.Region(0, 32 << 20), read=True))
    kernels = tuple(ir.Kernel(f"k{n}", ir.Origin.ATEN) for n in range(len(LAYER)))
    launches = tuple(ir.Launch(i % len(LAYER), (), (), (), tuple(accesses[i]), _scope(i)) for i in range(num))
    values = tuple(ir.Value(i, i, tuple(sorted(set(r))), 0, sizes[i]) for i, r in enumerate(readers))
    trace = ir.Trace(ir.Step("layered", kind, 1, 1024), kernels, tuple(buffers), launches, ())
    return ir.Graph(trace, (), values, groups)


def _scope(launch: int) -> str:
    return f"model.layers.{launch // len(LAYER)}.{LAYER[launch % len(LAYER)][0]}"


def make_case(
    num_launches: int, num_devices: int, seed: int = 0
) -> tuple[ir.WorkUnit, tuple[ir.Costs, ...], ir.Cluster]:
    """About as many launches as asked for, half of them prefill."""
    rng = np.random.default_rng(seed)
    num_layers = max(2, num_launches // (2 * len(LAYER)))
    unit = ir.WorkUnit(tuple(make_graph(num_layers, kind) for kind in WIDTH_BYTES), (1, 64), "layered")
    devices = tuple(ir.Device(f"emu:{i}", ir.DeviceKind.EMU, f"g{i}", 1 << 45) for i in range(num_devices))
    links = tuple(ir.Link(a.name, b.name, "pcie4", 10.0, 22.0) for a in devices for b in devices if a != b)
    cluster = ir.Cluster(devices, links)
    work = np.array([x[2] for x in LAYER])
    costs = []
    for graph, scale in zip(unit.graphs, (300.0, 12.0), strict=True):
        per_kernel = scale * work[:, None] * rng.uniform(0.5, 1.5, (len(LAYER), num_devices)) + 2.0
        shaken = np.tile(per_kernel, (num_layers, 1)) * rng.uniform(
            0.97, 1.03, (len(graph.values), num_devices)
        )
        rows = tuple(tuple(ir.Cost(x, ir.Source.FITTED, 0.1) for x in row) for row in shaken.tolist())
        costs.append(ir.Costs(graph.trace.digest, devices, rows))
    return unit, tuple(costs), cluster


def measure(num_launches: int, num_devices: int, objective: ir.Objective) -> Row:
    """Plans one instance."""
    unit, costs, cluster = make_case(num_launches, num_devices)
    start = time.perf_counter()
    problem = build(unit, costs, cluster)
    built = time.perf_counter()
    plan = solve(unit, costs, cluster, PlanConfig(objective))
    stop = time.perf_counter()
    name, rate = max(
        ((b.name, b.throughput_per_s) for b in plan.baselines if b.throughput_per_s), key=lambda x: x[1]
    )
    return Row(
        unit.num_launches,
        num_devices,
        objective.value,
        round(built - start, 3),
        round(stop - built, 3),
        plan.throughput_per_s,
        plan.bound_per_s,
        plan.gap,
        len(plan.lanes),
        name,
        plan.throughput_per_s / rate,
        plan.latency_us,
        plan.latency_us / bound_us(problem, Clock(problem)) - 1.0,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 1000, 5000, 20000])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--objective", choices=[o.value for o in ir.Objective], default="throughput")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = [measure(n, args.devices, ir.Objective(args.objective)) for n in args.sizes]
    if args.json:
        print(json.dumps([asdict(r) for r in rows], indent=2))
        return
    heads = ("launches", "devices", "build s", "solve s", "gap", "lanes", "lat. gap")
    print(" ".join(f"{h:>9}" for h in heads), " gain over")
    for r in rows:
        cells = (r.launches, r.devices, f"{r.build_s:.3f}", f"{r.solve_s:.3f}", f"{r.gap:.3%}", r.lanes)
        shown = " ".join(f"{c:>9}" for c in (*cells, f"{r.latency_gap:.2%}"))
        print(f"{shown}  {r.gain:.3f} x {r.best_baseline}")


if __name__ == "__main__":
    main()
