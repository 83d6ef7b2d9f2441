"""Services on two dilated devices of one GPU: every policy at its own best configuration for a load.

    export CUDA_MPS_PIPE_DIRECTORY=... CUDA_MPS_LOG_DIRECTORY=...; nvidia-cuda-mps-control -d
    python benchmarks/gpu_services.py --out benchmarks/results --name services_h200_202611 \
        --cases h20+l40s:1024/256:50,a100+l40s:1024/256:30,h20+h100:128/512:50=data-parallel|attention-ffn

For each case (pair : prompt tokens / answer tokens, kinds of a mix joined by & : limit in ms per token of the
whole model = policies, if not all) each policy is planned for the load, its steps are captured, and it is
rehearsed in virtual time over the captured steps' modelled costs. Then the same load runs for real: two
worker processes, each kernel stretched to the modelled time of its card, pages moved at the modelled link's
speed. Clients ask again and again, so that the service is full; lengths are drawn as the rehearsal
draws them. Rates and times are in modelled time: measured x scale, measured / scale.

`fixed` is data-parallel with two microbatches of 64 sequences per device and steps of 64 to 2048 tokens,
whatever the load. With fewer layers than the model has, limits are reduced in proportion to the weights
that a step reads.
"""

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_common import Log, about

from tessera.ir import ServicePlan

MODEL, LAYERS = "llama-3-8b", 32
# Layers that weigh as much as the head.
HEAD = 2.4
FIXED = "fixed"
# Lengths that are drawn of each kind of a mix.
MIXED = 128
POLICIES = ("prefill-decode-fractional", "data-parallel", "prefill-decode", FIXED)


def case(log: Log, args: argparse.Namespace, text: str, kept: dict[str, Any]) -> None:
    """One pair and load; recordings of the model are kept from case to case."""
    from benchmarks.gpu_serve_hf import named

    from tessera.ir import Load
    from tessera.planning import ServedSteps
    from tessera.profile import parse_devices, wire

    text, _, names = text.partition("=")
    pair, lengths, limit = text.split(":")
    tpot_ms = float(limit) * (args.layers + HEAD) / (LAYERS + HEAD) if limit else None
    kinds = [tuple(int(n) for n in kind.split("/")) for kind in lengths.split("&")]
    prompt, output = (round(sum(of) / len(kinds)) for of in zip(*kinds, strict=True))
    load = Load(prompt, output, lengths=mixture(kinds) if len(kinds) > 1 else (), tpot_ms=tpot_ms)
    devices = ",".join(f"cuda:0/as={gpu}" for gpu in pair.split("+"))
    cluster, model = wire(parse_devices(devices), [args.link]), named(MODEL, args.layers)
    steps = ServedSteps(model, cluster, is_compiled=True)
    if model in kept:
        steps.__dict__["family"] = kept[model]
    kept[model] = steps.family
    for policy in (names or args.policies).replace("|", ",").split(","):
        name = f"{text} {policy}"
        if time.monotonic() - log.began < args.limit - args.each:
            log.attempt(name, measured, args, policy, steps, load)
    rows = {key.split(" ")[1]: found for key, found in log.found.items() if key.startswith(f"{text} ")}
    rates = {name: found["tokens per s"] for name, found in rows.items() if "tokens per s" in found}
    if "data-parallel" in rates:
        base = rates["data-parallel"]
        log.put(f"{text}: over data-parallel", {n: round(rate / base, 4) for n, rate in rates.items()})


def mixture(kinds: list[Any]) -> tuple[tuple[int, int], ...]:
    """Lengths of a mix: as many requests of each kind, each uniform around its means."""
    from tessera.ir import Load
    from tessera.simulate.arrivals import lengths_of

    return tuple(pair for n, kind in enumerate(kinds) for pair in lengths_of(Load(*kind), MIXED, n))


def measured(args: argparse.Namespace, policy: str, steps: Any, load: Any) -> dict[str, Any]:
    import torch
    from benchmarks.gpu_serve_load import run_load

    from tessera.planning import make_service_plan
    from tessera.serve.planning import prepare
    from tessera.serve.records import ServeSpec
    from tessera.serve.rehearse import rehearse
    from tessera.serve.service import Service
    from tessera.serve.text import ByteText

    began, moments = time.monotonic(), list[Any]()

    def advance(what: str) -> None:
        moments.append([round(time.monotonic() - began, 1), what])

    if policy == FIXED:
        spec = ServeSpec(
            4, 64, 2 * (load.prompt_tokens + load.output_tokens), 2048, load=load, policies=("data-parallel",)
        )
        prepared = prepare(steps.model, steps.cluster, spec, advance=advance)
    else:
        plan = make_service_plan(steps, load, rehearse, policies=(policy,))
        assert plan.expected is not None, "it was rehearsed"
        moments.append(["planned, tokens per s", round(plan.expected.tokens_per_s, 1)])
        prepared = prepare(steps.model, steps.cluster, ServeSpec(load=load), plan=plan, advance=advance)
    (served,) = prepared.policies
    expected, scale = served.expected, prepared.scale
    assert expected is not None, "it was rehearsed"
    if args.prepare:
        return {"expected": round(expected.tokens_per_s, 1), "moments": moments}
    advance("starting workers")
    with (
        prepared.workers(args.transport) as stepper,
        Service(stepper, prepared.policies, prepared.model.shape, ByteText()) as service,
    ):
        advance("running")
        found = run_load(service, expected.clients, load, args.seconds)
        shot = service.snapshot()
        free, total = torch.cuda.mem_get_info()
        for share in args.arrivals:
            found[f"arrivals {share:g}"] = arrived(args, served, service, share, scale)
    rate = found.pop("tokens per s") * scale
    times = {name: found.pop(name) for name in ("tpot ms", "ttft ms")}
    return {
        "tokens per s": round(rate, 1),
        "expected": round(expected.tokens_per_s, 1),
        "measured / expected": round(rate / expected.tokens_per_s, 4),
        **{f"{name} p50, p99": [round(x / scale, 2) for x in both] for name, both in times.items()},
        "expected tpot ms, ttft ms": [round(expected.tpot_ms, 2), round(expected.ttft_ms, 1)],
        "expected busy": [round(share, 3) for share in expected.busy],
        "groups": [asdict(group.size) for group in served.groups],
        "clients": expected.clients,
        "pages moved": shot.pages_moved,
        "GB on the card": round((total - free) / 1e9, 2),
        "scale": round(scale, 3),
        "moments": moments,
        **found,
    }


def arrived(
    args: argparse.Namespace, plan: ServicePlan, service: Any, share: float, scale: float
) -> dict[str, Any]:
    """A Poisson stream at this share of the closed load's expected rate: for real and in virtual time."""
    from benchmarks.gpu_serve_load import arrive, quantiles_ms

    from tessera.serve.rehearse import play
    from tessera.simulate.arrivals import lengths_of, make_arrivals

    assert plan.expected is not None, "it was rehearsed"
    rate = share * plan.expected.tokens_per_s / plan.load.output_tokens
    num = max(8, round(rate * args.seconds / scale))
    prompts, outputs = zip(*lengths_of(plan.load, num, seed=1), strict=True)
    stream = replace(make_arrivals(f"poisson:{rate}", num), prompts=prompts, outputs=outputs)
    tally, seconds = arrive(service, stream, scale)
    virtual = play([plan], stream).expected
    tokens_per_s = sum(n for _, n in tally.came) / seconds * scale
    times = {"tpot ms": tally.each_s, "ttft ms": tally.first_s}
    waits = {name: [round(x / scale, 2) for x in quantiles_ms(t)] for name, t in times.items()}
    return {
        "requests per s": round(rate, 2),
        "requests": num,
        "tokens per s": round(tokens_per_s, 1),
        "measured / expected": round(tokens_per_s / virtual.tokens_per_s, 4),
        **{f"{name} p50, p99": both for name, both in waits.items()},
        "expected tpot ms p50, p99": [round(virtual.tpot_ms, 2), round(virtual.tpot_p99_ms, 2)],
        "expected ttft ms p50, p99": [round(virtual.ttft_ms, 2), round(virtual.ttft_p99_ms, 2)],
        "errors": tally.errors[:3],
    }


def shares(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Services on two dilated devices of one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="services")
    parser.add_argument("--cases", default="h20+l40s:1024/256:50")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--link", default="pcie4")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seconds", type=float, default=15.0, help="that are counted")
    parser.add_argument(
        "--arrivals",
        type=shares,
        default=[],
        help="Poisson streams too, at these shares of the expected rate",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="only plan and capture: fills the compilers' caches"
    )
    parser.add_argument("--each", type=float, default=60.0, help="seconds that a policy is given at least")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all")
    return parser.parse_args(words)


def main() -> None:
    args = parsed(sys.argv[1:])
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.name}.json"
    log = Log(path)
    words = " ".join("OUT" if word == str(args.out) else word for word in sys.argv[1:])
    log.put("about", {**about(), "command": f"python benchmarks/gpu_services.py {words}"})
    kept: dict[str, Any] = {}
    for text in args.cases.split(","):
        try:
            case(log, args, text, kept)
        except Exception:  # noqa: BLE001 - one case must not stop the others
            log.put(f"{text}: failed", {"error": traceback.format_exc()[-3000:]})
    path.with_suffix(".md").write_text(table(json.loads(path.read_text())))


def table(found: dict[str, Any]) -> str:
    """The results for people."""
    about = found["about"]
    lines = [
        "# Services on two dilated devices of one GPU",
        "",
        f"{about.get('gpu')}, torch {about.get('torch')}, `{about['command']}`. Rates in modelled time.",
        "",
        "| case | policy | tokens/s | expected | measured / expected | over data-parallel | ms a token | "
        "ms to the first | pages moved |",
        "|" + "---|" * 9,
    ]
    for key, row in found.items():
        if isinstance(row, dict) and "measured / expected" in row:
            text, policy = key.split(" ")
            ratio = found.get(f"{text}: over data-parallel", {}).get(policy, "-")
            cells = [text, policy, row["tokens per s"], row["expected"], row["measured / expected"], ratio]
            cells += [row["tpot ms p50, p99"], row["ttft ms p50, p99"], row["pages moved"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
            for name, part in row.items():
                if name.startswith("arrivals"):
                    cells = [
                        text,
                        f"{policy}, {name}",
                        part["tokens per s"],
                        "",
                        part["measured / expected"],
                        "-",
                    ]
                    cells += [part["tpot ms p50, p99"], part["ttft ms p50, p99"], "-"]
                    lines.append("| " + " | ".join(map(str, cells)) + " |")
    notes = [f"- {note}" for note in found.get("notes", ())]
    return "\n".join([*lines, "", *notes, ""]).rstrip() + "\n"


if __name__ == "__main__":
    main()
