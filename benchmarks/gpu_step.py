"""One step of a served model on one GPU, as a CUDA graph, against what the card allows.

    python benchmarks/gpu_step.py --out benchmarks/results --name step_h200_202611

A step that answers reads the weights and the keys and values that are there, once: its share is their bytes
by the card's own bandwidth over the time it took. A step that reads prompts is bound by products: its share
is their operations by the card's own peak over the time. Both peaks are measured first, in this run. The same
step with a pool of pages twice as large shows what room for longer sequences costs.
"""

import argparse
import json
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_http import Sizes, card, sizes_of

from tessera.kernels import PAGE


@dataclass(frozen=True)
class Case:
    """(length, new tokens) of equal sequences, and how many times the pages that they need there are."""

    sequences: int
    length: int
    new: int = 1
    room: int = 1

    @property
    def name(self) -> str:
        """For a table."""
        what = "decode" if self.new == 1 else f"prompts of {self.new}"
        return f"{what}, {self.sequences} of {self.length} tokens" + (", twice the pages" * (self.room - 1))

    def share(self, sizes: Sizes, found: dict[str, float], seconds: float) -> float:
        """Share of what the card allows."""
        if self.new == 1:
            needed = sizes.weight_bytes + self.sequences * self.length * sizes.token_bytes
            return needed / found["bytes per s"] / seconds
        return self.sequences * self.new * 2 * sizes.parameters / found["operations per s"] / seconds


CASES = (
    Case(32, 1088), Case(32, 1088, room=2), Case(128, 1088), Case(1, 2048, 2048), Case(8, 256, 256),
    Case(1, 1),
)  # fmt: skip


def timed(model: str, layers: int, case: Case) -> dict[str, Any]:
    """Captures the step, makes it a graph and replays it."""
    import torch
    from benchmarks.gpu_capture import _build, medians_us
    from benchmarks.gpu_common import Same, whole_card

    from tessera.capture.inductor import record_inductor
    from tessera.capture.models.paged import lay_out
    from tessera.capture.workload import on_device
    from tessera.execute.cuda.measure import UnitOnDevice
    from tessera.flow import make_unit
    from tessera.ir import Step
    from tessera.serve.gpu import blank

    began = time.monotonic()
    pages = case.sequences * -(-case.length // PAGE) * case.room + 1
    num_tokens = case.sequences * case.new
    step = Step(model, "tokens", case.sequences, num_tokens, reserve=PAGE * pages, joined_products=True)
    with torch.device("cuda"):
        workload = _build(step, layers)
    tables = lay_out(workload.step, [(case.length, case.new)] * case.sequences, range(1, pages))
    given = {"tokens": torch.randint(0, 1000, (step.context,)), **tables}
    workload = replace(workload, make_inputs=lambda seed: dict(given))
    workload = blank(on_device(workload, "cuda:0"))
    recording = record_inductor(workload, False)
    unit = make_unit([recording.trace])
    with UnitOnDevice(unit, whole_card(), 0, workload.weights(), {0: recording.relaunch}) as whole:
        (outputs,) = whole.run(Same(workload.make_inputs(0)))
        times = medians_us({"step": whole.graph(0).replay}, 30)["step"]
    is_finite = bool(outputs["logits"].isfinite().all())
    kinds = [recording.trace.kernels[x.kernel].name for x in recording.trace.launches]
    counts = {name: kinds.count(name) for name in sorted(set(kinds), key=kinds.count, reverse=True)[:8]}
    return {
        "ms": times["median_us"] * 1e-3, "launches": len(kinds), "most frequent": counts,
        "finite": is_finite, "made in s": round(time.monotonic() - began, 1),
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
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    words = ["OUT" if word == str(args.out) else word for word in sys.argv[1:]]
    found: dict[str, Any] = {"command": "python benchmarks/gpu_step.py " + " ".join(words), "card": card()}
    print(json.dumps(found), flush=True)
    sizes = sizes_of(args.model)
    chosen = [CASES[int(n)] for n in args.cases.split(",")] if args.cases else CASES
    for case in chosen:
        torch.cuda.empty_cache()
        try:
            row = timed(args.model, args.layers, case)
            row["share"] = round(case.share(sizes, found["card"], row["ms"] * 1e-3), 4)
        except Exception:  # noqa: BLE001 - one case must not stop the others
            row = {"error": traceback.format_exc()[-2000:]}
        found[case.name] = row
        print(f"{case.name}: {row.get('error') or json.dumps(row)}", flush=True)
        (args.out / f"{args.name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
