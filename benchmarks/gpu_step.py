"""One step of a served model on one GPU, as a CUDA graph, against what the card allows.

    python benchmarks/gpu_step.py --out benchmarks/results --name step_h200_202611

A step that answers reads the weights and the keys and values that are there, once: its share is their bytes
by the card's own bandwidth over the time it took. A step that reads prompts is bound by products: its share
is their operations by the card's own peak over the time. Both peaks are measured first, in this run. The same
step with a pool of pages twice as large shows what room for longer sequences costs.

    python benchmarks/gpu_step.py --out OUT --model FOLDER --cases 6 --kernels

`--kernels` adds what the card ran in one step: microseconds by kernel, and the gaps before them.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_http import Sizes, card, sizes_of

from tessera.kernels import PAGE, launch


@dataclass(frozen=True)
class Case:
    """(length, new tokens) of equal sequences, how many times the pages that they need there are, and the
    places of the step if it has more than sequences.
    """

    sequences: int
    length: int
    new: int = 1
    room: int = 1
    places: int = 0

    @property
    def name(self) -> str:
        """For a table."""
        what = "decode" if self.new == 1 else f"prompts of {self.new}"
        more = (", twice the pages" * (self.room - 1)) + (f" in {self.places} places" if self.places else "")
        return f"{what}, {self.sequences} of {self.length} tokens{more}"

    def share(self, sizes: Sizes, found: dict[str, float], seconds: float) -> float:
        """Share of what the card allows."""
        if self.new == 1:
            needed = sizes.weight_bytes + self.sequences * self.length * sizes.token_bytes
            return needed / found["bytes per s"] / seconds
        return self.sequences * self.new * 2 * sizes.parameters / found["operations per s"] / seconds


CASES = (
    Case(32, 1088), Case(32, 1088, room=2), Case(128, 1088), Case(1, 2048, 2048), Case(8, 256, 256),
    Case(1, 1), Case(8, 576), Case(64, 576), Case(8, 576, places=64), Case(1, 8192, places=64),
)  # fmt: skip


def kernels_of(replay: Callable[[], object]) -> list[dict[str, Any]]:
    """Launches, microseconds and gaps before them by kernel, of one replay."""
    import torch

    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA, activity.CPU]) as profile:
        for _ in range(3):
            replay()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    seen = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in kinds)
    seen = seen[-(len(seen) // 3) :]
    found: dict[str, dict[str, Any]] = {}
    end = seen[0][0] if seen else 0.0
    for start, took, name in seen:
        row = found.setdefault(name, {"kernel": name[:100], "launches": 0, "us": 0.0, "gaps us": 0.0})
        row["launches"] += 1
        row["us"] += took
        row["gaps us"] += max(0.0, start - end)
        end = max(end, start + took)
    rows = sorted(found.values(), key=lambda row: -row["us"] - row["gaps us"])
    return [{**row, "us": round(row["us"], 1), "gaps us": round(row["gaps us"], 1)} for row in rows]


def timed(model: str, layers: int, case: Case, has_kernels: bool) -> dict[str, Any]:
    """Captures the step, makes it a graph and replays it."""
    import torch
    from benchmarks.gpu_capture import _build, medians_us
    from benchmarks.gpu_common import Same, whole_card

    from tessera.capture import build
    from tessera.capture.inductor import record_inductor
    from tessera.capture.models.paged import lay_out
    from tessera.capture.workload import on_device
    from tessera.execute.cuda.measure import UnitOnDevice
    from tessera.flow import make_unit
    from tessera.ir import Step
    from tessera.serve.gpu import with_zero_state

    began = time.monotonic()
    pages = case.sequences * -(-case.length // PAGE) * case.room + 1
    places = case.places or case.sequences
    step = Step(model, "tokens", places, places * case.new, reserve=PAGE * pages, joined_products=True)
    with torch.device("cuda"):
        workload = build(step) if Path(model).is_dir() else _build(step, layers)
    tables = lay_out(workload.step, [(case.length, case.new)] * case.sequences, range(1, pages))
    given: dict[str, torch.Tensor] = dict(workload.make_inputs(0))
    for name in ("settings", "numbers"):  # greedy
        given[name] = torch.zeros_like(given[name])
    given |= {"tokens": torch.randint(0, 1000, (step.context,)), **tables}
    workload = replace(workload, make_inputs=lambda seed: dict(given))
    workload = with_zero_state(on_device(workload, "cuda:0"))
    recording = record_inductor(workload, False)
    unit = make_unit([recording.trace])
    with UnitOnDevice(unit, whole_card(), 0, workload.weights()) as whole:
        (outputs,) = whole.run(Same(workload.make_inputs(0)))
        times = medians_us({"step": whole.graph(0).replay}, 30)["step"]
        kernels = kernels_of(whole.graph(0).replay) if has_kernels else []
    is_finite = all(bool(t.isfinite().all()) for t in outputs.values() if t.is_floating_point())
    kinds = [recording.trace.kernels[x.kernel].name for x in recording.trace.launches]
    counts = {name: kinds.count(name) for name in sorted(set(kinds), key=kinds.count, reverse=True)[:8]}
    return {
        "ms": times["median_us"] * 1e-3, "launches": len(kinds), "most frequent": counts,
        "finite": is_finite, "made in s": round(time.monotonic() - began, 1),
        **({"kernels": kernels} if kernels else {}),
    }  # fmt: skip


def main() -> None:
    """The card, then every case."""
    import torch

    parser = argparse.ArgumentParser(description="One step of a served model on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="step")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cases", default="", help="numbers of cases; empty: all")
    parser.add_argument("--plain-launches", action="store_true", help="each kernel after the one before")
    parser.add_argument("--kernels", action="store_true", help="what the card ran in one step")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plain_launches:
        launch._TARGET = 10_000  # of no card
    words = ["OUT" if word == str(args.out) else word for word in sys.argv[1:]]
    found: dict[str, Any] = {"command": "python benchmarks/gpu_step.py " + " ".join(words), "card": card()}
    print(json.dumps(found), flush=True)
    sizes = sizes_of(args.model)
    chosen = [CASES[int(n)] for n in args.cases.split(",")] if args.cases else CASES
    for case in chosen:
        torch.cuda.empty_cache()
        try:
            row = timed(args.model, args.layers, case, args.kernels)
            row["share"] = round(case.share(sizes, found["card"], row["ms"] * 1e-3), 4)
        except Exception:  # noqa: BLE001 - one case must not stop the others
            row = {"error": traceback.format_exc()[-2000:]}
        found[case.name] = row
        shown = {name: value for name, value in row.items() if name != "kernels"}
        print(f"{case.name}: {row.get('error') or json.dumps(shown)}", flush=True)
        for line in row.get("kernels", [])[:25]:
            print("{launches:5d} {us:9.1f} us, gaps {gaps us:8.1f} us  {kernel}".format(**line), flush=True)
        (args.out / f"{args.name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
