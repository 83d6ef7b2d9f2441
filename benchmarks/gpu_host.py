"""A GPU with less memory than the model, and its host: tokens per second against offloading.

    python benchmarks/gpu_host.py --model gpt-oss-20b --memory 22GB --batch 1,8 --out benchmarks/results \
        --name host_h200_202611
    python benchmarks/gpu_host.py --model llama-3-8b --memory 10GB --batch 1,16 ...
    python benchmarks/gpu_host.py --model deepseek-v2-lite --memory 12GB ...          or mixtral-8x7b
    python benchmarks/gpu_host.py --model FOLDER --parts own --memory 8GB ...         (packed_folder.py)

Parts, each in a process of its own, on the same random bf16 weights in number and shape:
  own         the service on cuda:0,cpu with the GPU's memory capped, and what its plan expected
              (`--no-fetch`: all that does not fit is computed on the CPU)
  accelerate  Hugging Face `generate` with accelerate's offload (`dispatch_model`) at the same cap
  fetch       `generate` with the layers that do not fit in pinned memory; each is copied to the GPU while the
              layer before it computes ("fetch all that does not fit")
  copies      weights fetched by the copy engine in pieces, or by a kernel: their rate, how long a value from
              the host takes beside them, and how fast the CPU reads its weights meanwhile
`tokens/s` of the service: answer tokens of as many clients, each asking again at once, in the time in which
all of them are past their first answer, which is shorter for some: as a plan expects it, prompts included.
Tokens are drawn: greedy ones repeat themselves, and so do their experts. Baselines: tokens after the first,
of transformers' defaults (attention, experts), for `--plain-tokens` tokens or `--plain-s` seconds; accelerate
may fill the whole cap with weights. Nothing is dilated or modelled.
"""

import argparse
import asyncio
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_common import Log, about

PARTS = ("own", "accelerate", "fetch")
PIECES = (1 << 20, 4 << 20, 16 << 20)
WEIGHT_BYTES, FETCHES = 176 << 20, 24
VALUE_BYTES, LINKS_OF_CHAIN = 16 << 10, 60
# Memory that a cap leaves free for activations and the cache of `fetch`.
SPARE = 2e9
PROMPT = 32
# Sizes of published mixtures that are not built in; experts of the first are large, of the second small.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-8x7b": (
        "mixtral",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
         "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16,
         "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
         "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False},
    ),
}  # fmt: skip


def own(args: argparse.Namespace, log: Log) -> None:
    """The service, its expectation, and what it reached."""
    from benchmarks.gpu_serve_hf import named

    from tessera.cli.start import lines_of
    from tessera.ir import Load
    from tessera.profile import cap_memory, parse_devices, wire
    from tessera.profile.devices import LINKS, LinkPreset
    from tessera.serve.planning import prepare
    from tessera.serve.records import ServeSpec
    from tessera.serve.rehearse import rehearse
    from tessera.serve.service import Service
    from tessera.serve.text import ByteText

    began_s = time.perf_counter()
    latency_us, gbps, fetch_gbps, slowdown = (
        map(float, args.link.split(",")) if args.link else measured_link(log)
    )
    LINKS["here"] = LinkPreset("here", latency_us, gbps, "measured")
    fetch_gbps = 1e-3 if args.no_fetch else fetch_gbps
    devices = cap_memory(parse_devices("cuda:0,cpu"), [f"cuda:0={args.memory}"])
    batches = [int(word) for word in args.batch.split(",")]
    load = Load(PROMPT, args.tokens)
    spec = ServeSpec(
        1, max(batches), PROMPT + args.tokens + 32, args.batch_tokens, load=load, effort="quick",
        policies=("kernel-level",),
    )  # fmt: skip

    def advance(what: str) -> None:
        print(f"[{time.perf_counter() - began_s:6.1f} s] {what}", flush=True)

    cluster = wire(devices, ["here"])
    links = [replace(x, fetch_gbps=fetch_gbps, fetch_slowdown=slowdown) for x in cluster.links]
    cluster = replace(cluster, links=tuple(links))
    model = named(args.model, args.layers) if args.layers else args.model
    made = prepare(model, cluster, spec, advance=advance)
    plan = made.policies[0]
    placement, buffers = plan.plans[0].lanes[0].placement, plan.plans[0].graphs[0].trace.buffers
    fetched = [b.size_bytes for b in buffers if b.name in dict(placement.fetched)]
    log.put("plan", {"lines": lines_of(made), "launches": [placement.devices[0].count(d) for d in (0, 1)],
                     "fetched": len(fetched), "fetched GB": sum(fetched) / 1e9,
                     "prepared s": round(time.perf_counter() - began_s, 1)})  # fmt: skip
    with (
        made.workers() as stepper,
        Service(stepper, made.policies, made.model.shape, ByteText(), planner=made.planner) as service,
    ):
        log.put("started", round(time.perf_counter() - began_s, 1))
        for batch in batches:
            asyncio.run(asked(service, batch, 4, 1))
        time.sleep(args.idle)  # steps of other sizes are captured
        for batch in batches:
            expected = rehearse(plan, load, batch, shape=made.model.shape)
            rate, gap_ms = asyncio.run(asked(service, batch, args.tokens, 2))
            busy = {device.name: round(device.utilisation, 3) for device in service.snapshot().devices}
            found = {"tokens/s": rate, "expected": expected.tokens_per_s, "ms a token": gap_ms}
            found["of expected"] = rate / expected.tokens_per_s
            wanted = dict(zip(busy, expected.busy, strict=True))
            log.put(
                f"own {batch}",
                found | {"expected ms": expected.tpot_ms, "busy": busy, "expected busy": wanted},
            )


def measured_link(log: Log) -> tuple[float, float, float, float]:
    """(latency in us, GB/s of values, GB/s of weights, slowdown of the CPU) as workers see it."""
    from tessera.flow import time_fetches, time_link
    from tessera.profile import parse_devices
    from tessera.profile.store import fit_link

    a, b = parse_devices("cuda:0,cpu")
    name, times = time_link(a, b, (4096, 64 << 10, 1 << 20, 16 << 20), "auto")
    fit, (fetched, slowdown) = fit_link(a.name, b.name, name, times.alone, times.both), time_fetches(b, a)
    log.put(
        "link",
        {"transport": name, "us": times.alone, "latency us": fit.latency_us, "GB/s": fit.gbps,
         "GB/s of weights": fetched, "slowdown": slowdown},
    )  # fmt: skip
    return fit.latency_us, fit.gbps, fetched, slowdown


async def asked(service: Any, batch: int, tokens: int, rounds: int) -> tuple[float, float]:
    """Tokens per second in steady state, and the median time between two tokens of an answer in ms."""
    from tessera.serve.records import Ask, Sampling

    async def one(number: int) -> list[list[float]]:
        answers: list[list[float]] = []
        for n in range(rounds + 1):
            prompt = tuple((7 * (number + n * batch) + i) % 200 + 1 for i in range(PROMPT))
            num = tokens if n else max(2, tokens * (number + 1) // batch)
            answers.append([])
            drawn = Sampling(temperature=1.0, seed=number + n * batch)
            async for event in service.answer(Ask(prompt, num, drawn, ignores_end=True)):
                answers[-1] += [time.perf_counter()] * len(getattr(event, "tokens", ()))
        return answers

    clients = await asyncio.gather(*(one(number) for number in range(batch)))
    start = max(answers[0][-1] for answers in clients)
    stop = min(answers[-1][-1] for answers in clients)
    num = sum(start < at <= stop for answers in clients for times in answers for at in times)
    gaps = [b - a for answers in clients for times in answers for a, b in itertools.pairwise(times)]
    return num / max(stop - start, 1e-9), statistics.median(gaps) * 1e3


def plain_model(args: argparse.Namespace) -> Any:
    """The model as transformers builds it, in the host's memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tessera.capture.models.catalog import LANGUAGE

    family, sizes, dtype = LANGUAGE[args.model]
    config = AutoConfig.for_model(family, **{**sizes, "num_hidden_layers": args.layers})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().to("cpu")


def generated(model: Any, args: argparse.Namespace, log: Log, name: str) -> None:
    import torch

    for batch in (int(word) for word in args.batch.split(",")):
        prompt = torch.randint(1, 200, (batch, PROMPT), device="cuda")
        moments: list[float] = []

        def note(tokens: Any, scores: Any, moments: list[float] = moments, **_: Any) -> Any:
            torch.cuda.synchronize()
            moments.append(time.perf_counter())
            is_over = moments[-1] - moments[0] > args.plain_s
            return torch.full((len(tokens),), is_over, device=tokens.device)

        for tokens in (2, args.plain_tokens):  # the first one warms up
            moments.clear()
            with torch.inference_mode():
                model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False,
                    eos_token_id=None, pad_token_id=0, stopping_criteria=[note],
                )  # fmt: skip
        rate = batch * (len(moments) - 1) / (moments[-1] - moments[0])
        log.put(f"{name} {batch}", {"tokens/s": rate, "tokens": len(moments)})


def accelerate(args: argparse.Namespace, log: Log) -> None:
    library = importlib.import_module("accelerate")
    model = plain_model(args)
    memory = {0: size_of(args.memory), "cpu": int(1e12)}
    places = library.infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
    model = library.dispatch_model(model, places)
    log.put("accelerate places", {str(p): list(places.values()).count(p) for p in set(places.values())})
    generated(model, args, log, "accelerate")


def fetch(args: argparse.Namespace, log: Log) -> None:
    """Layers that fit stay on the GPU; the others are copied, one ahead."""
    import torch

    model = plain_model(args)
    layers = list(model.model.layers)
    each = sum(p.nbytes for p in layers[0].parameters())
    rest = sum(p.nbytes for p in model.parameters()) - len(layers) * each
    held = max(0, int((size_of(args.memory) - SPARE - rest - 2 * each) // each))
    for module in (model.model.embed_tokens, model.model.norm, model.model.rotary_emb, model.lm_head):
        module.to("cuda")
    for layer in layers[:held]:
        layer.to("cuda")
    fetched = layers[held:]
    log.put("fetch places", {"held": held, "fetched": len(fetched), "GB a layer": each / 1e9})
    pinned = [[p.data.pin_memory() for p in layer.parameters()] for layer in fetched]
    landing = [[torch.empty_like(p, device="cuda") for p in pinned[0]] for _ in range(2)] if fetched else []
    stream, arrived = torch.cuda.Stream(), [torch.cuda.Event() for _ in fetched]

    def begin(number: int) -> None:
        stream.wait_stream(torch.cuda.current_stream())  # the layer before last has been computed
        with torch.cuda.stream(stream):
            for source, place in zip(pinned[number], landing[number % 2], strict=True):
                place.copy_(source, non_blocking=True)
            arrived[number].record(stream)

    def before(number: int) -> Any:
        def hook(module: Any, given: Any) -> None:
            torch.cuda.current_stream().wait_event(arrived[number])
            for parameter, place in zip(module.parameters(), landing[number % 2], strict=True):
                parameter.data = place
            begin((number + 1) % len(fetched))

        return hook

    for number, layer in enumerate(fetched):
        layer.register_forward_pre_hook(before(number))
    if len(fetched) % 2:
        log.put("fetch note", "an odd number of fetched layers: the first lands in the place of the last")
    if fetched:
        begin(0)
    generated(model, args, log, "fetch")


def graph_of(issue: Any) -> Any:
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        issue(stream)
    return graph


def timed(graph: Any, stream: Any) -> tuple[float, float]:
    """Milliseconds of the card, and of the host's launch."""
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        first.record()
        began_s = time.perf_counter()
        graph.replay()
        host_ms = 1e3 * (time.perf_counter() - began_s)
        last.record()
    last.synchronize()
    return first.elapsed_time(last), host_ms


def beside(work: Any) -> tuple[Any, float]:
    """Its result, and GB/s of weights that the CPU reads meanwhile."""
    import os
    import threading

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)) - 1)
    weights = [torch.full((5760, 2880), 0.01, dtype=torch.bfloat16) for _ in range(80)]
    stop, found = threading.Event(), list[float]()

    def products() -> None:
        x, num, began_s = torch.ones(8, 2880, dtype=torch.bfloat16), 0, time.perf_counter()
        while not stop.is_set():
            torch.nn.functional.linear(x, weights[num % len(weights)])
            num += 1
        found.append(num * weights[0].nbytes / (time.perf_counter() - began_s) / 1e9)

    thread = threading.Thread(target=products)
    thread.start()
    time.sleep(0.05)
    result = work()
    stop.set()
    thread.join()
    return result, round(found[0], 1)


def copies(args: argparse.Namespace, log: Log) -> None:
    """Weights fetched in one graph, by kind; beside them a chain of values, and products of the CPU."""
    import torch

    from tessera.execute import driver

    sources, places = (driver.pinned((8, WEIGHT_BYTES)), torch.zeros(3, WEIGHT_BYTES).byte().cuda())
    value, landing = driver.pinned((1 << 20,)), torch.zeros(1 << 20).byte().cuda()
    large, small = torch.cuda.Stream(), torch.cuda.Stream()
    kernel = driver.fetch_kernel(0)

    def fetched(each: Any) -> Any:
        return graph_of(
            lambda stream: [
                each(stream, places[n % 3].data_ptr(), sources[n % 8].data_ptr()) for n in range(FETCHES)
            ]
        )

    def pieces(size: int) -> Any:
        def each(stream: Any, place: int, source: int) -> None:
            for at in range(0, WEIGHT_BYTES, size):
                driver.copy(stream.cuda_stream, place + at, source + at, min(size, WEIGHT_BYTES - at))

        return fetched(each)

    def programs(num: int) -> Any:
        return fetched(lambda stream, place, source: kernel((num, 1, 1), [source, place, WEIGHT_BYTES]))

    def chain(stream: Any) -> None:
        for _ in range(LINKS_OF_CHAIN):
            driver.copy(stream.cuda_stream, landing.data_ptr(), value.data_ptr(), VALUE_BYTES)
            landing[:1024].add_(1)
            driver.copy(stream.cuda_stream, value.data_ptr() + (1 << 19), landing.data_ptr(), VALUE_BYTES)
            torch.cuda._sleep(200_000)

    values = graph_of(chain)
    timed(values, small)
    link_us = timed(values, small)[0] * 1e3 / LINKS_OF_CHAIN
    log.put("alone", {"us of a value": round(link_us), "GB/s of the CPU": beside(lambda: time.sleep(0.5))[1]})
    kinds = {f"pieces of {size >> 20} MB": pieces(size) for size in PIECES}
    kinds |= {f"kernel of {num} programs": programs(num) for num in (8, 16, 32)}
    for name, graph in kinds.items():
        timed(graph, large)
        ms, host_ms = timed(graph, large)
        (busy_ms, _), read = beside(lambda graph=graph: timed(graph, large))
        with torch.cuda.stream(large):
            graph.replay()
        link_us = timed(values, small)[0] * 1e3 / LINKS_OF_CHAIN
        torch.cuda.synchronize()
        rate = [round(FETCHES * WEIGHT_BYTES / each / 1e6, 1) for each in (ms, busy_ms)]
        log.put(
            name,
            {"GB/s": rate[0], "GB/s beside the CPU": rate[1], "GB/s of the CPU": read,
             "host ms": round(host_ms, 2), "us of a value": round(link_us)},
        )  # fmt: skip


def size_of(text: str) -> int:
    from tessera.profile import cap_memory, parse_devices

    (device,) = cap_memory(parse_devices("emu:mi300x"), [f"emu:mi300x={text}"])
    return int(device.memory_bytes)


def main() -> None:
    import torch

    from tessera.capture.models.catalog import LANGUAGE

    LANGUAGE.update({name: (*model, torch.bfloat16) for name, model in MIXTURES.items()})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--memory", default="22GB")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--plain-tokens", type=int, default=17, help="answer tokens of the baselines")
    parser.add_argument("--plain-s", type=float, default=60.0, help="seconds of a baseline's answer")
    parser.add_argument("--batch-tokens", type=int, default=32, help="tokens of the largest step")
    parser.add_argument(
        "--link", help="latency in us, GB/s of values and of weights, slowdown, if not to be measured"
    )
    parser.add_argument("--no-fetch", action="store_true", help="plan without fetching weights")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--idle", type=float, default=10.0, help="seconds between warm-up and measurement")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of a part")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="host")
    args = parser.parse_args()
    if args.model in LANGUAGE:
        args.layers = args.layers or LANGUAGE[args.model][1]["num_hidden_layers"]
    parts, name = args.parts.split(","), f"{args.name}_{Path(args.model).name}"
    path = args.out / f"{name}.json"
    if len(parts) == 1:
        log = Log(args.out / f"{name}_{parts[0]}.json")
        log.put("about", about() | {"command": " ".join(sys.argv)})
        made = {"own": own, "accelerate": accelerate, "fetch": fetch, "copies": copies}
        log.attempt(parts[0], made[parts[0]], args, log)
        return
    found = {}
    for part in parts:
        command = [sys.executable, *sys.argv, "--parts", part, "--layers", str(args.layers)]
        try:
            subprocess.run(command, timeout=args.limit, check=False)
        except subprocess.TimeoutExpired:
            print(f"{part}: not done in {args.limit:g} s", flush=True)
        one = args.out / f"{name}_{part}.json"
        if one.exists():
            found[part] = json.loads(one.read_text())
            one.unlink()
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
