"""tessera plan: which device runs which launch, from traces and costs or from a model's name."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tessera.cli.capture import Launches, RandomWeights
from tessera.cli.output import PER_TOKEN, TO_FIRST, Illustrated, finite, limit_ms, only_if, progress
from tessera.cli.plan_model import ModelPlanFigures, PlannedLoad, plan_model
from tessera.cli.plan_text import PlanFigures, pictures, plan_figures, reasons_of
from tessera.errors import MismatchError, TesseraError
from tessera.ir import MEMORY_SHARE, Cluster, Costs, Device, Objective, Plan, Trace, WorkUnit, load, save

if TYPE_CHECKING:
    from tessera.plan import Constraint, PlanConfig

LINK_HELP = (
    "Link between devices: pcie4, pcie5, nvlink, ib100, ib200, ib400 or measured. May be repeated for pairs: "
    "emu:a100-emu:l40s=nvlink."
)
PIN_HELP = "Launches that must run there: attention=emu:a100, 'model.layers.0=emu:l40s', mm=..., decode=..."


def is_model(words: Sequence[str]) -> bool:
    """Whether the words name a model: one word that is no file of a trace."""
    return len(words) == 1 and not Path(words[0]).is_file() and not words[0].endswith(".trace")


# Options of each form.
MODEL = only_if(lambda given: is_model(given["traces"]), "needs a model's name, not traces")
TRACES = only_if(lambda given: not is_model(given["traces"]), "needs traces, not a model's name")
NUM_MICROBATCHES = 4

TracesArgument = Annotated[
    list[str],
    typer.Argument(
        is_eager=True,
        metavar="MODEL | TRACES",
        help="A model, or the traces of a request's steps, in order.",
    ),
]
CostsOption = Annotated[
    list[Path] | None, typer.Option(callback=TRACES, help="Costs, one per trace in any order.")
]
BusOption = Annotated[
    list[str] | None, typer.Option(help="Devices whose links share one wire: emu:l40s,emu:l40s#1.")
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Microbatches in flight, at most.", show_default="4; MODEL form: chosen"),
]
BatchOption = Annotated[
    int | None,
    typer.Option(min=1, callback=MODEL, help="Batch size (MODEL form only).", show_default="chosen"),
]
PromptTokensOption = Annotated[
    int, typer.Option(min=1, callback=MODEL, help="Tokens per prompt (MODEL form only).")
]
OutputTokensOption = Annotated[
    int,
    typer.Option(
        min=0,
        callback=MODEL,
        help="Tokens per answer (MODEL form only); 0: decodes alone, at a context of the prompt.",
    ),
]
TpotMsOption = Annotated[float | None, limit_ms(f"{PER_TOKEN} (MODEL form)", callback=MODEL)]
TtftMsOption = Annotated[float | None, limit_ms(f"{TO_FIRST} (MODEL form)", callback=MODEL)]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(
        help="Most requests per second, dollar or joule; latency (traces only): the quickest single request."
    ),
]
CountsOption = Annotated[
    str | None,
    typer.Option(callback=TRACES, help="Runs of each step in a request, as 1,32.", show_default="1 each"),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        callback=TRACES, help="Force a coarser policy, such as data-parallel.", show_default="the best"
    ),
]
PinOption = Annotated[list[str] | None, typer.Option(callback=TRACES, help=PIN_HELP)]
ForbidOption = Annotated[
    list[str] | None, typer.Option(callback=TRACES, help="Launches that must not run there: gemm=emu:l40s.")
]
ExplainOption = Annotated[
    bool, typer.Option("--explain", callback=TRACES, help="Say why: utilisation and every kernel.")
]
EffortOption = Annotated[
    Literal["full", "quick"], typer.Option(help="Planning effort; quick: a rougher plan sooner.")
]
MemoryShareOption = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1,
        callback=finite,
        help="Share of each device's memory for weights and state (pages). The rest is for temporaries.",
    ),
]
MemoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--memory", metavar="DEVICE=SIZE", help="Cap of a device's memory: cuda:0=22GB; may be repeated."
    ),
]
FrequenciesOption = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="JSON of how often experts are chosen, by module: hot ones go to the GPU.",
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GPU=USD", help="Your own price, as h20=1.10 (USD per hour and card); may be repeated."
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="The plan to write.", show_default="LAST TRACE.plan; MODEL.plan"),
]


def plan(
    traces: TracesArgument,
    costs: CostsOption = None,
    devices: Annotated[
        str | None, typer.Option(help="Devices to price, in place of --costs: emu:a100,emu:l40s.")
    ] = None,
    link: Annotated[list[str] | None, typer.Option(help=LINK_HELP, show_default="pcie4")] = None,
    bus: BusOption = None,
    memory: MemoryOption = None,
    price: PriceOption = None,
    objective: ObjectiveOption = Objective.THROUGHPUT,
    microbatches: MicrobatchesOption = None,
    batch: BatchOption = None,
    prompt_tokens: PromptTokensOption = 1024,
    output_tokens: OutputTokensOption = 256,
    tpot_ms: TpotMsOption = None,
    ttft_ms: TtftMsOption = None,
    random_weights: RandomWeights = False,
    launches: Launches = None,
    expert_frequencies: FrequenciesOption = None,
    counts: CountsOption = None,
    policy: PolicyOption = None,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    effort: EffortOption = "full",
    memory_share: MemoryShareOption = MEMORY_SHARE,
    explain: ExplainOption = False,
    output: OutputOption = None,
) -> Illustrated[PlanFigures] | ModelPlanFigures:
    """Decide which device runs which launch, and what that gives.

    For a model, batch and microbatches are chosen too: most tokens per second (or per dollar, or per
    joule) on these devices within their memory and the limits. Neither weights nor devices are needed.

    Or give the traces of one request in order. A decode belongs to a prefill when both have the same batch
    and the decode's context is the prefill's context plus its reserve.
    """
    started = time.perf_counter()
    prices = _Prices(costs or [], devices, link or [], bus or [], memory or [], prices_of(price or ()))
    if is_model(traces):
        wanted = PlannedLoad(
            traces[0], prompt_tokens, output_tokens, tpot_ms, ttft_ms, batch, microbatches, random_weights,
            launches or "", objective, effort, memory_share, expert_frequencies,
        )  # fmt: skip
        return plan_model(wanted, prices.cluster(), output)
    from tessera.plan import PlanConfig, search_config

    if launches:
        raise TesseraError("needs a model's name, not traces", place="--launches")
    given = objective, microbatches or NUM_MICROBATCHES, policy, _constraints(pin, forbid)
    config = PlanConfig(*given, search=search_config(effort), memory_share=memory_share)
    made = _plan_traces(traces, _counts(counts), prices, config)
    path = output or Path(traces[-1]).with_suffix(".plan")
    save(made, path)
    seconds = round(time.perf_counter() - started, 3)
    return Illustrated(
        plan_figures(made, reasons_of(made) if explain else None, path, seconds), pictures(made)
    )


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """GPU -> USD per hour."""
    from tessera.profile import gpu

    found = {}
    for text in texts:
        name, _, usd = text.partition("=")
        with suppress(ValueError):
            found[gpu(name).name] = float(usd)
        if not 0 < found.get(gpu(name).name, 0) < math.inf:
            raise TesseraError(f"'{text}' is no price of a card", "Write it as h20=1.10.", "--price")
    return found


def _plan_traces(
    names: list[str], counts: tuple[int, ...] | None, prices: "_Prices", config: "PlanConfig"
) -> Plan:
    traces = [load(Trace, name) for name in names]
    with progress("building graphs", 3) as advance:
        from tessera.flow import make_unit
        from tessera.plan import solve
        from tessera.simulate import SteadyRates

        unit = make_unit(traces, counts)
        advance("pricing")
        cluster, costs = prices.of(unit)
        advance("planning")
        return solve(unit, costs, cluster, config, SteadyRates(config.search.long_window))


def _constraints(pins: list[str] | None, forbidden: list[str] | None) -> "tuple[Constraint, ...]":
    from tessera.plan import parse_constraint

    return (
        *(parse_constraint(x, True) for x in pins or ()),
        *(parse_constraint(x, False) for x in forbidden or ()),
    )


def _counts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise TesseraError(
            f"'{text}' is not a list of counts", "Write one per trace, as 1,32.", "--counts"
        ) from None


@dataclass(frozen=True)
class _Prices:
    """Costs from files, or from the best source."""

    files: list[Path]
    devices: str | None
    links: list[str]
    buses: list[str]
    # Caps of memory, and USD per hour by GPU, in place of the catalogue's.
    memory: list[str]
    usd: dict[str, float]

    def cluster(self) -> Cluster:
        from tessera.profile import parse_devices, wire

        if self.devices is None:
            raise TesseraError(
                "no devices were named", "Name them: --devices emu:a100,emu:l40s.", "--devices"
            )
        return wire(self._changed(parse_devices(self.devices)), self.links, self.buses)

    def _changed(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        from tessera.profile import cap_memory

        capped = cap_memory(devices, self.memory)
        return tuple(replace(d, usd_per_hour=self.usd.get(d.gpu or "", d.usd_per_hour)) for d in capped)

    def of(self, unit: WorkUnit) -> tuple[Cluster, tuple[Costs, ...]]:
        from tessera.flow import price
        from tessera.profile import wire

        if self.files and self.devices:
            raise TesseraError(
                "--costs and --devices were both given", "The costs name their devices; leave one."
            )
        if not self.files:
            if self.devices is None:
                raise TesseraError(
                    "neither --costs nor --devices was given", "Name devices: emu:a100,emu:l40s."
                )
            cluster = self.cluster()
            return cluster, price(unit, cluster)
        loaded = {path: load(Costs, path) for path in self.files}
        loaded = {p: replace(c, devices=self._changed(c.devices)) for p, c in loaded.items()}
        by_trace = {c.trace_digest: c for c in loaded.values()}
        steps = {g.trace.digest: g.trace.step for g in unit.graphs}
        for path, found in loaded.items():
            if found.trace_digest not in steps:
                raise MismatchError(
                    "these are costs of another trace", "Price this trace with `tessera profile`.", str(path)
                )
        missing = [step.kind for digest, step in steps.items() if digest not in by_trace]
        if missing:
            raise MismatchError(f"no costs for {', '.join(missing)}", "Give --costs once for every trace.")
        cluster = wire(next(iter(loaded.values())).devices, self.links, self.buses)
        for path, found in loaded.items():
            if found.devices != cluster.devices:
                raise MismatchError("these costs are for other devices than the first", place=str(path))
        return cluster, tuple(by_trace[digest] for digest in (g.trace.digest for g in unit.graphs))
