"""The record of a plan that `tessera plan` prints, for traces."""

from pathlib import Path
from typing import Annotated

from rich.console import RenderableType

from tessera.cli.output import HIDDEN, Record, shown
from tessera.ir import Objective, Plan
from tessera.ir.plan import Robust
from tessera.plan import explain, latency_bound_us
from tessera.plan.explain import DeviceMemory, Gain, KernelUse, Reason, Usage
from tessera.profile import sureness
from tessera.profile.coverage import Sureness
from tessera.report import PolicyLine, UsedDevice, compared, device_uses, layer_picture, main_lane


class LaneFigures(Record, frozen=True):
    share: float
    rate: Annotated[float, shown("requests/s")]
    launches: dict[str, int]


class PlanReasons(Record, frozen=True):
    """Why a plan is what it is: use of devices, links and memory, every kernel, and what moves would cost."""

    devices: tuple[Usage, ...]
    links: tuple[Usage, ...]
    bottleneck: str
    memory: Annotated[tuple[DeviceMemory, ...], shown("memory (modelled, at most)")]
    kernels: tuple[KernelUse, ...]
    gains: Annotated[tuple[Gain, ...], HIDDEN]
    num_transfers: Annotated[float, shown("transfers/request")]
    transfer_bytes: Annotated[float, shown("transferred/request")]
    error: Annotated[float, HIDDEN]
    # No placement serves one request alone faster.
    latency_bound_us: float
    reasons: Annotated[tuple[Reason, ...], HIDDEN]
    notes: tuple[str, ...]


class PlanFigures(Record, frozen=True):
    """A plan; every figure is modelled."""

    objective: Objective
    policy: str
    modelled: Annotated[bool, HIDDEN]
    devices: Annotated[tuple[str, ...], HIDDEN]
    # Requests per second: by busy time, simulated, and the bound of any plan.
    throughput: Annotated[float, HIDDEN]
    simulated: Annotated[float, HIDDEN]
    bound: Annotated[float, HIDDEN]
    gap: Annotated[float, HIDDEN]
    latency_us: Annotated[float, HIDDEN]
    microbatches: int
    max_microbatches: Annotated[int | None, HIDDEN]
    by_microbatches: Annotated[dict[str, float], shown("requests/s by microbatches")]
    batch: int
    rows_per_s: float
    lanes: Annotated[tuple[LaneFigures, ...], shown("lanes (modelled)")]
    lane_table: Annotated[tuple[int, ...], HIDDEN]
    rounding_loss: Annotated[float, HIDDEN]
    used: tuple[str, ...]
    usd_per_hour: float | None
    usd_per_1k_units: Annotated[float | None, shown("USD/1,000 requests")]
    joules_per_unit: Annotated[float | None, shown("joules/request")]
    robust: Annotated[Robust | None, HIDDEN]
    constraints: tuple[str, ...]
    baselines: Annotated[dict[str, float | None], HIDDEN]
    baseline_latency_us: Annotated[dict[str, float | None], HIDDEN]
    baseline_usd_per_1k_units: Annotated[dict[str, float | None], HIDDEN]
    baseline_joules_per_unit: Annotated[dict[str, float | None], HIDDEN]
    costs: Annotated[Sureness, HIDDEN]
    # Latency plans only.
    latency_bound_us: Annotated[float | None, HIDDEN] = None
    latency_gap: float | None = None
    explain: Annotated[PlanReasons | None, shown("reasons (modelled)")] = None
    output: Path | None = None
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    headline: str = ""


def plan_figures(
    plan: Plan,
    reasons: PlanReasons | None = None,
    output: Path | None = None,
) -> PlanFigures:

    names, costs = plan.cluster.names, sureness(plan)
    bound_us = latency_bound_us(plan) if plan.objective is Objective.LATENCY else None
    return PlanFigures.of(
        plan,
        modelled=True,
        devices=names,
        throughput=plan.throughput_per_s,
        simulated=plan.simulated_per_s,
        bound=plan.bound_per_s,
        by_microbatches={str(number): rate for number, rate in plan.by_microbatches},
        lanes=_lanes(plan),
        used=tuple(names[d] for d in plan.used),
        baselines={b.name: b.throughput_per_s for b in plan.baselines},
        baseline_latency_us={b.name: b.latency_us for b in plan.baselines},
        baseline_usd_per_1k_units={b.name: b.usd_per_1k_units for b in plan.baselines},
        baseline_joules_per_unit={b.name: b.joules_per_unit for b in plan.baselines},
        costs=costs,
        latency_bound_us=bound_us,
        latency_gap=None if bound_us is None else max(0.0, 1.0 - bound_us / plan.latency_us),
        explain=reasons,
        output=output,
        notes=(f"Costs: {costs.sentence}",),
        headline=explain(plan).verdict,
    )


def _lanes(plan: Plan) -> tuple[LaneFigures, ...]:
    names, total = plan.cluster.names, sum(x.rate_per_s for x in plan.lanes)
    return tuple(
        LaneFigures(
            share=lane.rate_per_s / total,
            rate=lane.rate_per_s,
            launches={n: sum(x.count(i) for x in lane.placement.devices) for i, n in enumerate(names)},
        )
        for lane in plan.lanes
    )


def reasons_of(plan: Plan) -> PlanReasons:
    return PlanReasons.of(explain(plan), latency_bound_us=latency_bound_us(plan))


class PlanTables(Record, frozen=True):
    devices: Annotated[tuple[UsedDevice, ...], shown("devices (utilisation modelled)")]
    policies: Annotated[tuple[PolicyLine, ...], shown("against coarser policies (modelled costs, simulated)")]


def pictures(plan: Plan) -> tuple[RenderableType | Record, ...]:
    step = len(plan.unit.graphs) - 1
    tables = PlanTables(devices=device_uses(plan), policies=compared(plan))
    return layer_picture(plan, main_lane(plan), step), tables
