"""tessera plan: which device runs which launch, from traces and costs or from a model's name."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from tessera.cli.output import Illustrated, option, progress
from tessera.cli.plan_model import TRACES, ModelPlanFigures, PlannedLoad, is_model, plan_model
from tessera.cli.plan_text import PlanFigures, pictures, plan_figures, reasons_of
from tessera.errors import MismatchError, TesseraError
from tessera.ir import Cluster, Costs, Device, Plan, Trace, WorkUnit, load, save
from tessera.plan import PlanConfig, parse_constraint, search_config
from tessera.profile import cap_memory, gpu, parse_devices, wire

LINK_HELP = (
    "Link between devices: pcie4, pcie5, nvlink, ib100, ib200, ib400 or measured. May be repeated for pairs: "
    "emu:a100-emu:l40s=nvlink."
)
PIN_HELP = "Launches that must run there: attention=emu:a100, 'model.layers.0=emu:l40s', mm=..., decode=..."


NUM_MICROBATCHES = 4

LinkOption = Annotated[list[str] | None, option(LINK_HELP, default="pcie4")]
MemoryOption = Annotated[
    list[str] | None,
    option("Cap of a device's memory: cuda:0=22GB; may be repeated.", "--memory", metavar="DEVICE=SIZE"),
]
PriceOption = Annotated[
    list[str] | None,
    option("Your own price, as h20=1.10 (USD per hour and card); may be repeated.", metavar="GPU=USD"),
]


@dataclass(frozen=True, kw_only=True)
class PricedDevices:
    costs: Annotated[list[Path] | None, option("Costs, one per trace in any order.", callback=TRACES)] = None
    devices: Annotated[str | None, option("Devices to price, in place of --costs: emu:a100,emu:l40s.")] = None
    link: LinkOption = None
    bus: Annotated[list[str] | None, option("Devices whose links share one wire: emu:l40s,emu:l40s#1.")] = (
        None
    )
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
        list[str],
        typer.Argument(
            is_eager=True,
            metavar="MODEL | TRACES",
            help="A model, or the traces of a request's steps, in order.",
        ),
    ],
    prices: PricedDevices,
    options: PlannedLoad,
    counts: Annotated[
        str | None, option("Runs of each step in a request, as 1,32.", default="1 each", callback=TRACES)
    ] = None,
    policy: Annotated[
        str | None,
        option("Force a coarser policy, such as data-parallel.", default="the best", callback=TRACES),
    ] = None,
    pin: Annotated[list[str] | None, option(PIN_HELP, callback=TRACES)] = None,
    forbid: Annotated[
        list[str] | None, option("Launches that must not run there: gemm=emu:l40s.", callback=TRACES)
    ] = None,
    explain: Annotated[
        bool, option("Say why: utilisation and every kernel.", "--explain", callback=TRACES)
    ] = False,
    output: Annotated[
        Path | None, option("The plan to write.", "-o", "--output", default="LAST TRACE.plan; MODEL.plan")
    ] = None,
) -> Illustrated[PlanFigures] | ModelPlanFigures:
    """Decide which device runs which launch, and what that gives.

    For a model, batch and microbatches are chosen too: most tokens per second (or per dollar, or per
    joule) on these devices within their memory and the limits. Neither weights nor devices are needed.

    Or give the traces of one request in order. A decode belongs to a prefill when both have the same batch
    and the decode's context is the prefill's context plus its reserve.
    """
    if is_model(traces):
        return plan_model(traces[0], options, prices.cluster(), output)

    if options.launches:
        raise TesseraError("needs a model's name, not traces", place="--launches")
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

    prices = {}
    for text in texts:
        name, _, usd = text.partition("=")
        with suppress(ValueError):
            prices[gpu(name).name] = float(usd)
        if not 0 < prices.get(gpu(name).name, 0) < math.inf:
            raise TesseraError(f"'{text}' is no price of a card", "Write it as h20=1.10.", "--price")
    return prices


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
