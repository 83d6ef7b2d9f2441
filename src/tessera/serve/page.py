"""The live page, one HTML file without a byte from elsewhere, and the documents that it shows.

The page reads /v1/state every second and /v1/plan when the policy changes. Utilisation in the state is
measured here over the last seconds; every figure of a plan is modelled. The page's script and style are named
by their hashes in the Content-Security-Policy, so that the browser runs nothing else, whatever a name may
hold.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from tessera.ir import Lane, Plan
from tessera.serve.records import Snapshot, step_name

# Decisions that are shown, the last ones.
NUM_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class Page:
    html: str
    policy: str


def live_page() -> Page:
    html = files("tessera.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html, policy)


def _hashes(html: str, tag: str) -> str:
    bodies = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in bodies]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def state_document(snapshot: Snapshot) -> dict[str, Any]:
    found = asdict(snapshot)
    del found["decided"]
    names = ("source", "destination", "utilisation", "bytes")
    found["links"] = [dict(zip(names, link, strict=True)) for link in snapshot.links]
    found["decisions"] = found["decisions"][-NUM_DECISIONS:]
    return found


def plan_document(plan: Plan) -> dict[str, Any]:
    """One plan: where every step runs, what that should give, and why."""
    from tessera.plan import explain  # slow to import, and a start does not need it

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
        "layer": _layer(plan),
        "why": [found.verdict, *(reason.sentence for reason in found.reasons), *found.remarks],
    }


def _layer(plan: Plan) -> dict[str, Any]:
    """Where one layer of the step that runs most often is placed, along the lane that most work follows."""
    from tessera.report import main_lane
    from tessera.report.picture import picture

    step = max(range(len(plan.unit.counts)), key=plan.unit.counts.__getitem__)
    found = picture(plan, main_lane(plan), step)
    return {
        "subject": found.subject,
        "step": found.step,
        "lane": found.lane,
        "columns": list(found.devices),
        "hidden_after": found.hidden_after,
        "num_hidden": found.num_hidden,
        "rows": [asdict(row) for row in found.rows],
    }


def _steps(plan: Plan, lane: Lane, names: Sequence[str]) -> list[dict[str, Any]]:
    """Of each step of a lane: how many launches every device runs."""
    found = []
    for graph, runs, placed in zip(plan.unit.graphs, plan.unit.counts, lane.placement.devices, strict=True):
        launches = {name: placed.count(i) for i, name in enumerate(names)}
        found.append({"step": step_name(graph.trace.step), "runs": runs, "launches": launches})
    return found
