"""Decode steps of one model: captured by Tessera, compiled by torch; their attention. See gpu_serve.py."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.gpu_capture import _build, as_graph, medians_us
from benchmarks.gpu_execute import whole_card
from benchmarks.gpu_serve_hf import StaticDecode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tessera.analyze.accesses import triton_accesses
from tessera.capture import Workload
from tessera.capture.inductor import on_device, record_inductor
from tessera.execute.cuda.graphs import DeviceGraphs
from tessera.execute.cuda.measure import whole_plan
from tessera.execute.lower import lower
from tessera.flow import make_unit
from tessera.ir import Step

Steps = tuple[Callable[[], Any], Callable[[], Any]]
# What runs until the process ends.
_OPEN = ExitStack()


def named(model: str, layers: int) -> str:
    """The name of a built-in model with fewer layers, made known."""
    from tessera.capture.models import catalog, known_models, register
    from tessera.capture.models.hf import CAUSAL_STEPS, SERVED_STEPS, built_in

    family, sizes, dtype = catalog.LANGUAGE[model]
    if sizes["num_hidden_layers"] == layers:
        return model
    name = f"{model}-of-{layers}"
    if name not in known_models():
        fewer = {**sizes, "num_hidden_layers": layers}
        register(name, CAUSAL_STEPS, SERVED_STEPS)(built_in(family, fewer, dtype))
    return name


def model_on_gpu(model: str, batch: int, capacity: int, layers: int) -> Workload:
    """The decode step with weights made on the GPU, and state that takes no time to make."""
    with torch.device("cuda"):
        workload = _build(Step(model, "decode", batch, capacity), layers)
    return blank(on_device(workload, "cuda:0"))


def blank(workload: Workload) -> Workload:
    """The same step whose state is random numbers made on the GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        shapes = {n: (tuple(t.shape), t.dtype) for n, t in workload.make_state(0).items()}

    def state(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator("cuda").manual_seed(seed)
        return {n: torch.randn(s, generator=random, device="cuda", dtype=d) for n, (s, d) in shapes.items()}

    return replace(workload, make_state=state)


def use_attention(workload: Workload, name: str) -> None:
    """Which attention a Hugging Face model calls from now on."""
    model: Any = workload.module
    model.set_attn_implementation(name)


def own_steps(workload: Workload, start: int, portable: bool) -> Steps:
    """(step, reset) of the captured decode as one CUDA graph, which feeds its own tokens back."""
    use_attention(workload, "tessera")
    recording = record_inductor(workload, triton_accesses, portable)
    plan, kernels = whole_plan(make_unit([recording.trace]), whole_card(), 0), {0: recording.relaunch}
    graphs = DeviceGraphs(plan.cluster, 0, [recording.trace], workload.weights(), 1, kernels=kernels)
    _OPEN.callback(graphs.close)
    (number,) = graphs.add(lower(plan)[0])
    graph, room = graphs.graph(0, number), graphs.room(0)
    assert graph is not None, "all launches are here"
    tokens, positions = (_words(room.inputs[0, name]) for name in ("tokens", "positions"))

    def step() -> None:
        with torch.cuda.stream(room.origin):
            tokens.copy_(graph.replay()["next_tokens"])
            positions.add_(1)

    def reset() -> None:
        with torch.cuda.stream(room.origin):
            positions.fill_(start)

    return step, reset


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as 64-bit numbers."""
    return torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage)


def hf_steps(workload: Workload, capacity: int, start: int, mode: str) -> Steps:
    """(step, reset) of the Hugging Face model with a static cache, compiled."""
    with torch.no_grad():
        decode = StaticDecode(workload.module, workload.step.batch, capacity, start)
        if mode == "reduce-overhead":
            call = torch.compile(decode.logits, mode="reduce-overhead", fullgraph=True)

            def step() -> None:
                torch.compiler.cudagraph_mark_step_begin()
                with torch.no_grad():
                    decode.advance(call().argmax(-1, keepdim=True))

            for _ in range(3):
                step()
            return step, decode.reset
        inner = None if mode.startswith("default") else "max-autotune-no-cudagraphs"
        compiled = torch.compile(decode.step, mode=inner, fullgraph=True)
        compiled()
        graph = as_graph(compiled)
    _OPEN.callback(lambda: compiled)  # its kernels are the graph's
    return graph.replay, decode.reset


def agreement(workload: Workload, start: int) -> dict[str, float]:
    """How far logits of both are apart for the same cache and tokens; how often the choice is the same."""
    use_attention(workload, "tessera")
    batch, state = workload.step.batch, workload.make_state(1)
    tokens = torch.arange(batch, device="cuda")[:, None] * 17
    with torch.no_grad():
        decode = StaticDecode(workload.module, batch, workload.step.context, start)
        decode.load(state)
        decode.tokens.copy_(tokens)
        theirs = decode.logits().float()
        use_attention(workload, "tessera")
        ours = workload.call({"tokens": tokens, "positions": torch.full_like(tokens, start)}, state)
    mine = ours["logits"].float()
    return {
        "largest difference": float((mine - theirs).abs().max()),
        "largest logit": float(theirs.abs().max()),
        "same choice": float((mine.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def kernels_of(step: Callable[[], Any], reset: Callable[[], Any], num: int = 4) -> dict[str, Any]:
    """Microseconds of a step by kernel, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    reset()
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(num):
            step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / num
    top = {row.key[:90]: [round(row.self_device_time_total / num, 1), row.count // num] for row in rows[:14]}
    return {"us a step": round(total, 1), "kernels": top}


# Attention --------------------------------------------------------------------------------------------------

HEADS, GROUPS, WIDTH = 8, 4, 128
# Keys and values of several layers, so that no cache of the GPU holds them.
LAYERS = 4


def attention_ways(batch: int, capacity: int) -> dict[str, Any]:
    """Microseconds of one layer's attention, and the share of the memory's speed, for each way."""
    size = (batch, HEADS, capacity, WIDTH)
    caches = [
        [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(LAYERS)
    ]
    rows = torch.randn(batch, HEADS, GROUPS, WIDTH, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(batch, 1, 1, capacity, device="cuda", dtype=torch.bfloat16)
    mask[..., capacity - 16 :] = float("-inf")
    key, value = (t.float() for t in caches[0])
    wanted = _formula(rows.float(), key, value, mask.float())
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, Any] = {}
    for name, way in _ways().items():
        try:
            with torch.no_grad():
                errors[name] = float((way(rows, *caches[0], mask).float() - wanted).abs().max())
                runs[name] = as_graph(partial(_on_all, way, rows, caches, mask)).replay
        except RuntimeError as error:
            errors[name] = str(error)[:200]
    ideal = 2 * caches[0][0].nbytes / 4.8e12 * 1e6
    times = {n: t["median_us"] / LAYERS for n, t in medians_us(runs, 20).items()}
    return {
        n: {"us": round(us, 1), "share of 4.8 TB/s": round(ideal / us, 3), "error": errors[n]}
        for n, us in times.items()
    } | {n: e for n, e in errors.items() if isinstance(e, str)}


Way = Callable[..., Any]


def _on_all(
    way: Way, rows: torch.Tensor, caches: Sequence[Sequence[torch.Tensor]], mask: torch.Tensor
) -> None:
    for cache in caches:
        way(rows, *cache, mask)


def _ways() -> Mapping[str, Way]:
    ways: dict[str, Way] = {}
    for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def by(rows: Any, key: Any, value: Any, mask: Any, backend: Any = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(rows, key, value, mask)

        ways[f"rows, {backend.name}"] = by
    ways["rows, torch's choice"] = scaled_dot_product_attention
    ways["repeated keys"] = torch.compile(_repeated, dynamic=False)
    ways["formula"] = torch.compile(_formula, dynamic=False)
    ways["sums"] = torch.compile(_sums, dynamic=False)
    for parts in (2, 4, 8):
        ways[f"{parts} parts"] = torch.compile(_in_parts(parts), dynamic=False)
    return ways


def _repeated(rows: Any, key: Any, value: Any, mask: Any) -> Any:
    """As Hugging Face does."""
    batch = rows.shape[0]
    query = rows.reshape(batch, HEADS * GROUPS, 1, WIDTH)
    key, value = (
        t[:, :, None].expand(-1, -1, GROUPS, -1, -1).reshape(batch, HEADS * GROUPS, -1, WIDTH)
        for t in (key, value)
    )
    return scaled_dot_product_attention(query, key, value, mask).view(rows.shape)


def _formula(rows: Any, key: Any, value: Any, mask: Any) -> Any:
    """Two products and a softmax between."""
    scores = (rows @ key.transpose(2, 3)).float() * WIDTH**-0.5 + mask
    return scores.softmax(-1).to(value.dtype) @ value


def _sums(rows: Any, key: Any, value: Any, mask: Any) -> Any:
    """Products written out as sums, which a compiler may fuse with the softmax."""
    scores = (rows[:, :, :, None] * key[:, :, None]).float().sum(-1) * WIDTH**-0.5 + mask
    weights = scores.softmax(-1)
    return (weights[..., None] * value[:, :, None].float()).sum(3).to(value.dtype)


def _in_parts(parts: int) -> Way:
    """Each head's keys in parts that are attended to apart and then joined by their sums of exponentials."""

    def attend(rows: Any, key: Any, value: Any, mask: Any) -> Any:
        batch, heads, groups, width = rows.shape
        each = key.shape[2] // parts
        query = rows[:, :, None].expand(-1, -1, parts, -1, -1).reshape(batch, heads * parts, groups, width)
        keys, values = (t.view(batch, heads * parts, each, width) for t in (key, value))
        bias = mask.clamp_min(-1e30).view(batch, 1, parts, 1, each)
        bias = bias.expand(-1, heads, -1, groups, -1).reshape(batch, heads * parts, groups, each)
        out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, bias.contiguous(), True
        )
        weight = sums[..., :groups].view(batch, heads, parts, groups).softmax(2)
        joined = (out.view(batch, heads, parts, groups, width) * weight[..., None].to(out.dtype)).sum(2)
        return joined

    return attend
