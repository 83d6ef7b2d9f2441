"""run: plans on this machine's GPUs from start to end: time scale, requests, comparison, timeline.

What `tessera run` shows of a run on GPUs. Requests and weights must be on the GPU of the first device. The
timeline comes from a second, shorter run in which every launch is stamped; rates are of the first. Requests
that fail have an error in their result; then there is no second run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.execute.cuda import driver
from tessera.execute.cuda.captured import Captured, Kernels
from tessera.execute.cuda.engine import CudaEngine
from tessera.execute.cuda.measure import measure
from tessera.execute.cuda.pick import try_plans
from tessera.execute.cuda.stretch import Scale, choose_scale
from tessera.execute.cuda.undivided import Undivided, differing
from tessera.execute.engine import Request, RunResult
from tessera.execute.pick import EACH, Trial, rate_per_s
from tessera.ir import Clock, Cluster, Device, DeviceKind, Plan, Timeline

Tensors = Mapping[str, torch.Tensor]
# Requests of the stamped run.
STAMPED = 8
NO_SCALE = Scale(1.0, 1.0, 0, 0)


@dataclass(frozen=True)
class CudaRun:
    """What a run on GPUs gave."""

    results: list[RunResult]
    # By the GPU's clock, divided by the time scale.
    timeline: Timeline
    # Modelled where devices are stretched: measured rate times scale.
    per_s: float
    scale: Scale
    # Device -> microseconds of launches in the timeline.
    compute_us: dict[str, float]
    # Per device: most bytes ever allocated on its card during the run.
    peak_bytes: tuple[int, ...]
    # Request -> what differs from the undivided run; None if nothing was compared.
    wrong: dict[int, list[str]] | None
    # Why requests failed.
    faults: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool | None:
        """Whether every request has the undivided run's bits; None if nothing was compared."""
        return None if self.wrong is None else not self.wrong


def run_plans(
    plans: Sequence[Plan],
    weights: Tensors,
    requests: Sequence[Request],
    switch_every: int = 8,
    verify: bool = False,
    kernels: Kernels | None = None,
    on_done: Callable[[int], None] = lambda number: None,
) -> CudaRun:
    """Requests through plans that are policies of the same work, switched every so many requests."""
    cluster = plans[0].cluster
    scale = scale_of(plans[0], weights, requests[0], kernels)
    for ordinal in {d.ordinal for d in cluster.devices}:
        torch.cuda.reset_peak_memory_stats(driver.card(ordinal))

    def policy(number: int) -> int:
        return number // switch_every % len(plans)

    with Captured(plans, weights, kernels, scale.factor) as captured:
        engine = CudaEngine(captured)
        results = engine.run(requests, policy, on_done, is_strict=False)
    faults = tuple(map(str, engine.faults))
    peaks = tuple(torch.cuda.max_memory_allocated(driver.card(d.ordinal)) for d in cluster.devices)
    wrong = _compared(plans[0], weights, requests, results, kernels) if verify and not faults else None
    timeline = Timeline(Clock.MEASURED, (), ())
    if not faults:
        timeline = _stamped(plans, weights, requests[:STAMPED], policy, kernels, scale)
    busy = timeline.busy_us()
    compute = {d.name: busy.get(d.name, 0.0) for d in cluster.devices}
    per_s = rate_per_s([r for r in results if not r.error]) * scale.factor
    return CudaRun(results, timeline, per_s, scale, compute, peaks, wrong, faults)


def try_out(
    plans: Sequence[Plan], weights: Tensors, requests: Sequence[Request], kernels: Kernels | None = None
) -> list[Trial]:
    """What each plan reaches, tried on these requests over and over; modelled where devices are stretched."""
    scale = scale_of(plans[0], weights, requests[0], kernels).factor
    with Captured(plans, weights, kernels, scale) as captured:
        num = EACH * captured.num_slots
        trials = try_plans(captured, [requests[i % len(requests)] for i in range(num)])
    return [replace(t, per_s=t.per_s * scale) for t in trials]


def _stamped(
    plans: Sequence[Plan],
    weights: Tensors,
    requests: Sequence[Request],
    policy: Callable[[int], int],
    kernels: Kernels | None,
    scale: Scale,
) -> Timeline:
    with Captured(plans, weights, kernels, scale.factor, is_profiled=True) as captured:
        engine = CudaEngine(captured, keeps_results=False)
        engine.run(requests, policy)
        return engine.timeline()


def scale_of(plan: Plan, weights: Tensors, request: Request, kernels: Kernels | None = None) -> Scale:
    """The time scale of a plan on stretched devices; 1 where none is stretched."""
    devices = plan.cluster.devices
    if not any(d.is_stretched for d in devices):
        return NO_SCALE
    first = devices[0]
    card = Cluster((Device(f"cuda:{first.ordinal}", DeviceKind.CUDA, "", 0, ordinal=first.ordinal),), ())
    own, _ = measure(plan.unit, card, weights, request, kernels)
    sharing = max(sum(d.ordinal == o for d in devices) for o in {d.ordinal for d in devices})
    targets = [[c.us for c in row] for costs in plan.costs for row in costs.costs]
    return choose_scale(targets, [row[0].us for costs in own for row in costs.costs], sharing)


def _compared(
    plan: Plan,
    weights: Tensors,
    requests: Sequence[Request],
    results: Sequence[RunResult],
    kernels: Kernels | None,
) -> dict[int, list[str]]:
    """Requests that differ from the undivided run, with what differs."""
    reference = Undivided(plan.unit, weights, driver.card(plan.cluster.devices[0].ordinal), kernels)
    found = {}
    for number, (request, result) in enumerate(zip(requests, results, strict=True)):
        if names := differing(reference.run(request), result):
            found[number] = names
    return found
