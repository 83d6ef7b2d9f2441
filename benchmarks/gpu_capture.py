"""Capture and replay of compiled models on one GPU: exact launches, bit-equal replay, ratio of times.

    python benchmarks/gpu_capture.py --out benchmarks/results --name capture_h200_202611

For each step of each family, at real widths with few layers (random weights from the configuration):

1. compile it with Inductor and record the launches of the compiled code (`record_inductor`), with accesses
   proved from PTX;
2. replay the launches as one CUDA graph on fresh copies of the same state, from PTX text loaded by the
   driver; outputs and state must be bit-equal to the compiled model's;
3. time the compiled model as a CUDA graph and the replay, alternating, and give the ratio of the medians.

One step that fails does not stop the others; its traceback is in the JSON. `torch.compile` of the same step
with its own settings, as a CUDA graph, is timed beside them while there is time.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cuda_replay import CudaReplay
from tessera.analyze import build_graph
from tessera.capture import Workload
from tessera.capture.inductor import Recording, record_inductor
from tessera.capture.models import catalog
from tessera.capture.models.hf import built_in
from tessera.capture.workload import on_device
from tessera.errors import TesseraError
from tessera.ir import Origin, Step, Trace

LAYERS = 8
REPLAYS = 60
# Seconds after which no further torch.compile is made for comparison, and no further step is begun.
COMPARE_UNTIL_S, BEGIN_UNTIL_S = 160.0, 400.0

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One step of one family."""

    model: str
    kind: str
    batch: int
    context: int
    # Attention that runs on every GPU, instead of what torch prefers on this one.
    portable: bool = False
    # Settings of Inductor that this step needs.
    changes: tuple[tuple[str, bool], ...] = ()

    @property
    def name(self) -> str:
        """For progress lines and tables."""
        return f"{self.model} {self.kind}" + (", portable attention" if self.portable else "")


CASES = (
    Case("llama-3-8b", "decode", 32, 2048),
    Case("mamba-codestral-7b", "decode", 32, 2048),
    Case("gpt-oss-20b", "decode", 32, 2048),
    Case("qwen2.5-vl-7b", "decode", 32, 2048),
    Case("sd3.5-medium", "denoise", 1, 4096),
    Case("llama-3-8b", "prefill", 2, 1024),
    Case("qwen2.5-vl-7b", "prefill", 2, 1024),
    # torch 2.11 fails to compile the split scan of this step.
    Case("mamba-codestral-7b", "prefill", 1, 512, changes=(("split_reductions", False),)),
    Case("gpt-oss-20b", "prefill", 2, 1024),
    Case("llama-3-8b", "decode", 32, 2048, portable=True),
)


def build(case: Case, layers: int) -> Workload:
    """The family at its real widths with few layers, made on the GPU."""
    step = Step(case.model, case.kind, case.batch, case.context)
    with torch.device("cuda"):
        workload = _build(step, layers)
    return on_device(workload, "cuda:0")


def _build(step: Step, layers: int) -> Workload:
    if step.model in catalog.DENOISERS:
        from tessera.capture.models import denoisers

        name, config, num_words, dtype = catalog.DENOISERS[step.model]
        dual = tuple(range(min(layers, len(config["dual_attention_layers"]))))
        config = {**config, "num_layers": layers, "dual_attention_layers": dual}
        return denoisers.built_in(name, config, num_words, dtype, step)
    family, given, dtype = catalog.LANGUAGE[step.model]
    sizes_of: dict[str, Any] = dict(given)
    if "text_config" in sizes_of:
        sizes_of["text_config"] = {**sizes_of["text_config"], "num_hidden_layers": layers}
        sizes_of["vision_config"] = {**sizes_of["vision_config"], "depth": 1, "fullatt_block_indexes": [0]}
    else:
        sizes_of["num_hidden_layers"] = layers
    return built_in(family, sizes_of, dtype, step)


# Runs -----------------------------------------------------------------------------------------------------


def copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Own memory for each."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def as_graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A call captured as a CUDA graph, after two runs outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def medians_us(runs: Mapping[str, Callable[[], Any]], num: int = REPLAYS) -> dict[str, dict[str, float]]:
    """Microseconds of each, measured in turn so that all see the same clocks."""
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(num):
        names = list(runs) if turn % 2 == 0 else list(runs)[::-1]
        for name in names:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the launch is queued before the clock starts
            start.record()
            runs[name]()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3)
    return {
        name: {"median_us": statistics.median(t), "min_us": min(t), "p90_us": sorted(t)[int(0.9 * len(t))]}
        for name, t in times.items()
    }


def differences(wanted: Tensors, found: Tensors) -> list[str]:
    """Names whose bits differ."""
    return [n for n in wanted if not torch.equal(_bits(wanted[n]), _bits(found[n]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# One case -------------------------------------------------------------------------------------------------


def describe(trace: Trace) -> dict[str, Any]:
    """What was captured."""
    origins = [trace.kernel_of(i).origin for i in range(len(trace.launches))]
    operators: dict[str, int] = {}
    for i, origin in enumerate(origins):
        if origin is Origin.ATEN:
            operators[trace.kernel_of(i).name] = operators.get(trace.kernel_of(i).name, 0) + 1
    immovable = {trace.kernel_of(i).name: x.immovable for i, x in enumerate(trace.launches) if x.immovable}
    return {
        "launches": len(trace.launches),
        "triton_launches": sum(o is Origin.TRITON for o in origins),
        "triton_kernels": sum(k.origin is Origin.TRITON for k in trace.kernels),
        "operators": operators,
        "buffers": len(trace.buffers),
        "immovable_launches": sum(bool(x.immovable) for x in trace.launches),
        "immovable": immovable,
        "edges": len(build_graph(trace).edges),
    }


def measure(case: Case, layers: int, row: dict[str, Any], compare: bool) -> None:
    """Fills the row; what has been found stays there if a later part fails."""
    began = time.monotonic()
    workload = build(case, layers)
    weights = workload.weights()
    row["weight_bytes"] = sum(t.numel() * t.itemsize for t in weights.values())
    row["build_s"] = round(time.monotonic() - began, 2)
    began = time.monotonic()
    recording = record_inductor(workload, case.portable, **dict(case.changes))
    row["capture_s"] = round(time.monotonic() - began, 2)
    began = time.monotonic()
    row["trace"] = describe(recording.trace)
    row["graph_s"] = round(time.monotonic() - began, 2)
    replays = check(workload, recording, row)
    inputs, state = workload.make_inputs(0), workload.make_state(0)
    compiled = as_graph(lambda: recording.code.run(weights, inputs, state))
    runs: dict[str, Callable[[], Any]] = {"compiled": compiled.replay}
    runs.update({name: replay.run for name, replay in replays.items()})
    if compare:
        add_torch_compile(workload, recording, runs, row)
    times = medians_us(runs)
    row["times"] = times
    row["ratio"] = {n: round(t["median_us"] / times["compiled"]["median_us"], 4) for n, t in times.items()}
    uncaptured = medians_us({"compiled, no graph": lambda: recording.code.run(weights, inputs, state)}, 20)
    row["times"].update(uncaptured)


def check(workload: Workload, recording: Recording, row: dict[str, Any]) -> dict[str, CudaReplay]:
    """The replay, compared bit for bit with the compiled model on fresh state."""
    weights, inputs, state = workload.weights(), workload.make_inputs(0), workload.make_state(0)
    wanted_state = copies(state)
    wanted = recording.code.run(weights, inputs, wanted_state)
    again = recording.code.run(weights, inputs, copies(state))
    row["compiled_model_repeats_itself"] = not differences(wanted, again)
    row["bit_equal"], row["differing"] = {}, {}
    try:
        mine = copies(state)
        replay = CudaReplay(recording.trace, {**weights, **inputs, **mine})
        found = replay.run()
    except (TesseraError, RuntimeError) as error:
        row["failed"] = {"replay": f"{error}\n{traceback.format_exc()}"}
        return {}
    torch.cuda.synchronize()
    differing = differences(wanted, found) + differences(wanted_state, mine)
    row["bit_equal"]["replay"], row["differing"]["replay"] = not differing, differing[:8]
    return {"replay": replay}


def add_torch_compile(
    workload: Workload, recording: Recording, runs: dict[str, Callable[[], Any]], row: dict[str, Any]
) -> None:
    """torch.compile of the same step with its own settings, for comparison."""
    inputs, state = workload.make_inputs(0), workload.make_state(0)
    try:
        began = time.monotonic()
        fast = torch.compile(workload.call, fullgraph=True, dynamic=False)
        with torch.no_grad():
            found = fast(inputs, copies(state))
            row["torch_compile_s"] = round(time.monotonic() - began, 2)
            wanted = recording.code.run(workload.weights(), inputs, copies(state))
            row["torch_compile_bit_equal"] = not differences(wanted, found)
            runs["torch.compile"] = as_graph(lambda: fast(inputs, state)).replay
    except (RuntimeError, TypeError, AttributeError, torch._dynamo.exc.TorchDynamoException) as error:
        row.setdefault("failed", {})["torch.compile"] = str(error)[:2000]
    torch._dynamo.reset()


# All cases ------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What it ran on."""
    import transformers
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def run_case(case: Case, layers: int, began: float, compare: bool) -> dict[str, Any]:
    """One row; whatever goes wrong is written into it."""
    row: dict[str, Any] = {"name": case.name, **dataclasses.asdict(case), "layers": layers}
    now = time.monotonic() - began
    if now > BEGIN_UNTIL_S:
        return {**row, "skipped": f"{now:.0f} s had passed"}
    print(f"[{now:5.0f} s] {case.name}", flush=True)
    try:
        measure(case, layers, row, compare and now < COMPARE_UNTIL_S)
    except Exception:  # noqa: BLE001 - one family must not stop the others
        row["error"] = traceback.format_exc()
        print(row["error"][-1500:], flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    shown = {k: row.get(k) for k in ("capture_s", "bit_equal", "ratio", "failed")}
    print(f"          {shown}", flush=True)
    return row


def table(rows: list[dict[str, Any]], about: Mapping[str, str], command: str) -> str:
    """The results for people."""
    lines = [
        "# Inductor capture and single-GPU replay",
        "",
        f"{about['gpu']}, torch {about['torch']}, Triton {about['triton']}, "
        f"transformers {about['transformers']}, Python {about['python']}. Command: `{command}`",
        "",
        "The compiled model and the replays run as CUDA graphs, timed in turn; times are medians. "
        "'equal': outputs and state have the bits of the compiled model's. 'torch.compile' is the same step "
        "compiled through Dynamo with torch's own settings, in brackets whether it has the same bits.",
        "",
        "| step | batch x context | launches (Triton) | immovable | capture s | compiled us "
        "| replay / compiled | equal | torch.compile / compiled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in rows]
    failed = [row for row in rows if "error" in row or "failed" in row or "skipped" in row]
    if failed:
        lines += ["", "Not finished:", ""]
        lines += [f"- {r['name']}: {_reason(r)}" for r in failed]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    trace, ratio, equal = row.get("trace", {}), row.get("ratio", {}), row.get("bit_equal", {})
    compiled = row.get("times", {}).get("compiled", {}).get("median_us")

    def say(name: str) -> str:
        return {True: "yes", False: "**no**"}.get(equal.get(name), "-")

    cells = [
        f"{row['name']}, {row['layers']} layers",
        f"{row['batch']} x {row['context']}",
        f"{trace.get('launches', '-')} ({trace.get('triton_launches', '-')})",
        trace.get("immovable_launches", "-"),
        row.get("capture_s", "-"),
        "-" if compiled is None else f"{compiled:.0f}",
        ratio.get("replay", "-"),
        say("replay"),
        f"{ratio['torch.compile']} ({row['torch_compile_bit_equal']})" if "torch.compile" in ratio else "-",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _reason(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return str(row["skipped"])
    if "error" in row:
        return str(row["error"]).strip().splitlines()[-1][:300]
    return "; ".join(f"{name}: {text.splitlines()[0][:200]}" for name, text in row["failed"].items())


def main() -> None:
    """Runs every case and writes NAME.json and NAME.md after each."""
    parser = argparse.ArgumentParser(description="Inductor capture and single-GPU replay.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="capture")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--only", default="", help="run the cases whose name holds this")
    parser.add_argument("--no-compare", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    options.out.mkdir(parents=True, exist_ok=True)
    began, about, rows = time.monotonic(), machine(), []
    command = f"python benchmarks/gpu_capture.py --out DIR --name {options.name}"
    for case in CASES:
        if options.only in case.name:
            rows.append(run_case(case, options.layers, began, not options.no_compare))
            data = {"machine": about, "command": command, "rows": rows}
            (options.out / f"{options.name}.json").write_text(json.dumps(data, indent=1) + "\n")
            (options.out / f"{options.name}.md").write_text(table(rows, about, command))
    print((options.out / f"{options.name}.md").read_text())


if __name__ == "__main__":
    main()
