"""Offline throughput: every workload on every pair, the throughput plan against every other policy.

`policies` are requests per second on the pair's own devices, all judged by the same simulation with the same
number of batches in flight. Two of the better card are other hardware, so they stand apart, in `elsewhere`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tessera.paper.records import Case, Effort, Outcome, Workload
from tessera.paper.scale import Scale, wires

NAME = "throughput"


def cases(scale: Scale) -> list[Case]:
    """Workload by workload, so that a process keeps its work unit at hand."""
    made = []
    for workload in scale.workloads:
        for wire in wires(scale.links):
            for pair in scale.pairs:
                effort = _effort(scale, workload, pair == scale.pairs[0] and wire.name == scale.links[0])
                made.append(Case(workload, pair, wire, scale.slots, effort))
    return made


def _effort(scale: Scale, workload: Workload, is_first_pair: bool) -> Effort:
    if not is_first_pair:
        return scale.other_effort
    return scale.first_effort if workload == scale.workloads[0] else scale.pair_effort


def tasks(scale: Scale) -> list[Case]:
    """The cases, and two of the better card for each pair."""
    made = cases(scale)
    return list(dict.fromkeys([*made, *(case.doubled() for case in made)]))


def document(scale: Scale, done: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row a case."""
    return [row_of(case, done[case], done[case.doubled()]) for case in cases(scale)]


def row_of(case: Case, found: Outcome, doubled: Outcome) -> dict[str, Any]:
    """A case in figures."""
    best = found.best_baseline
    two = doubled.best_baseline
    name = f"2x {case.doubled().gpus[0]}"
    return {
        "model": case.workload.model,
        "workload": case.workload.title,
        "pair": case.pair,
        "link": case.wire.name,
        "slots": case.slots,
        "unit": "requests per second",
        "policies": dict(found.policies),
        "best_baseline": best[0] if best else None,
        "ratio_to_best_baseline": found.own / best[1] if found.own and best else None,
        "ratios": {
            policy: found.own / rate
            for policy, rate in found.policies.items()
            if found.own and rate and policy != "throughput"
        },
        "bound": found.bound_per_s,
        "single_placement_by_busy_time": found.single_placement_busy_per_s,
        "single_placement_note": found.single_placement_note,
        "elsewhere": {name: {"policy": two[0], "value": two[1]} if two else None},
        "usd_per_hour": found.usd_per_hour,
        "usd_per_hour_elsewhere": doubled.usd_per_hour,
        "lanes": found.num_lanes,
        "source": found.source,
        "why_none": found.why or None,
    }


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """One panel a pair: bars of each policy, as a share of the throughput plan."""
    pairs = list(dict.fromkeys((r["pair"], r["link"]) for r in rows))
    names = list(dict.fromkeys(n for r in rows for n in r["policies"]))
    panels = np.atleast_1d(figure.subplots(len(pairs), 1, sharex=True))
    width = 0.85 / len(names)
    for panel, (pair, link) in zip(panels, pairs, strict=True):
        here = [r for r in rows if (r["pair"], r["link"]) == (pair, link)]
        for index, name in enumerate(names):
            shares = [
                (r["policies"].get(name) or 0.0) / r["policies"]["throughput"]
                if r["policies"]["throughput"]
                else 0.0
                for r in here
            ]
            panel.bar([x + index * width for x in range(len(here))], shares, width, label=name)
        panel.axhline(1.0, color="black", linewidth=0.6)
        panel.set_ylabel(f"{pair}\n{link}", fontsize=8)
        panel.set_xticks([x + 0.4 for x in range(len(here))], [r["model"] for r in here], fontsize=8)
    panels[0].legend(fontsize=6, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.02))
    panels[0].set_title("share of the throughput plan", fontsize=9, loc="left", pad=28)
