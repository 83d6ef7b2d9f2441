"""Measured profiles of real steps on one GPU: every distinct launch, the whole step, and how they add up.

    python -m benchmarks.gpu_profile --out DIR [--fronts torch,inductor,probes] [--families llama-3-8b,...]

For each step of the five families, at real widths with few layers (random weights, bf16):

1. record it by the torch front end on cuda:0, and, while there is time, by Inductor;
2. time every distinct launch and the whole step as `tessera profile` does (`CudaTimer`, `measure`);
3. write the figures to DIR/profile.json and the launches themselves to DIR/launches.json.gz.

`compare_profile.py` then holds the models and the public tables against these figures, on any machine. After
the steps, one of them is measured on parts of the card, and the links of the card are measured. One failure
does not stop the others; its traceback is in the JSON. Where a failure takes the CUDA context with it, the
script starts itself again and goes on behind it. The front `probes` measures single operators at shapes that
no model has (`probes.py`), to fit costs to.
"""

import argparse
import dataclasses
import gc
import gzip
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from benchmarks import probes
from benchmarks.gpu_capture import Case, build
from torch.nn.attention import sdpa_kernel

from tessera.capture import Workload, record
from tessera.capture.record import PORTABLE
from tessera.execute.cuda.timing import CudaTimer
from tessera.ir import Device, DeviceKind, Trace
from tessera.profile import works
from tessera.profile.measured import Measured, distinct, measure
from tessera.profile.store import Machine, Store, until

LAYERS = 8
# Seconds one launch may take to be timed, and after which nothing new is begun.
LAUNCH_CAP_S, BEGIN_UNTIL_S = 0.06, 190.0

CASES = (
    Case("llama-3-8b", "decode", 32, 2048),
    Case("llama-3-8b", "prefill", 2, 1024),
    Case("mamba-codestral-7b", "decode", 32, 2048),
    Case("gpt-oss-20b", "decode", 32, 2048),
    Case("qwen2.5-vl-7b", "decode", 32, 2048),
    Case("sd3.5-medium", "denoise", 1, 4096),
    Case("qwen2.5-vl-7b", "prefill", 2, 1024),
    Case("gpt-oss-20b", "prefill", 2, 1024),
    # torch 2.11's Inductor fails to compile the split scan of this step.
    Case("mamba-codestral-7b", "prefill", 1, 512, changes=(("split_reductions", False),)),
)
# Steps that are recorded by Inductor as well; compiling one takes 15 to 35 s.
COMPILED = (CASES[0], CASES[5])
PARTS = (32, 100)
MAX_RESTARTS = 4


@dataclass
class Results:
    """What has been found so far, written after every case."""

    out: Path
    began: float
    rows: list[dict[str, Any]]
    extras: dict[str, Any]
    traces: dict[str, Any]
    restarts: int = 0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.time() - self.began

    @classmethod
    def load(cls, out: Path) -> "Results":
        """As they were when the script started itself again."""
        found = json.loads((out / "profile.json").read_text())
        traces = json.loads(gzip.decompress((out / "launches.json.gz").read_bytes()))
        return cls(out, found["began"], found["rows"], found["extras"], traces, found["restarts"])

    def has(self, name: str, front: str) -> bool:
        """True if a row is there already."""
        return any((row["name"], row["front"]) == (name, front) for row in self.rows)

    def write(self) -> None:
        """Both files."""
        document = {"machine": machine(), "layers": LAYERS, "rows": self.rows, "extras": self.extras}
        document |= {"began": self.began, "restarts": self.restarts}
        (self.out / "profile.json").write_text(json.dumps(document, indent=1) + "\n")
        packed = gzip.compress(json.dumps(self.traces).encode(), mtime=0)
        (self.out / "launches.json.gz").write_bytes(packed)


def machine() -> dict[str, str]:
    """What it ran on."""
    import transformers

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


# Recording ------------------------------------------------------------------------------------------------


def by_torch(workload: Workload, case: Case) -> Trace:
    """The operators that the model itself dispatches."""
    with sdpa_kernel(PORTABLE):
        return record(workload)


def by_inductor(workload: Workload, case: Case) -> Trace:
    """The kernels that Inductor makes of the step."""
    from tessera.capture.inductor import record_inductor

    return record_inductor(workload, case.portable, **dict(case.changes)).trace


def tensors_of(workload: Workload, trace: Trace) -> dict[str, torch.Tensor]:
    """Weights, inputs and state by name."""
    drawing = workload.drawing(trace)
    return {**drawing.weights(), **drawing.make_inputs(0), **drawing.make_state(0)}


# Measuring ------------------------------------------------------------------------------------------------


def device_of(num_sms: int = 0) -> Device:
    """The card, or a part of it."""
    card = torch.cuda.get_device_properties(0)
    name = f"cuda:0/sm={num_sms}" if num_sms else "cuda:0"
    return Device(name, DeviceKind.CUDA, "", card.total_memory, num_sms=num_sms)


def timed(
    trace: Trace, given: dict[str, torch.Tensor], store: Path, stream: Any = None, num_sms: int = 0
) -> tuple[Measured, int]:
    """The step measured, and the cache size that told cold from warm."""
    timer = CudaTimer(trace, 0, lambda: (given, ()), stream, num_sms)

    def opened(machine: Machine) -> Store:
        return Store(store, machine, any_clock=True)  # the clock of every step is in its row

    found = measure(trace, device_of(num_sms), timer, opened, enough=until(LAUNCH_CAP_S))
    return found, timer.cache_bytes


def figures(trace: Trace, found: Measured, cache_bytes: int) -> dict[str, Any]:
    """One measured step in numbers; launches that are alike are one row."""
    counted = works(trace)
    reasons = {x.launches[0]: x.why for x in found.missed}
    launches = []
    for number, group in enumerate(distinct(trace, cache_bytes)):
        first = group.launches[0]
        timing, work = found.timings[first], counted[first]
        launches.append(
            {
                "place": number,
                "launch": first,
                "kernel": trace.kernel_of(first).name,
                "class": work.op.value,
                "dtype": work.dtype,
                "flops": work.flops,
                "bytes": work.num_bytes,
                "count": len(group.launches),
                "cold_bytes": sum(trace.buffers[b].size_bytes for b in group.cold),
                "us": timing.us if timing else None,
                "half_us": timing.half_us if timing else None,
                "num": timing.num if timing else 0,
                "missed": reasons.get(first, ""),
            }
        )
    return {
        "num_launches": len(trace.launches),
        "num_distinct": found.num_distinct,
        "num_measured": sum(t is not None for t in found.timings),
        "clock_mhz": found.machine.clock_mhz,
        "identity": dict(found.machine.identity),
        "sum_us": sum(t.us for t in found.timings if t),
        "whole_us": found.whole.us if found.whole else None,
        "whole_half_us": found.whole.half_us if found.whole else None,
        "notes": list(found.notes),
        "launches": launches,
    }


def sample(trace: Trace, cache_bytes: int) -> Any:
    """The trace with one launch of each kind and without code: enough to price them elsewhere."""
    kernels = tuple(dataclasses.replace(k, ptx="", source="") for k in trace.kernels)
    buffers = tuple(dataclasses.replace(b, constant_hex="") for b in trace.buffers)
    firsts = tuple(trace.launches[g.launches[0]] for g in distinct(trace, cache_bytes))
    return msgspec.to_builtins(
        dataclasses.replace(trace, kernels=kernels, buffers=buffers, launches=firsts, outputs=(), aliases=())
    )


# Cases ----------------------------------------------------------------------------------------------------


def run_case(
    results: Results,
    case: Case,
    front: str,
    recorder: Callable[[Workload, Case], Trace],
    make: Callable[[], Workload] | None = None,
) -> None:
    """One row; whatever goes wrong is written into it. `make`: of a step that no model has."""
    row: dict[str, Any] = {"name": case.name, "front": front, "batch": case.batch, "context": case.context}
    if results.has(case.name, front):
        return
    if results.seconds > BEGIN_UNTIL_S:
        row["skipped"] = f"{results.seconds:.0f} s had passed"
        results.rows.append(row)
        return
    print(f"[{results.seconds:5.0f} s] {case.name}, {front}", flush=True)
    try:
        measure_case(results, row, case, make() if make else build(case, LAYERS), recorder)
    except Exception:  # noqa: BLE001 - one family must not stop the others
        row["error"] = traceback.format_exc()
        print(row["error"][-2500:], flush=True)
        if not is_alive():
            start_again(results)
    results.rows.append(row)
    results.write()
    gc.collect()
    torch.cuda.empty_cache()


def measure_case(
    results: Results,
    row: dict[str, Any],
    case: Case,
    workload: Workload,
    recorder: Callable[[Workload, Case], Trace],
) -> None:
    """Records and measures one step into its row."""
    began = time.monotonic()
    trace = recorder(workload, case)
    row["capture_s"] = round(time.monotonic() - began, 2)
    began = time.monotonic()
    found, cache_bytes = timed(trace, tensors_of(workload, trace), results.out / "store.jsonl")
    row["measure_s"] = round(time.monotonic() - began, 2)
    row |= figures(trace, found, cache_bytes)
    results.traces[f"{case.name}, {row['front']}"] = sample(trace, cache_bytes)
    shown = {k: row[k] for k in ("num_launches", "num_distinct", "num_measured", "sum_us", "whole_us")}
    print(f"          {shown} {row['capture_s']} + {row['measure_s']} s", flush=True)


def run_probes(results: Results, only: str = "") -> None:
    """Single operators, group by group."""
    for name, group in probes.GROUPS.items():
        case = Case("probe", name, 1, 1)
        if only not in case.name:
            continue
        run_case(results, case, "torch", by_torch, partial(probes.workload, name, group, "cuda:0"))


def is_alive() -> bool:
    """False once an error has taken the CUDA context with it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def start_again(results: Results) -> None:
    """This script in a new process, with what was found; the store knows which launch to leave out."""
    if results.restarts < MAX_RESTARTS:
        results.restarts += 1
        results.write()
        script = [
            sys.executable,
            "-m",
            "benchmarks.gpu_profile",
            "--resume",
            *(a for a in sys.argv[1:] if a != "--resume"),
        ]
        print(f"[{results.seconds:5.0f} s] the device is gone: starting again", flush=True)
        os.execv(sys.executable, script)


def attempt(results: Results, name: str, work: Callable[[Results], Any]) -> None:
    """Something beside the steps; whatever goes wrong is written down."""
    if name in results.extras or results.seconds > BEGIN_UNTIL_S:
        return
    print(f"[{results.seconds:5.0f} s] {name}", flush=True)
    try:
        results.extras[name] = work(results)
        print(f"          {json.dumps(results.extras[name])[:600]}", flush=True)
    except Exception:  # noqa: BLE001 - likewise
        results.extras[name] = {"error": traceback.format_exc()}
        print(results.extras[name]["error"][-2500:], flush=True)
    results.write()


def parts(results: Results) -> Any:
    """The first step on parts of the card: whole step and sum of launches of each."""
    from tessera.execute.cuda.device import cut

    workload = build(CASES[0], LAYERS)
    trace = by_torch(workload, CASES[0])
    given = tensors_of(workload, trace)
    found = {}
    for num_sms, part in zip(PARTS, cut(0, PARTS), strict=True):
        measured, cache = timed(trace, given, results.out / "store.jsonl", part.stream(), num_sms)
        found[f"cuda:0/sm={num_sms}"] = figures(trace, measured, cache)
    return found


def links(results: Results) -> Any:
    """What joins two workers on the card, by transport."""
    from tessera.flow import time_link
    from tessera.profile import parse_devices
    from tessera.profile.store import SIZES, fit_link

    a, b = parse_devices("cuda:0,cuda:0")
    found = {}
    for transport in ("ipc", "host"):
        via, times = time_link(a, b, SIZES, transport)
        found[transport] = asdict(fit_link(a.name, b.name, via, times.alone, times.both))
    return found


def main() -> None:
    """Runs everything and writes after each part."""
    parser = argparse.ArgumentParser(description="Measured profiles of real steps on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fronts", default="torch,inductor", help="of torch, inductor, probes")
    parser.add_argument("--families", default="", help="models to run by the chosen fronts; all if not given")
    parser.add_argument("--only", default="", help="run the cases whose name holds this")
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    options.out.mkdir(parents=True, exist_ok=True)
    fresh = Results(options.out, time.time(), [], {}, {})
    results = Results.load(options.out) if options.resume else fresh
    families = [name for name in options.families.split(",") if name]
    fronts = options.fronts.split(",")
    chosen = [c for c in CASES if options.only in c.name and (not families or c.model in families)]
    if "probes" in fronts:
        run_probes(results, options.only)
    for case in chosen if "torch" in fronts else ():
        run_case(results, case, "torch", by_torch)
    if "torch" in fronts and not options.only and not families:
        attempt(results, "links", links)
        attempt(results, "parts", parts)
    for case in chosen if "inductor" in fronts else ():
        # Compiling takes a while: unless families are named, two steps stand for all.
        if families or case in COMPILED:
            run_case(results, case, "inductor", by_inductor)
    print(f"[{results.seconds:5.0f} s] done", flush=True)


if __name__ == "__main__":
    main()
