"""Loads on one card: plan and best coarser policy, each at its own best batch; used by gpu_execute.py.

A model with a part of its layers is planned as `tessera plan MODEL` plans a whole one: with the same part of
each device's memory and of the limit. What the search chose is then recorded on the card at its own batch
and run on worker processes. Replicas of data-parallel have nothing to do with one another: each is run alone,
with two microbatches so that it never waits for its next one, and their rates are added. Bits are compared
by the part `pairs`: here the state alone has gigabytes.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks.gpu_capture import _build
from benchmarks.gpu_common import Same
from benchmarks.gpu_execute_pairs import (
    COMPARED,
    make_plans,
    opened,
    own_times,
    priced,
    timed,
)
from benchmarks.gpu_serve_hf import blank
from torch.nn.attention import sdpa_kernel

from tessera.capture import Workload
from tessera.capture.record import PORTABLE, record
from tessera.capture.workload import on_device
from tessera.execute.cuda.measure import whole_plan
from tessera.flow import LoadSteps, make_unit, plan_steps
from tessera.ir import Cluster, Load, Objective, Plan, Step, Trace
from tessera.plan import Comparison, Option, PlanConfig
from tessera.profile import parse_devices, wire

# Batches that are looked at, for every policy alike.
BATCHES = (8, 32, 128, 512)
# Decodes of a request: its state, of gigabytes, is cleared when it begins.
DECODES = 8
# Seconds of a round.
SECONDS = 1.0
# More than a launch of each device needs: a short one may have to wait for a whole wave of the other's.
SLOWER = 3.0


@dataclass(frozen=True)
class Row:
    """A load of the evaluation: so many layers of a model, one kind of step."""

    model: str
    # Layers of the whole model, and of what is run.
    whole: int
    layers: int
    kind: str
    context: int
    gpus: tuple[str, str]
    link: str
    # Per token, or per step, of the whole model.
    limit_ms: float | None = None

    @property
    def runs(self) -> int:
        """Runs of its step in a request."""
        return DECODES if self.kind == "decode" else 1

    @property
    def share(self) -> float:
        """Share of the model that is run."""
        return self.layers / self.whole


# Among the evaluation's largest gains on two devices, and one without.
ROWS = {
    "llama-decode": Row("llama-3-8b", 32, 8, "decode", 1280, ("h20", "l40s"), "nvlink"),
    "sd3.5": Row("sd3.5-medium", 24, 6, "denoise", 1024, ("h20", "l40s"), "nvlink", 1000.0),
    "qwen-prefill": Row("qwen2.5-vl-7b", 28, 7, "prefill", 512, ("h20", "l40s"), "ib100", 2000.0),
    "mamba-decode": Row("mamba-codestral-7b", 64, 8, "decode", 640, ("rtx-pro-6000", "h20"), "nvlink", 300.0),
    "qwen-decode": Row("qwen2.5-vl-7b", 28, 7, "decode", 640, ("a100", "l40s"), "nvlink"),
}


def searched(row: Row) -> Comparison:
    """Batch, microbatches and placement of every policy."""
    steps = LoadSteps(
        [Step(row.model, row.kind, 1, row.context)],
        (1,),
        record=lambda step: _recorded(row, step.batch)[1],
    )
    limit_ms = row.limit_ms and row.limit_ms * row.share
    load = Load(1, 0 if row.kind == "decode" else 1, tpot_ms=limit_ms)
    return plan_steps(steps, _emulated(row), load, PlanConfig(Objective.THROUGHPUT), BATCHES)[1]


def _emulated(row: Row) -> Cluster:
    """The two GPUs, with as much of their memory as the model has of its layers."""
    cluster = wire(parse_devices(",".join(f"emu:{gpu}" for gpu in row.gpus)), [row.link])
    devices = (replace(d, memory_bytes=int(d.memory_bytes * row.share)) for d in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def _with_memory(cluster: Cluster, other: Cluster) -> Cluster:
    """With the memory of another one's devices: dilated ones have halves of the card."""
    pairs = zip(cluster.devices, other.devices, strict=True)
    return replace(cluster, devices=tuple(replace(d, memory_bytes=o.memory_bytes) for d, o in pairs))


@dataclass(frozen=True)
class _Built:
    """The row at one batch, on the card."""

    unit: Any
    weights: dict[str, torch.Tensor]
    requests: Sequence[Same]

    def request(self, seed: int) -> Same:
        """One of a few."""
        return self.requests[seed % len(self.requests)]


def _recorded(row: Row, batch: int) -> tuple[Workload, Trace]:
    """Its step at that batch, on the card, as it is run: attention that every GPU has."""
    with torch.device("cuda"):
        workload = _build(Step(row.model, row.kind, batch, row.context), row.layers)
    workload = blank(on_device(workload, "cuda:0"))
    with sdpa_kernel(PORTABLE):
        return workload, record(workload)


def _built(row: Row, batch: int) -> _Built:
    workload, trace = _recorded(row, batch)
    made = [{n: t.cpu() for n, t in workload.make_inputs(seed).items()} for seed in range(COMPARED)]
    return _Built(make_unit([trace], (row.runs,)), workload.weights(), [Same(given) for given in made])


def measured(row: Row, found: Comparison, tell: Any) -> dict[str, Any]:
    """Plan and best coarser policy on the card, in one run."""
    plan = replace(found.chosen, policy="plan")
    best = max(found.baselines, key=lambda o: o.tokens_per_s)
    replicas = next((o for o in found.baselines if o.policy == "data-parallel"), None)
    rates: dict[str, Any] = {}
    for name, option in {"plan": plan, "best": best, "data-parallel": replicas}.items():
        if option is None or (name != "plan" and option.policy in rates):
            continue
        key = "plan" if name == "plan" else option.policy
        rates[key] = _measure(row, option)
        tell(f"{key} so far", rates[key])
    ratio = _ratio(rates, "plan", best.policy)
    return {
        "rates": rates, "best": best.policy, **ratio,
        "data-parallel": _ratio(rates, "plan", "data-parallel") if "data-parallel" in rates else None,
    }  # fmt: skip


def _ratio(rates: dict[str, Any], one: str, other: str) -> dict[str, float]:
    predicted, real = (rates[one][key] / rates[other][key] for key in ("simulated rows/s", "measured rows/s"))
    return {
        "predicted ratio": round(predicted, 4), "measured ratio": round(real, 4),
        "measured / predicted": round(real / predicted, 4),
    }  # fmt: skip


def _measure(row: Row, option: Option) -> dict[str, Any]:
    """Rows a second of one policy at its own point."""
    if option.policy not in ("data-parallel", "single"):
        (batch,) = set(option.batch.values())
        policy = "throughput" if option.policy == "plan" else option.policy
        parts = {option.policy: _run(row, batch, option.microbatches, policy)}
    else:
        parts = {
            device: _run(row, batch, 2, "single", row.gpus.index(device.partition(":")[2]))
            for device, batch in option.batch.items()
        }
    return {
        "measured rows/s": round(sum(p["measured rows/s"] for p in parts.values()), 2),
        "simulated rows/s": round(sum(p["simulated rows/s"] for p in parts.values()), 2),
        "searched rows/s": round(option.tokens_per_s, 2), "batch": option.batch,
        "microbatches": option.microbatches, "parts": parts,
    }  # fmt: skip


def _run(row: Row, batch: int, microbatches: int, policy: str, device: int = 0) -> dict[str, Any]:
    """One plan on worker processes: its bits, and rows a second in the time of the devices that it is for."""
    built = _built(row, batch)
    own = own_times(built, Cluster(parse_devices("cuda:0"), ()))["launches"]
    text = ",".join(f"cuda:0/as={gpu}" for gpu in row.gpus)
    cluster, costs, scale = priced(built, text, row.link, own)
    factor = SLOWER * scale.factor
    if policy == "single":  # at a batch that fits; a second microbatch has room on this card
        plan = replace(whole_plan(built.unit, cluster, device), costs=costs, microbatches=microbatches)
        simulated = 1e6 / _alone_us(plan, device)
    else:
        cluster = _with_memory(cluster, _emulated(row))
        costs = tuple(replace(c, devices=cluster.devices) for c in costs)
        plan = make_plans(built, costs, cluster, (policy,), microbatches)[policy]
        simulated = plan.simulated_per_s
    with opened(built, {policy: plan}, factor, "ipc") as stepper:
        first = timed(stepper, built, 0, 2 * microbatches)
        per_s = timed(stepper, built, 0, max(6 * microbatches, min(240, round(first * SECONDS))))
    del built
    gc.collect()
    torch.cuda.empty_cache()
    rows = batch * row.runs
    return {
        "measured rows/s": round(per_s * factor * rows, 2),
        "simulated rows/s": round(simulated * rows, 2), "batch": batch, "scale": round(factor, 4),
        "covered": scale.covered,
    }  # fmt: skip


def _alone_us(plan: Plan, device: int) -> float:
    """One request on one device, which has nothing to wait for."""
    steps = zip(plan.costs, plan.unit.counts, strict=True)
    return sum(count * sum(row[device].us for row in costs.costs) for costs, count in steps)
