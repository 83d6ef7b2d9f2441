"""tessera plan: which device runs which launch, from traces and costs or from a model's name."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from tessera.cli.output import HIDDEN, Illustrated, Record, info, option, progress, shown, written
from tessera.cli.plan_model import TRACES, ModelPlanFigures, PlannedLoad, is_model, plan_model
from tessera.cli.render import RecordTable
from tessera.errors import MismatchError, TesseraError, by_name
from tessera.ir import Cluster, Costs, Device, Objective, Plan, Trace, WorkUnit, load, save
from tessera.ir.plan import Robust
from tessera.plan import PlanConfig, explain, latency_bound_us, parse_constraint, search_config
from tessera.plan.explain import DeviceMemory, Gain, KernelUse, Reason, Usage
from tessera.profile import cap_memory, gpu, parse_devices, sureness, wire
from tessera.profile.coverage import Sureness
from tessera.report import compared, device_uses, layer_picture, main_lane

LINK_HELP = (
    "Link between devices: pcie4, pcie5, nvlink, ib100, ib200, ib400 or measured. May be repeated for pairs: "
    "emu:a100-emu:l40s=nvlink."
)
PIN_HELP = "Launches that must run there: attention=emu:a100, 'model.layers.0=emu:l40s', mm=..., decode=..."


NUM_MICROBATCHES = 4

LinkOption = Annotated[list[str] | None, info(LINK_HELP, shown="pcie4")]
MemoryOption = Annotated[
    list[str] | None, info("Cap of a device's memory: cuda:0=22GB; may be repeated.", metavar="DEVICE=SIZE")
]
PriceOption = Annotated[
    list[str] | None,
    info("Your own price, as h20=1.10 (USD per hour and card); may be repeated.", metavar="GPU=USD"),
]


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


@dataclass(frozen=True, kw_only=True)
class PricedDevices:
    costs: list[Path] | None = option(None, "Costs, one per trace in any order.", callback=TRACES)
    devices: str | None = option(None, "Devices to price, in place of --costs: emu:a100,emu:l40s.")
    link: LinkOption = None
    bus: list[str] | None = option(None, "Devices whose links share one wire: emu:l40s,emu:l40s#1.")
    memory: MemoryOption = None
    price: PriceOption = None

    def cluster(self) -> Cluster:
        if self.devices is None:
            remedy = "Name them: --devices emu:a100,emu:l40s; for traces, --costs does too."
            raise TesseraError("no devices were named", remedy, "--devices")
        return wire(self._changed(parse_devices(self.devices)), self.link or [], self.bus or [])

    def _changed(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        capped, usd = cap_memory(devices, self.memory or []), prices_of(self.price or ())
        return tuple(replace(d, usd_per_hour=usd.get(d.gpu or "", d.usd_per_hour)) for d in capped)

    def of(self, unit: WorkUnit) -> tuple[Cluster, tuple[Costs, ...]]:
        from tessera.flow import price

        if not self.costs:
            cluster = self.cluster()
            return cluster, price(unit, cluster)
        if self.devices:
            remedy = "The costs name their devices; leave one."
            raise TesseraError("--costs and --devices were both given", remedy)
        by_trace: dict[str, Costs] = {}
        steps = {g.trace.digest: g.trace.step.kind for g in unit.graphs}
        for path in self.costs:
            table = load(Costs, path)
            table = replace(table, devices=self._changed(table.devices))
            if table.trace_digest not in steps:
                remedy = "Price this trace with `tessera profile`."
                raise MismatchError("these are costs of another trace", remedy, str(path))
            if any(table.devices != other.devices for other in by_trace.values()):
                raise MismatchError("these costs are for other devices than the first", place=str(path))
            by_trace[table.trace_digest] = table
        if missing := [kind for digest, kind in steps.items() if digest not in by_trace]:
            raise MismatchError(f"no costs for {', '.join(missing)}", "Give --costs once for every trace.")
        costs = tuple(by_trace[graph.trace.digest] for graph in unit.graphs)
        return wire(costs[0].devices, self.link or [], self.bus or []), costs


def plan(
    traces: Annotated[
        list[str], typer.Argument(metavar="MODEL | TRACES", help="A model, or a request's traces in order.")
    ],
    prices: PricedDevices,
    options: PlannedLoad,
    counts: str | None = option(
        None, "Runs of each step in a request, as 1,32.", shown="1 each", callback=TRACES
    ),
    policy: str | None = option(
        None, "Force a coarser policy, such as data-parallel.", shown="the best", callback=TRACES
    ),
    pin: list[str] | None = option(None, PIN_HELP, callback=TRACES),
    forbid: list[str] | None = option(
        None, "Launches that must not run there: gemm=emu:l40s.", callback=TRACES
    ),
    explain: bool = option(False, "Say why: utilisation and every kernel.", "--explain", callback=TRACES),
    output: Path | None = written("plan", "LAST TRACE.plan; MODEL.plan"),
) -> Illustrated[PlanFigures] | ModelPlanFigures:
    """Decide which device runs which launch, and what that gives.

    For a model, batch and microbatches are chosen too: most tokens per second (or per dollar, or per
    joule) on these devices within their memory and the limits. Neither weights nor devices are needed.

    Or give the traces of one request in order. A decode belongs to a prefill when both have the same batch
    and the decode's context is the prefill's context plus its reserve.
    """
    if is_model(traces):
        return plan_model(traces[0], options, prices.cluster(), output)

    for name in ("launches", "random_weights", "expert_frequencies"):
        if getattr(options, name):
            raise TesseraError("needs a model's name, not traces", place=f"--{name.replace('_', '-')}")
    constraints = (
        *(parse_constraint(word, True) for word in pin or ()),
        *(parse_constraint(word, False) for word in forbid or ()),
    )
    microbatches, search = options.microbatches or NUM_MICROBATCHES, search_config(options.effort)
    config = PlanConfig(
        options.objective, microbatches, policy, constraints, search=search, memory_share=options.memory_share
    )
    planned = _plan_traces(traces, _counts(counts), prices, config)
    path = output or Path(traces[-1]).with_suffix(".plan")
    save(planned, path)
    reasons = reasons_of(planned) if explain else None
    return Illustrated(plan_figures(planned, reasons, path), pictures(planned))


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """GPU -> USD per hour."""
    return by_name(map(_price, texts), "--price")


def _price(text: str) -> tuple[str, float]:
    name, _, usd = text.partition("=")
    card = gpu(name, "--price").name
    with suppress(ValueError):
        if 0 < float(usd) < math.inf:
            return card, float(usd)
    raise TesseraError(f"'{text}' is no price of a card", "Write it as h20=1.10.", "--price")


def _plan_traces(
    names: list[str], counts: tuple[int, ...] | None, prices: PricedDevices, config: PlanConfig
) -> Plan:
    traces = [load(Trace, name) for name in names]
    with progress("building graphs", 3) as advance:
        from tessera.flow import make_plan, make_unit

        unit = make_unit(traces, counts)
        advance("pricing")
        cluster, costs = prices.of(unit)
        advance("planning")
        return make_plan(unit, costs, cluster, config)


def _counts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise TesseraError(
            f"'{text}' is not a list of counts", "Write one per trace, as 1,32.", "--counts"
        ) from None


def plan_figures(plan: Plan, reasons: PlanReasons | None = None, output: Path | None = None) -> PlanFigures:
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


def pictures(plan: Plan) -> tuple[RenderableType, ...]:
    return (
        layer_picture(plan, main_lane(plan), len(plan.unit.graphs) - 1),
        RecordTable("devices (utilisation modelled)", device_uses(plan)),
        RecordTable("against coarser policies (modelled costs, simulated)", compared(plan)),
    )
