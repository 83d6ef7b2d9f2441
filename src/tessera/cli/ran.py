"""What a run of worker processes showed, in figures, next to what was predicted.

Emulated devices compute on this machine's CPU, so their times are no GPU's. What can be compared is each
device's share of all computing: measured in CPU time of the launches, predicted by the plan's costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tessera.ir import Plan, Timeline

if TYPE_CHECKING:
    from tessera.cli.picking import Picked
    from tessera.execute.offline import RunResult
    from tessera.flow import ReferenceRun


@dataclass(frozen=True)
class Ran:
    """What the devices gave."""

    results: "list[RunResult]"
    timeline: Timeline
    compute_us: dict[str, float]
    peak_bytes: tuple[int, ...]
    faults: tuple[str, ...]
    # Which plan was taken, where plans were tried out first.
    picked: "Picked | None" = None
    # Where the requests' inputs came from, and what results were compared with, in words.
    inputs: str = ""
    reference: str | None = None

    def divided(self, scale: float) -> "Ran":
        """With modelled times, of a run in which all of them were so many times as long."""
        if scale == 1.0:
            return self
        timeline = self.timeline
        spans = tuple(
            replace(s, start_us=s.start_us / scale, stop_us=s.stop_us / scale) for s in timeline.spans
        )
        requests = tuple((number, start / scale, stop / scale) for number, start, stop in timeline.requests)
        compute_us = {name: us / scale for name, us in self.compute_us.items()}
        return replace(
            self, timeline=replace(timeline, spans=spans, requests=requests), compute_us=compute_us
        )


def is_equal(reference: "ReferenceRun | RunResult", result: "RunResult") -> bool:
    """True iff every output of every run and the final state hold the same bytes."""
    from tessera.execute.replay import same_bits

    outputs = len(reference.outputs) == len(result.outputs) and all(
        same_bits(one[name].cpu(), other[name])
        for one, other in zip(reference.outputs, result.outputs, strict=True)
        for name in one
    )
    return outputs and all(same_bits(t.cpu(), result.state[name]) for name, t in reference.state.items())


def overlap(timeline: Timeline) -> float:
    """Share of the transfers' time during which their destination computed; 1 if there were none."""
    total, hidden = timeline.transfer_us()
    return hidden / total if total else 1.0


def per_device(plan: Plan, timeline: Timeline) -> list[dict[str, Any]]:
    """How long each worker computed, by this machine's clock."""
    busy = timeline.busy_us()
    whole = timeline.makespan_us or 1.0
    return [
        {"device": name, "busy_us": busy.get(name, 0.0), "utilisation": busy.get(name, 0.0) / whole}
        for name in plan.cluster.names
    ]


def shares(names: Sequence[str], busy_us: Mapping[str, float]) -> list[float]:
    """Each device's share of all computing."""
    total = sum(busy_us.get(name, 0.0) for name in names) or 1.0
    return [busy_us.get(name, 0.0) / total for name in names]


def compared(
    plan: Plan, measured: Timeline, compute_us: Mapping[str, float], predicted: Timeline
) -> list[dict[str, Any]]:
    """`per_device` with the share of each, measured and predicted, and their difference."""
    names = plan.cluster.names
    here, there = shares(names, compute_us), shares(names, predicted.busy_us())
    return [
        row
        | {
            "compute_us": compute_us.get(name, 0.0),
            "share": one,
            "predicted_share": other,
            "difference": one - other,
        }
        for name, row, one, other in zip(names, per_device(plan, measured), here, there, strict=True)
    ]
