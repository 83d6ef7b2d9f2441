"""A small language model's plan and a run of it, made by hand from ir records."""

from tessera.ir import (
    Access,
    Baseline,
    Buffer,
    BufferKind,
    Clock,
    Cluster,
    Cost,
    Costs,
    Device,
    DeviceKind,
    Edge,
    Graph,
    Hazard,
    Kernel,
    Lane,
    Launch,
    Link,
    Objective,
    Origin,
    Placement,
    Plan,
    Source,
    Span,
    Step,
    Timeline,
    Trace,
    Value,
    WorkUnit,
    region,
)

A100, L40S = 0, 1
VALUE_BYTES = 65_536
WEIGHT_BYTES = 1_000_000

# (child module, kernel, time on the A100, time on the L40S)
LAYER = (
    ("input_layernorm", "aten.rms_norm.default", 3.0, 2.0),
    ("self_attn.q_proj", "aten.mm.default", 20.0, 34.0),
    ("self_attn.k_proj", "aten.mm.default", 9.0, 15.0),
    ("self_attn.v_proj", "aten.mm.default", 9.0, 15.0),
    ("self_attn", "aten.mul.Tensor", 2.0, 1.5),
    ("self_attn", "aten.add.Tensor", 2.0, 1.5),
    ("self_attn", "aten._scaled_dot_product_flash_attention.default", 30.0, 58.0),
    ("self_attn.o_proj", "aten.mm.default", 20.0, 34.0),
    ("", "aten.add.Tensor", 2.0, 1.5),
    ("post_attention_layernorm", "aten.rms_norm.default", 3.0, 2.0),
    ("mlp.gate_proj", "aten.mm.default", 48.0, 52.0),
    ("mlp.act_fn", "aten.silu.default", 4.0, 2.5),
    ("mlp.up_proj", "aten.mm.default", 48.0, 52.0),
    ("mlp", "aten.mul.Tensor", 4.0, 2.5),
    ("mlp.down_proj", "aten.mm.default", 48.0, 52.0),
    ("", "aten.add.Tensor", 2.0, 1.5),
)
EMBED = ("model.embed_tokens", "aten.embedding.default", 5.0, 4.0)
HEAD = ("lm_head", "aten.mm.default", 90.0, 110.0)

Work = tuple[tuple[str, str, float, float], ...]


def make_work(layers: int = 4) -> Work:
    """Scope, kernel and times of every launch of a model with equal layers."""
    stem = "model.layers"
    middle = [
        (f"{stem}.{n}.{child}".rstrip("."), kernel, a, b)
        for n in range(layers)
        for child, kernel, a, b in LAYER
    ]
    return (EMBED, *middle, HEAD)


def make_graph(kind: str = "decode", work: Work | None = None, immovable: str = "") -> Graph:
    """A chain: every launch reads the value before it and one weight of its own."""
    work = work if work is not None else make_work()
    names = sorted({kernel for _, kernel, _, _ in work})
    kernels = tuple(Kernel(name, Origin.ATEN) for name in names)
    size = len(work)
    buffers = (
        *(Buffer(f"w{n}", BufferKind.WEIGHT, WEIGHT_BYTES) for n in range(size)),
        *(Buffer(f"t{n}", BufferKind.TEMPORARY, VALUE_BYTES) for n in range(size)),
    )
    whole_weight, whole_value = region(0, WEIGHT_BYTES, ()), region(0, VALUE_BYTES, ())
    assert whole_weight is not None
    assert whole_value is not None
    launches = []
    for n, (scope, kernel, _, _) in enumerate(work):
        reads = [Access(n, whole_weight, read=True)]
        reads += [Access(size + n - 1, whole_value, read=True)] if n else []
        accesses = (*reads, Access(size + n, whole_value, write=True))
        reason = immovable if n == 0 else ""
        launches.append(Launch(names.index(kernel), (), (), (), accesses, scope, immovable=reason))
    values = [Value(size + n, n, (n + 1,) if n + 1 < size else (), 0, VALUE_BYTES) for n in range(size)]
    edges = tuple(Edge(n, n + 1, Hazard.RAW, size + n) for n in range(size - 1))
    trace = Trace(Step("tiny-llama", kind, 8, 512), kernels, buffers, tuple(launches), (), num_views=7)
    return Graph(trace, edges, tuple(values), ())


def make_cluster(names: tuple[str, str] = ("emu:a100", "emu:l40s")) -> Cluster:
    """Two unlike devices joined by PCIe."""
    gpus = ("a100", "l40s")
    devices = tuple(Device(n, DeviceKind.EMU, g, 48 * 10**9) for n, g in zip(names, gpus, strict=True))
    links = tuple(Link(a, b, "pcie4", 10.0, 24.0) for a, b in (names, names[::-1]))
    return Cluster(devices, links)


def make_costs(graph: Graph, cluster: Cluster, work: Work) -> Costs:
    """The prices that the work states."""
    rows = tuple((Cost(a, Source.FITTED, 0.1), Cost(b, Source.FITTED, 0.1)) for _, _, a, b in work)
    return Costs(graph.trace.digest, cluster.devices, rows)


def attention_on_a100(work: Work) -> tuple[int, ...]:
    """Attention on the first device, everything else on the second."""
    return tuple(A100 if "self_attn" in scope else L40S for scope, *_ in work)


def make_plan(
    *,
    work: Work | None = None,
    cluster: Cluster | None = None,
    objective: Objective = Objective.THROUGHPUT,
    throughput_per_s: float = 53.1,
    best_baseline: str = "data-parallel",
    immovable: str = "",
) -> Plan:
    """Two lanes: three quarters split between the devices, one quarter all on the first."""
    work = work if work is not None else make_work()
    cluster = cluster or make_cluster()
    graphs = tuple(make_graph(kind, work, immovable) for kind in ("prefill", "decode"))
    split, whole = attention_on_a100(work), (A100,) * len(work)
    return Plan(
        unit=WorkUnit(graphs, (1, 32)),
        cluster=cluster,
        costs=tuple(make_costs(g, cluster, work) for g in graphs),
        objective=objective,
        policy=str(objective),
        lanes=(Lane(Placement((whole, split)), 39.825), Lane(Placement((whole, whole)), 13.275)),
        microbatches=6,
        throughput_per_s=throughput_per_s,
        simulated_per_s=0.97 * throughput_per_s,
        bound_per_s=54.0,
        latency_us=41_000.0,
        baselines=(
            Baseline("best single GPU", 27.5, 36_000.0),
            Baseline(best_baseline, 45.0, 38_000.0),
            Baseline("prefill/decode split", 32.0, 39_000.0),
            Baseline("attention/FFN split", 37.8, 47_000.0),
            Baseline("layer pipeline", None, None),
        ),
    )


def make_timeline(plan: Plan, requests: int = 6, steps: int = 2, clock: Clock = Clock.SIMULATED) -> Timeline:
    """Requests run along the first lane's decode placement, each device and link serving in turn."""
    names = plan.cluster.names
    graph, costs = plan.unit.graphs[1], plan.costs[1]
    devices = plan.lanes[0].placement.devices[1]
    free = dict.fromkeys([*names, *(f"{x.src} -> {x.dst}" for x in plan.cluster.links)], 0.0)
    ready = [0.0] * requests
    spans: list[Span] = []
    for n in range(steps * len(devices)):
        launch = n % len(devices)
        device = devices[launch]
        name, before = names[device], names[devices[launch - 1]]
        for r in range(requests):
            if name != before and n:
                wire = f"{before} -> {name}"
                start = max(ready[r], free[wire])
                ready[r] = free[wire] = start + 12.0
                spans.append(Span(wire, f"t{launch - 1}", r, r, start, ready[r], is_transfer=True))
            start = max(ready[r], free[name])
            ready[r] = free[name] = start + costs.us(launch, device)
            label = graph.trace.kernel_of(launch).name
            spans.append(Span(name, label, r, r, start, ready[r]))
    spans.sort(key=lambda s: s.start_us)
    return Timeline(clock, tuple(spans), tuple((r, 0.0, stop) for r, stop in enumerate(ready)))
