"""Plans run on one GPU: overhead, unlike pairs of devices on one card, and a long run with switches.

    python benchmarks/gpu_execute.py --out benchmarks/results --name execute_h200_202611

Parts, each in a process of its own with a time limit, its results written as they come:

probe     how well the turnstile keeps time, where kernels of partitions run, which transports there are
overhead  a plan with everything on one device against the compiled model as a CUDA graph
pairs     for each family and pair of devices: the throughput plan, data-parallel and the splits, all by the
          same executor in one process, against what the plan's linear program predicted
soak      1,000 requests in a row with a change of policy at random: outputs equal, memory flat

Partitions of one card are priced by measuring, stretched devices by the cost model; rates on stretched
devices are modelled rates: what was measured, times the time scale. Real widths, few layers, random weights.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

PARTS = ("probe", "overhead", "pairs", "soak")
PAIRS = (
    ("cuda:0/sm=100,cuda:0/sm=32", "card"),
    ("cuda:0/as=a100,cuda:0/as=l40s", "pcie4"),
    ("cuda:0/as=h20,cuda:0/as=l40s", "pcie4"),
)
POLICIES = ("throughput", "data-parallel", "prefill-decode", "attention-ffn", "layer-pipeline")
SLOTS = 6


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
    "mamba": Family("mamba-codestral-7b", 4, (("decode", 64, 512, 0),)),
    "sd3.5": Family("sd3.5-medium", 4, (("denoise", 1, 4096, 0),)),
}


class Log:
    """Results of one part, on disk after every entry."""

    def __init__(self, path: Path) -> None:
        self._path, self._began = path, time.monotonic()
        self.found: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Adds or replaces an entry."""
        self.found[name] = value
        self.found["seconds"] = round(time.monotonic() - self._began, 1)
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")
        failed = value["error"] if isinstance(value, dict) and "error" in value else ""
        text = str(failed)[-1500:] if failed else json.dumps(value)[:700]
        print(f"[{self.found['seconds']:6.1f} s] {name}: {text}", flush=True)

    def attempt(self, name: str, what: Callable[[], Any]) -> Any:
        """Runs one experiment; a failure is written down and does not stop the rest."""
        try:
            value = what()
        except Exception:  # noqa: BLE001 - one experiment must not stop the others
            self.put(name, {"error": traceback.format_exc()[-3000:]})
            return None
        self.put(name, value)
        return value


# Workloads --------------------------------------------------------------------------------------------------


class Request:
    """A request whose first state is made once and kept on the GPU."""

    def __init__(self, workloads: list[Any], seed: int) -> None:
        from tessera.flow import UnitRequest

        self._request = UnitRequest(workloads, workloads[0].make_inputs(seed), seed)
        self._state: Any = None

    def state(self) -> Any:
        """The state it starts with; whoever runs it copies."""
        if self._state is None:
            self._state = self._request.state()
        return self._state

    def inputs(self, step: int, run: int, last: Any) -> Any:
        """The inputs of a run."""
        return self._request.inputs(step, run, last)


@dataclass(frozen=True)
class Built:
    """A family on the GPU: its traces, the weights, and its requests by seed."""

    unit: Any
    workloads: list[Any]
    weights: dict[str, Any]
    made: dict[int, Request]

    def request(self, seed: int) -> Request:
        """One request, made once."""
        if seed not in self.made:
            self.made[seed] = Request(self.workloads, seed)
        return self.made[seed]


def build(family: Family) -> Built:
    """Builds the steps on the GPU and records them by the torch front end."""
    import torch
    from benchmarks.gpu_capture import _build
    from torch.nn.attention import sdpa_kernel

    from tessera.capture.inductor import on_device
    from tessera.capture.record import PORTABLE, record
    from tessera.flow import make_unit
    from tessera.ir import Step

    workloads, traces = [], []
    for kind, batch, context, reserve in family.steps:
        with torch.device("cuda"):
            workload = _build(Step(family.model, kind, batch, context, reserve=reserve), family.layers)
        workloads.append(on_device(workload, "cuda:0"))
        with sdpa_kernel(PORTABLE):
            traces.append(record(workloads[-1]))
    return Built(make_unit(traces), workloads, workloads[0].weights(), {})


def whole_card() -> Any:
    """A cluster of the card alone."""
    from tessera.ir import Cluster
    from tessera.profile import parse_devices

    return Cluster(parse_devices("cuda:0"), ())


# Probe ------------------------------------------------------------------------------------------------------


def probe(log: Log, args: argparse.Namespace) -> None:
    """What the machine and the building blocks do."""
    from benchmarks.gpu_execute_probe import (
        graph_over_partitions,
        partitions_are_disjoint,
        parts_with_unused_sms,
        priorities_are_kept,
        slices_of_storage,
        stretched_pair,
        stretched_times,
    )

    from tessera.execute.cuda.probe import transports

    log.attempt("transports", lambda: [vars_of(t) for t in transports()])
    log.attempt("slices of storage", slices_of_storage)
    log.attempt("stretched launches", stretched_times)
    log.attempt("stretched pair", stretched_pair)
    log.attempt("partitions", partitions_are_disjoint)
    log.attempt("parts with SMs left over", parts_with_unused_sms)
    log.attempt("priorities of streams", priorities_are_kept)
    log.attempt("one graph over two partitions", graph_over_partitions)


def vars_of(record: Any) -> dict[str, Any]:
    """A slotted record as a mapping."""
    return {name: getattr(record, name) for name in record.__slots__}


# Overhead ---------------------------------------------------------------------------------------------------


def overhead(log: Log, args: argparse.Namespace) -> None:
    """All on one device against the compiled model, both as CUDA graphs, timed in turn."""
    import torch
    from benchmarks.gpu_capture import Case, as_graph, copies, differences, medians_us
    from benchmarks.gpu_capture import build as build_case

    from tessera.analyze.accesses import triton_accesses
    from tessera.capture.inductor import record_inductor
    from tessera.execute.cuda.captured import Captured
    from tessera.execute.cuda.engine import CudaEngine
    from tessera.execute.cuda.measure import whole_plan
    from tessera.flow import UnitRequest, make_unit

    workload = build_case(Case("llama-3-8b", "decode", 32, 2048), args.layers)
    recording = record_inductor(workload, triton_accesses, False)
    log.put("launches", len(recording.trace.launches))
    weights, inputs, state = workload.weights(), workload.make_inputs(0), workload.make_state(0)
    wanted_state = copies(state)
    wanted = {n: t.clone() for n, t in recording.code.run(weights, inputs, wanted_state).items()}
    compiled = as_graph(lambda: recording.code.run(weights, inputs, state))
    plan = whole_plan(make_unit([recording.trace]), whole_card(), 0)
    for name, kernels in (("compiled kernels", {0: recording.relaunch}), ("PTX text", None)):

        def measured(kernels: Any = kernels) -> dict[str, Any]:
            with Captured([plan], weights, kernels) as captured:
                (result,) = CudaEngine(captured).run([UnitRequest([workload], inputs, 0)])
                torch.cuda.synchronize()
                found = {n: t.view(torch.uint8) for n, t in result.state.items()}
                flat = {n: t.reshape(-1).view(torch.uint8) for n, t in wanted_state.items()}
                differing = differences(wanted, result.outputs[0]) + differences(flat, found)
                graph = captured.graph(0, captured.programs[0][0][0])
                times = medians_us({"compiled": compiled.replay, "plan": graph.replay})
            ratio = times["plan"]["median_us"] / times["compiled"]["median_us"]
            return {
                "times": times,
                "ratio": round(ratio, 4),
                "equal": not differing,
                "differing": differing[:5],
            }

        log.attempt(name, measured)


# Pairs ------------------------------------------------------------------------------------------------------


def pairs(log: Log, args: argparse.Namespace) -> None:
    """One family on every pair."""
    from benchmarks.gpu_execute_pairs import own_times, run_pair

    built = build(FAMILIES[args.family])
    counts = [len(g.trace.launches) for g in built.unit.graphs]
    log.put("family", {"name": args.family, "launches": counts, "counts": built.unit.counts})
    own = log.attempt("own times", lambda: own_times(built, whole_card()))
    if own is None or "error" in own:
        return
    for devices, link in PAIRS:
        if args.pair and args.pair not in devices:
            continue
        run_pair(log, built, devices, link, own["launches"], POLICIES, SLOTS, args.seconds)


# Soak -------------------------------------------------------------------------------------------------------


def soak(log: Log, args: argparse.Namespace) -> None:
    """Many requests with changes of policy among them."""
    from benchmarks.gpu_execute_pairs import run_soak

    small = Family("llama-3-8b", 2, (("prefill", 2, 64, 4), ("decode", 2, 68, 0)))
    built = build(small)
    log.attempt("soak", lambda: run_soak(built, "cuda:0/sm=100,cuda:0/sm=32", SLOTS, args.soak))


# All --------------------------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """What it runs on."""
    import torch

    if not torch.cuda.is_available():
        return {"torch": torch.__version__, "gpu": "none"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "sms": properties.multi_processor_count, "torch": torch.__version__,
        "cuda": torch.version.cuda, "python": sys.version.split()[0],
    }  # fmt: skip


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


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """One family's pairs of an earlier run with those that were run again; each is kept whole."""
    kept = {k: v for k, v in old.items() if k.startswith("cuda:") and k not in new and not _is_half(k, old)}
    again = [k.removesuffix(" rates") for k in new if k.endswith(" rates")]
    return {**new, **({"from": old.get("from"), "again": again, **kept} if kept else {})}


def _is_half(key: str, part: dict[str, Any]) -> bool:
    """True of an entry of a pair that was priced and not run."""
    return f"{key.rpartition(' ')[0]} rates" not in part


def run_parts(args: argparse.Namespace, command: str) -> None:
    """Each part in a process of its own; what it found is joined into NAME.json and NAME.md."""
    from benchmarks.gpu_execute_table import table

    began = time.monotonic()
    jobs = [
        (part, family)
        for part in args.parts.split(",")
        for family in (args.families.split(",") if part == "pairs" else [""])
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
        try:
            done = subprocess.run(call, timeout=min(left, args.part_limit), env=environment, check=False)
            ended = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "stopped at its time limit"
        found = json.loads(path.read_text()) if path.exists() else {}
        path.unlink(missing_ok=True)
        found = joined(kept.get(name, {}), found) if part == "pairs" else found
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
    parser.add_argument("--families", default="llama,mamba,sd3.5")
    parser.add_argument("--keep", type=Path, default=None, help="results whose other parts are taken over")
    parser.add_argument("--pair", default="", help="only pairs whose devices contain this")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.8,
        help="of a round of one policy, if longer than five requests a slot",
    )
    parser.add_argument("--soak", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all parts")
    parser.add_argument("--part-limit", type=float, default=150.0, help="seconds for one part")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--family", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        log = Log(args.result)
        what = {"probe": probe, "overhead": overhead, "pairs": pairs, "soak": soak}[args.child]
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
