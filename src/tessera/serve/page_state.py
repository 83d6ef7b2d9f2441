"""What the service is doing and why, as documents: for the live page, /v1/plan and people with curl.

Utilisation in the state is measured here over the last seconds; every figure of a plan is modelled.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tessera.ir import Lane, Plan
from tessera.plan import explain
from tessera.serve.records import Snapshot

# Decisions that are shown, the last ones.
NUM_DECISIONS = 20


def state_document(snapshot: Snapshot) -> dict[str, Any]:
    """What is going on now."""
    return {
        "model": snapshot.model,
        "policy": snapshot.policy,
        "policies": list(snapshot.policies),
        "devices": [asdict(device) for device in snapshot.devices],
        "links": [
            {"source": source, "destination": destination, "utilisation": share, "bytes": num_bytes}
            for source, destination, share, num_bytes in snapshot.links
        ],
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "rows_used": snapshot.rows_used,
        "rows": snapshot.rows,
        "prompt_tokens": snapshot.prompt_tokens,
        "output_tokens": snapshot.output_tokens,
        "tokens_per_s": snapshot.tokens_per_s,
        "finished": dict(snapshot.finished),
        "retried": snapshot.retried,
        "plan_changes": snapshot.plan_changes,
        "decisions": [asdict(decision) for decision in snapshot.decisions[-NUM_DECISIONS:]],
    }


def plan_document(plan: Plan) -> dict[str, Any]:
    """One plan: where every step runs, what that should give, and why."""
    found = explain(plan, is_brief=True)
    names = plan.cluster.names
    total = sum(lane.rate_per_s for lane in plan.lanes)
    return {
        "policy": plan.policy,
        "objective": plan.objective.value,
        "modelled": True,
        "devices": list(names),
        "lanes": [
            {"share": lane.rate_per_s / total, "steps": _steps(plan, lane, names)} for lane in plan.lanes
        ],
        "utilisation": {use.name: use.utilisation for use in found.devices},
        "link_utilisation": {use.name: use.utilisation for use in found.links},
        "bottleneck": found.bottleneck,
        "simulated_per_s": plan.simulated_per_s,
        "bound_per_s": plan.bound_per_s,
        "latency_us": plan.latency_us,
        "baselines": {b.name: b.throughput_per_s for b in plan.baselines},
        "why": [found.verdict, *(reason.sentence for reason in found.reasons), *found.remarks],
    }


def _steps(plan: Plan, lane: Lane, names: Sequence[str]) -> list[dict[str, Any]]:
    """Of each step of a lane: how many launches every device runs."""
    return [
        {
            "step": graph.trace.step.kind,
            "runs": runs,
            "launches": {name: placed.count(i) for i, name in enumerate(names)},
        }
        for graph, runs, placed in zip(
            plan.unit.graphs, plan.unit.counts, lane.placement.devices, strict=True
        )
    ]
