"""A thousand requests in a row through worker processes, with the policy switched among them.

    python benchmarks/soak.py --requests 1000 --switch-every 7 --out soak.json

The tiny Llama (prefill and decodes) on two emulated devices under three policies: data-parallel,
attention-ffn and layer-pipeline. Every output and state is compared with the reference run, bit for bit
(requests repeat after `--distinct`, so that the reference run is made once for each). The resident memory of
the engine and of every worker is read after the first tenth and at the end. Times are of this CPU, no GPU.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.capture import build, record
from tessera.cli.run import is_equal, overlap
from tessera.execute.offline import RunResult, run_offline
from tessera.execute.stepper import SpanLog
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import UnitRequest, make_plan, make_unit, price, run_reference, workloads_of
from tessera.ir import Objective, Plan, Step
from tessera.profile import make_cluster, parse_devices

POLICIES = ("data-parallel", "attention-ffn", "layer-pipeline")
CONTEXT, TOKENS = 8, 2


def plans(microbatches: int) -> list[Plan]:
    """One for each policy, over the same steps and devices."""
    steps = (
        Step("tiny-llama", "prefill", 1, CONTEXT, reserve=TOKENS),
        Step("tiny-llama", "decode", 1, CONTEXT + TOKENS),
    )
    unit = make_unit([record(build(step)) for step in steps])
    cluster = make_cluster(parse_devices("emu:a100,emu:l40s"), "pcie4")
    costs = price(unit, cluster)
    return [
        make_plan(unit, costs, cluster, Objective.THROUGHPUT, microbatches, policy) for policy in POLICIES
    ]


def resident_bytes() -> dict[str, int]:
    """Resident memory of this process and of each worker."""
    found = {"engine": os.getpid()} | {p.name: p.pid or 0 for p in multiprocessing.active_children()}
    page = os.sysconf("SC_PAGE_SIZE")
    return {n: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for n, pid in found.items()}


class Soak:
    """Requests in batches, compared as they come, so that results do not pile up."""

    def __init__(
        self, stepper: WorkerStepper, policies: Sequence[Plan], distinct: int, switch_every: int, plain: bool
    ) -> None:
        self._stepper, self._num, self._every = stepper, len(policies), switch_every
        self._depth = 1 if plain else None
        self._log = stepper.spans = SpanLog(policies[0])
        self.faults: list[str] = []
        workloads = workloads_of(policies[0].unit)
        self.requests = [UnitRequest(workloads, workloads[0].make_inputs(i), i) for i in range(distinct)]
        self._references = [run_reference(policies[0].unit, request) for request in self.requests]
        self.done = self.equal = self.switches = 0
        self.by_policy = [0] * self._num

    def run(self, num: int) -> None:
        """The next requests."""
        numbers = [(self.done + i) % len(self.requests) for i in range(num)]
        run = run_offline(
            self._stepper,
            [self.requests[n] for n in numbers],
            policy=lambda num_done: self.switches % self._num,
            on_done=self._on_done,
            spans=self._log,
            depth=self._depth,
        )
        run.raise_failures()
        self.faults += run.faults
        self.overlap = overlap(self._log.timeline())
        for number, result in zip(numbers, run.results, strict=True):
            self._count(number, result)

    def _on_done(self, number: int) -> None:
        self.done += 1
        if self.done % self._every == 0:
            self.switches += 1

    def _count(self, number: int, result: RunResult) -> None:
        self.equal += is_equal(self._references[number], result)
        self.by_policy[result.policy] += 1


def main() -> None:
    """Runs and writes what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=20)
    parser.add_argument("--switch-every", type=int, default=7)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    policies = plans(asked.microbatches)
    weights = workloads_of(policies[0].unit)[0].weights()
    with WorkerStepper(policies, weights, transport=asked.transport) as stepper:
        soak = Soak(stepper, policies, asked.distinct, asked.switch_every, asked.plain)
        soak.run(max(1, asked.requests // 10))
        before, started, overlaps = resident_bytes(), time.perf_counter(), []
        while soak.done < asked.requests:
            soak.run(min(50, asked.requests - soak.done))
            overlaps.append(soak.overlap)
        seconds, after = time.perf_counter() - started, resident_bytes()
    found: dict[str, Any] = {
        "requests": soak.done,
        "equal": soak.equal,
        "switches": soak.switches,
        "by_policy": dict(zip(POLICIES, soak.by_policy, strict=True)),
        "transport": asked.transport,
        "plain": asked.plain,
        "slots": asked.microbatches,
        "faults": len(soak.faults),
        "requests_per_s_on_this_cpu": round((soak.done - max(1, asked.requests // 10)) / seconds, 2),
        "overlap": round(sum(overlaps) / max(1, len(overlaps)), 3),
        "resident_mb": {n: [round(before[n] / 1e6, 1), round(after[n] / 1e6, 1)] for n in before},
        "peak_bytes": {f.device: f.peak_bytes for f in stepper.footprints},
    }
    text = json.dumps(found, indent=2)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
