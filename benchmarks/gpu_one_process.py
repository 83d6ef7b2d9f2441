"""The plans that gpu_execute.py kept, by the executor that had all devices in one process.

    git worktree add ../before 9ad0cce
    PYTHONPATH=../before/src:../before python benchmarks/gpu_one_process.py --plans plans --into RESULTS.json

That executor is gone; its last revision reads the same plan files. What it reaches is written into the
results of gpu_execute.py under "one process", for gpu_execute_table.py.
"""

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

WHAT = "the same plans by the executor of 9ad0cce, which has both devices in one process"
POLICIES = ("throughput", "data-parallel")
LAYERS = 4
# Requests of a round, for each microbatch.
EACH = 10


class Kept:
    """A request whose first state is made once."""

    def __init__(self, workloads: list[Any], seed: int) -> None:
        flow = import_module("tessera.flow")
        self._request = flow.UnitRequest(workloads, workloads[0].make_inputs(seed), seed)
        self._state: Any = None

    def state(self) -> Any:
        """As it begins; whoever runs it copies."""
        if self._state is None:
            self._state = self._request.state()
        return self._state

    def inputs(self, step: int, run: int, last: Any) -> Any:
        """Inputs of a run."""
        return self._request.inputs(step, run, last)


def rates(folder: Path, name: str) -> dict[str, Any]:
    """Rates of the plans of one family and pair."""
    import torch

    ir, inductor = import_module("tessera.ir"), import_module("tessera.capture.inductor")
    build = import_module("benchmarks.gpu_capture")._build
    captured_in = import_module("tessera.execute.cuda.captured")
    try_plans = import_module("tessera.execute.cuda.pick").try_plans
    paths = {policy: folder / f"{name}.{policy}.plan" for policy in POLICIES}
    plans = {policy: ir.load(ir.Plan, path) for policy, path in paths.items() if path.exists()}
    scale = float((folder / f"{name}.scale").read_text())
    workloads = []
    for graph in next(iter(plans.values())).unit.graphs:
        with torch.device("cuda"):
            workloads.append(inductor.on_device(build(graph.trace.step, LAYERS), "cuda:0"))
    requests = [Kept(workloads, seed) for seed in range(2)]
    found: dict[str, Any] = {}
    with captured_in.Captured(list(plans.values()), workloads[0].weights(), scale=scale) as captured:
        row = [requests[i % 2] for i in range(EACH * captured.num_microbatches)]
        try_plans(captured, row[: 2 * captured.num_microbatches], 1)
        for trial, policy in zip(try_plans(captured, row, 2), plans, strict=True):
            rate = trial.per_s * scale
            found[policy] = {
                "measured per s": round(rate, 3),
                "measured / simulated": round(rate / plans[policy].simulated_per_s, 4),
            }
    return found


def main() -> None:
    """All that was kept, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True, help="results of gpu_execute.py")
    parser.add_argument("--families", default="llama,gpt-oss,sd3.5")
    parser.add_argument("--pairs", default="a100+l40s,h20+l40s")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for each")
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.name:
        print(json.dumps(rates(args.plans, args.name)))
        return
    found: dict[str, Any] = {"what": WHAT}
    for family in args.families.split(","):
        for pair in args.pairs.split(","):
            name = f"{family}.{pair}"
            if not (args.plans / f"{name}.scale").exists():
                continue
            call = [sys.executable, __file__, *sys.argv[1:], "--name", name]
            try:
                done = subprocess.run(call, timeout=args.limit, capture_output=True, text=True, check=False)
                found[name] = json.loads(done.stdout.splitlines()[-1])
            except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[-500:]}
            print(name, json.dumps(found[name]), flush=True)
            whole = json.loads(args.into.read_text())
            args.into.write_text(json.dumps({**whole, "one process": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
