"""Plans on one GPU with one worker process per device: overhead, heterogeneous pairs, transports, faults.

    export CUDA_MPS_PIPE_DIRECTORY=... CUDA_MPS_LOG_DIRECTORY=...; nvidia-cuda-mps-control -d
    python benchmarks/gpu_execute.py --out benchmarks/results --name execute_h200_202611

Processes on one card run side by side only under CUDA MPS. Parts, each in a process of its own with a time
limit, its results written as they come:

probe     how well the pace kernel keeps time, where kernels of partitions run
overhead  a plan with everything on one worker against the compiled model as a CUDA graph
pairs     for each family and pair of devices: the throughput plan, data-parallel and the best split over
          `ipc`, by the same workers, against what was simulated. With --halves the plan over `ipc` and
          `nvshmem`, each process with half of the card, which NVSHMEM asks for where two of its elements are
          one card; with --host the plan for a link as `host` has it, over `host`
loads     loads of the evaluation: the plan and the best coarser policy, each at its own best batch
pipelining  figure 10 of the publication: one placement of gpt-oss decodes over an A100 and an L40S with one,
          two and four microbatches in flight
soak      requests in a row with a change of policy at random and kills of workers: outputs equal, none lost

Partitions of one card are priced by measuring, dilated devices by the cost model; rates on dilated
devices are modelled rates: what was measured, times the time scale. Real widths, few layers, random weights.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu_common import Log, Same, about, whole_card

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

PARTS = ("probe", "overhead", "pairs", "loads", "pipelining", "soak")
PAIRS = (
    ("cuda:0/as=a100,cuda:0/as=l40s", "pcie4"),
    ("cuda:0/as=h20,cuda:0/as=l40s", "pcie4"),
    ("cuda:0/as=h20,cuda:0/as=a100", "pcie4"),
)
PIPELINED = {"off": 1, "pipelined": 2, "pipelined_deeper": 4}
POLICIES = ("throughput", "data-parallel", "prefill-decode", "attention-ffn", "layer-pipeline")
MICROBATCHES = 6
# Loads of gpu_execute_loads.
LOADS = ("llama-decode", "sd3.5", "qwen-prefill", "mamba-decode", "qwen-decode")


@dataclass(frozen=True)
class Family:
    """A work unit of one family: (kind, batch, context, reserve) of its steps."""

    model: str
    layers: int
    steps: tuple[tuple[str, int, int, int], ...]


FAMILIES = {
    "llama": Family("llama-3-8b", 4, (("prefill", 4, 512, 4), ("decode", 4, 516, 0))),
    "llama-decode": Family("llama-3-8b", 4, (("decode", 32, 1024, 0),)),
    "gpt-oss": Family("gpt-oss-20b", 4, (("prefill", 4, 512, 4), ("decode", 4, 516, 0))),
    "gpt-oss-decode": Family("gpt-oss-20b", 4, (("decode", 32, 1024, 0),)),
    "mamba": Family("mamba-codestral-7b", 4, (("decode", 8, 512, 0),)),
    "qwen-vl": Family("qwen2.5-vl-7b", 4, (("prefill", 4, 512, 4), ("decode", 4, 516, 0))),
    "sd3.5": Family("sd3.5-medium", 4, (("denoise", 1, 4096, 0),)),
}


@contextmanager
def alone(args: argparse.Namespace) -> Iterator[None]:
    """Nobody else measures meanwhile who has the same lock: others may prepare."""
    if args.lock is None:
        yield
        return
    with args.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Workloads --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A family: its traces and weights on the GPU, and its requests by seed, on the CPU."""

    unit: Any
    workloads: list[Any]
    weights: dict[str, Any]
    made: dict[int, Any]

    def request(self, seed: int) -> Any:
        """One request, made once."""
        from tessera.flow import UnitRequest

        if seed not in self.made:
            self.made[seed] = UnitRequest(self.workloads, self.workloads[0].make_inputs(seed), seed)
        return self.made[seed]


def build(family: Family) -> Built:
    """Builds the steps on the GPU and records them by the torch front end."""
    import torch
    from benchmarks.gpu_capture import _build
    from torch.nn.attention import sdpa_kernel

    from tessera.capture.record import PORTABLE, record
    from tessera.capture.workload import on_device
    from tessera.flow import make_unit
    from tessera.ir import Step

    workloads, traces = [], []
    for kind, batch, context, reserve in family.steps:
        with torch.device("cuda"):
            workload = _build(Step(family.model, kind, batch, context, reserve=reserve), family.layers)
        workloads.append(workload)
        with sdpa_kernel(PORTABLE):
            traces.append(record(on_device(workload, "cuda:0")))
    return Built(make_unit(traces), workloads, workloads[0].weights(), {})


# Probe ------------------------------------------------------------------------------------------------------


def probe(log: Log, args: argparse.Namespace) -> None:
    """What the machine and the building blocks do."""
    from benchmarks.gpu_execute_probe import (
        dilated_pair,
        dilated_times,
        partitions_are_disjoint,
        parts_with_unused_sms,
        priorities_are_kept,
        slices_of_storage,
    )

    log.attempt("slices of storage", slices_of_storage)
    log.attempt("dilated launches", dilated_times)
    log.attempt("dilated pair", dilated_pair)
    log.attempt("partitions", partitions_are_disjoint)
    log.attempt("parts with SMs left over", parts_with_unused_sms)
    log.attempt("priorities of streams", priorities_are_kept)


# Overhead ---------------------------------------------------------------------------------------------------


def overhead(log: Log, args: argparse.Namespace) -> None:
    """All on one device against the compiled model, both as CUDA graphs, timed in turn.

    `graph`: the plan's graph in this process. `worker`: the same in a worker process with two microbatches,
    as requests a second, against the compiled graph's replays a second.
    """
    import torch
    from benchmarks.gpu_capture import Case, as_graph, copies, differences, medians_us
    from benchmarks.gpu_capture import build as build_case
    from benchmarks.gpu_execute_pairs import SKIPPED, opened, rate_per_s

    from tessera.capture.inductor import record_inductor
    from tessera.execute.cuda.measure import UnitOnDevice, whole_plan
    from tessera.execute.offline import run_offline
    from tessera.flow import UnitRequest, make_unit

    workload = build_case(Case("llama-3-8b", "decode", 32, 2048), args.layers)
    recording = record_inductor(workload, False)
    log.put("launches", len(recording.trace.launches))
    weights, inputs, state = workload.weights(), workload.make_inputs(0), workload.make_state(0)
    wanted_state = copies(state)
    wanted = {n: t.clone() for n, t in recording.code.run(weights, inputs, wanted_state).items()}
    compiled = as_graph(lambda: recording.code.run(weights, inputs, state))
    unit = make_unit([recording.trace])
    request = UnitRequest([workload], inputs, 0)
    steps = 50
    found: dict[str, float] = {}

    def in_process() -> dict[str, Any]:
        with UnitOnDevice(unit, whole_card(), 0, weights) as whole:
            (outputs,) = whole.run(request)
            flat = {n: t.reshape(-1).view(torch.uint8) for n, t in wanted_state.items()}
            differing = differences(wanted, outputs) + differences(flat, whole.state())
            times = medians_us({"compiled": compiled.replay, "plan": whole.graph(0).replay})
        found["compiled"] = times["compiled"]["median_us"]
        ratio = times["plan"]["median_us"] / found["compiled"]
        return {"times": times, "ratio": round(ratio, 4), "equal": not differing, "differing": differing[:5]}

    def in_worker() -> dict[str, Any]:
        # A request is a row of steps, for its state is cleared when it begins.
        row = make_unit([recording.trace], (steps,))
        plan = replace(whole_plan(row, whole_card(), 0), microbatches=2)
        cpu = Same({n: t.cpu() for n, t in inputs.items()})
        with opened(SimpleNamespace(weights=weights), {"single": plan}, 1.0, "auto") as stepper:
            run_offline(stepper, [cpu] * 2, is_timed=True, skips=SKIPPED)
            ran = run_offline(stepper, [cpu] * 20, is_timed=True, skips=SKIPPED)
            per_s = steps * rate_per_s(ran.results)
        again = medians_us({"compiled": compiled.replay})["compiled"]["median_us"]
        return {
            "us a step": round(1e6 / per_s, 1),
            "compiled us": again,
            "ratio": round(1e6 / per_s / again, 4),
        }

    log.attempt("graph", in_process)
    log.attempt("worker", in_worker)


# Pairs ------------------------------------------------------------------------------------------------------


def pairs(log: Log, args: argparse.Namespace) -> None:
    """One family on every pair: policies over `ipc`, then the plan over the other transports."""
    from benchmarks.gpu_execute_pairs import (
        best_coarse,
        compared,
        half_rates,
        hidden,
        host_rates,
        keep_plans,
        make_plans,
        own_times,
        priced,
        rates,
        slower_rates,
        wanted,
    )

    built = build(FAMILIES[args.family])
    counts = [len(g.trace.launches) for g in built.unit.graphs]
    log.put("family", {"name": args.family, "launches": counts, "counts": built.unit.counts})
    with alone(args):
        own = log.attempt("own times", lambda: own_times(built, whole_card()))
    if own is None or "error" in own:
        return
    expected = wanted(built, 2)
    for text, link in PAIRS:
        if args.pair and args.pair not in text:
            continue
        cluster, costs, scale = priced(built, text, link, own["launches"])
        plans = make_plans(built, costs, cluster, POLICIES, MICROBATCHES)
        factor, best = scale.factor, best_coarse(plans)
        chosen = {name: plans[name] for name in dict.fromkeys(("throughput", "data-parallel", best))}
        keep_plans(args.plans, f"{args.family}.{_short(text)}", chosen, scale)
        simulated = {name: round(plan.simulated_per_s, 3) for name, plan in plans.items()}
        log.put(f"{text} priced", {"scale": factor, "covered": scale.covered, "simulated per s": simulated})
        with alone(args):
            found = log.attempt(f"{text} ipc", rates, built, chosen, factor, "ipc", args.seconds, expected)
        if found and "error" not in found:
            log.put(f"{text} compared", compared(found))
        if args.slower:
            factors = [factor * float(n) for n in args.slower.split(",")]
            with alone(args):
                log.attempt(f"{text} slower", slower_rates, built, chosen, factors, args.seconds)
        if args.halves:
            single = make_plans(built, costs, cluster, ("single",), MICROBATCHES)["single"]
            plan = plans["throughput"]
            log.attempt(f"{text} halves", half_rates, built, plan, single, factor, args.seconds)
        if args.hidden:
            log.attempt(f"{text} hidden", hidden, built, plans["throughput"], factor)
        if args.host:
            options = (built, costs, cluster, factor, MICROBATCHES, args.seconds, expected)
            log.attempt(f"{text} host", host_rates, *options)


def _short(text: str) -> str:
    return "+".join(word.rpartition("=")[2] for word in text.split(","))


# Loads ------------------------------------------------------------------------------------------------------


def loads(log: Log, args: argparse.Namespace) -> None:
    """One load, with a part of the layers of its model."""
    from benchmarks.gpu_execute_loads import ROWS, measured, searched

    row = ROWS[args.family]
    found = searched(row)
    log.put("load", {**asdict(row), "search s": round(time.monotonic() - log.began, 1)})
    with alone(args):
        log.attempt("measured", measured, row, found, log.put)


# Soak -------------------------------------------------------------------------------------------------------


def pipelining(log: Log, args: argparse.Namespace) -> None:
    """One placement of a decode over both cards, with more and more microbatches in flight."""
    from benchmarks.gpu_execute_pairs import make_plans, own_times, priced, rates, wanted

    from tessera.simulate import SteadyRates

    built = build(FAMILIES["gpt-oss-decode"])
    with alone(args):
        own = log.attempt("own times", lambda: own_times(built, whole_card()))
    if own is None or "error" in own:
        return
    text, link = PAIRS[0]
    cluster, costs, scale = priced(built, text, link, own["launches"])
    (plan,) = make_plans(built, costs, cluster, ("single-placement",), 2).values()
    simulate, plans = SteadyRates(), {}
    for name, num in PIPELINED.items():
        one = replace(plan, microbatches=num, by_microbatches=(), max_microbatches=None)
        plans[name] = replace(one, simulated_per_s=simulate(one))
    used = [cluster.names[d] for d in plan.used]
    log.put("placement", {"devices": used, "scale": scale.factor, "layers": 4, "batch": plan.batch})
    with alone(args):
        log.attempt(f"{text} ipc", rates, built, plans, scale.factor, "ipc", args.seconds, wanted(built, 2))


def soak(log: Log, args: argparse.Namespace) -> None:
    """Many requests with changes of policy and kills of workers among them."""
    from benchmarks.gpu_execute_pairs import run_soak

    small = Family("llama-3-8b", 2, (("prefill", 2, 64, 4), ("decode", 2, 68, 0)))
    built = build(small)
    text, link = PAIRS[0]
    log.attempt("soak", run_soak, built, text, link, MICROBATCHES, args.soak, args.kills, log.put)


# All --------------------------------------------------------------------------------------------------------


def kept_parts(path: Path | None, again: list[str]) -> dict[str, Any]:
    """Parts of an earlier run that are not run again, each with the command that it is from."""
    if path is None:
        return {}
    old = json.loads(path.read_text())
    return {
        name: {"from": old["command"], **part}
        for name, part in old.items()
        if name.split("-")[0] in PARTS and name not in again
    }


def run_parts(args: argparse.Namespace, command: str) -> None:
    """Each part in a process of its own; what it found is joined into NAME.json and NAME.md."""
    from benchmarks.gpu_execute_table import table

    began = time.monotonic()
    jobs = [
        (part, family)
        for part in args.parts.split(",")
        for family in {"pairs": args.families.split(","), "loads": args.loads.split(",")}.get(part, [""])
    ]
    kept = kept_parts(args.keep, [part for part, _ in jobs])
    whole: dict[str, Any] = {"command": command, "about": about(), **kept}
    for part, family in jobs:
        left = args.limit - (time.monotonic() - began)
        name = part + (f"-{family}" if family else "")
        path = args.out / f"{args.name}.{name}.json"
        print(f"== {name}, {left:.0f} s left", flush=True)
        if left < 10:
            whole[name] = {"skipped": "no time left"}
            continue
        call = [sys.executable, __file__, *sys.argv[1:], "--child", part, "--family", family]
        call += ["--result", str(path)]
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTHONUNBUFFERED": "1"}
        if part == "soak" and args.kills:  # a client that dies at work takes its neighbours under MPS with it
            environment |= {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
        try:
            done = subprocess.run(call, timeout=min(left, args.part_limit), env=environment, check=False)
            ended = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "stopped at its time limit"
        found = json.loads(path.read_text()) if path.exists() else {}
        path.unlink(missing_ok=True)
        whole[name] = {**found, "ended": ended}
        (args.out / f"{args.name}.json").write_text(json.dumps(whole, indent=1) + "\n")
        (args.out / f"{args.name}.md").write_text(table(whole))
    print(f"wrote {args.out / (args.name + '.json')}", flush=True)


def main() -> None:
    """All parts, or one as a child."""
    parser = argparse.ArgumentParser(description="Plans run on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="execute")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--families", default="llama,gpt-oss,sd3.5")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--keep", type=Path, default=None, help="results whose other parts are taken over")
    parser.add_argument("--pair", default="", help="only pairs whose devices contain this")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.8,
        help="of a round of one policy, if longer than thirty requests a microbatch",
    )
    parser.add_argument("--soak", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--halves", action="store_true", help="the plan over nvshmem as well")
    parser.add_argument("--plans", type=Path, default=Path("plans"), help="where plans are kept")
    parser.add_argument("--host", action="store_true", help="the host transport as well")
    parser.add_argument("--slower", default="", help="multiples of the time scale to measure with as well")
    parser.add_argument("--lock", type=Path, default=None, help="a file, shared by runs that measure in turn")
    parser.add_argument("--hidden", action="store_true", help="a stamped run as well")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all parts")
    parser.add_argument("--part-limit", type=float, default=150.0, help="seconds for one part")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--family", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        log = Log(args.result)
        parts = {"probe": probe, "overhead": overhead, "pairs": pairs, "loads": loads}
        parts |= {"pipelining": pipelining, "soak": soak}
        what = parts[args.child]
        try:
            what(log, args)
        except Exception:  # noqa: BLE001 - the parent reads what went wrong from the file
            print(traceback.format_exc(), flush=True)
            log.put("error", traceback.format_exc()[-4000:])
    else:
        words = ["OUT" if word == str(args.out) else word for word in sys.argv[1:]]
        run_parts(args, "python benchmarks/gpu_execute.py " + " ".join(words))


if __name__ == "__main__":
    main()
