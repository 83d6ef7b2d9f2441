"""tessera plan: traces and costs -> which device runs which launch."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tessera.cli import batches
from tessera.cli.batches import by_batch
from tessera.cli.capture import RandomWeights
from tessera.cli.launches import Launches, checked_launches
from tessera.cli.output import AsJson, console, print_json, progress
from tessera.cli.plan_text import document, reasons, show, show_reasons
from tessera.errors import MismatchError, TesseraError, UnknownName
from tessera.ir import Cluster, Costs, Objective, Plan, Trace, Variant, WorkUnit, load, save

if TYPE_CHECKING:
    from tessera.plan import Tried, Wish

__all__ = ["document", "plan", "show", "show_reasons"]

LINK_HELP = (
    "What joins the devices: pcie4, pcie5, nvlink, ib100, ib200, ib400 or measured. Repeat for single pairs: "
    "emu:a100-emu:l40s=nvlink."
)
PIN_HELP = "Launches that must run there: attention=emu:a100, 'model.layers.0=emu:l40s', mm=..., decode=..."
BATCH_HELP = "The traces are of several batches of the same steps: choose the batch, lane by lane."


def plan(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL | TRACES", help="A model, or the traces of a request's steps, in order."
        ),
    ],
    costs: Annotated[list[Path] | None, typer.Option(help="Costs, one per trace in any order.")] = None,
    devices: Annotated[str | None, typer.Option(help="Devices to price, instead of --costs.")] = None,
    link: Annotated[list[str] | None, typer.Option(help=LINK_HELP, show_default="pcie4")] = None,
    bus: Annotated[
        list[str] | None, typer.Option(help="Devices whose links share one wire: emu:l40s,emu:l40s#1.")
    ] = None,
    objective: Annotated[str, typer.Option(help="throughput, latency, cost or energy.")] = "throughput",
    slots: Annotated[
        int | None,
        typer.Option(help="Microbatches in flight, at most.", show_default="4; of a model: chosen"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Of a model: the batch, instead of the best.", show_default=False)
    ] = None,
    prefill_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of a model: rows prefilled together, instead of the best.", show_default=False
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Of a model: tokens of a prompt.")] = 1024,
    output_tokens: Annotated[
        int,
        typer.Option(help="Of a model: tokens of an answer; 0: decodes alone, at a context of the prompt."),
    ] = 256,
    tpot_ms: Annotated[
        float | None,
        typer.Option(help="Of a model: milliseconds per output token, at most.", show_default=False),
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(help="Of a model: milliseconds to the first token, at most.", show_default=False),
    ] = None,
    random_weights: RandomWeights = False,
    launches: Launches = "",
    counts: Annotated[str | None, typer.Option(help="Runs of each step in a request, as 1,32.")] = None,
    policy: Annotated[str | None, typer.Option(help="Force a coarser policy, such as data-parallel.")] = None,
    pin: Annotated[list[str] | None, typer.Option(help=PIN_HELP)] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(help="Launches that must not run there: gemm=emu:l40s.")
    ] = None,
    batch_choices: Annotated[bool, typer.Option("--batch-choices", help=BATCH_HELP)] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why: utilisation and every kernel.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The plan to write.", show_default="LAST TRACE.plan")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decide which device runs which launch, and what that gives.

    Of a model, batch and microbatches are chosen too: what gives most tokens per second on these devices
    within their memory and the limits. No weights are needed, and none of the devices.

    Or give the traces of one request in order. A decode belongs to a prefill when both have the same batch
    and the decode's context is the prefill's context plus its reserve.
    """
    started = time.perf_counter()
    goal = _objective(objective)
    if _is_model(traces):
        from tessera.cli.plan_load import PlannedLoad, plan_for_load

        _refuse(
            {"--costs": costs, "--counts": counts, "--policy": policy, "--pin": pin, "--forbid": forbid}
            | {
                "--batch-choices": batch_choices,
                "--explain": explain,
                "--objective": objective != "throughput",
            }
        )
        wanted = PlannedLoad(
            traces[0],
            prompt_tokens,
            output_tokens,
            tpot_ms,
            ttft_ms,
            batch,
            prefill_batch,
            slots,
            random_weights,
            checked_launches(launches),
        )
        plan_for_load(wanted, _cluster(devices, link or [], bus or []), output, as_json)
        return
    given: dict[str, object] = {
        "--batch": batch,
        "--prefill-batch": prefill_batch,
        "--tpot-ms": tpot_ms,
        "--ttft-ms": ttft_ms,
        "--launches": launches,
    }
    _refuse(given, "a model's name, not traces")
    slots = 4 if slots is None else slots
    paths = [Path(trace) for trace in traces]
    loaded = [load(Trace, path) for path in paths]
    units = by_batch(loaded) if batch_choices else [loaded]
    wishes = _wishes(pin or [], forbid or [])

    def prices(unit: WorkUnit) -> tuple[Cluster, tuple[Costs, ...]]:
        known = {trace.digest for trace in loaded}
        return _prices(unit, known, costs or [], devices, link or [], bus or [])

    with progress("building graphs", 3 * len(units) + (len(units) > 1)) as advance:
        tried = [_variant(chosen, _counts(counts), prices, advance) for chosen in units]
        cluster = tried[0][0]
        made, alone = _planned(cluster, [v for _, v in tried], goal, slots, policy, wishes, advance)
    path = output or paths[-1].with_suffix(".plan")
    save(made, path)
    if as_json:
        seconds = round(time.perf_counter() - started, 3)
        more = batches.document(made, alone) if batch_choices else {}
        more |= {"explain": reasons(made)} if explain else {}
        print_json(document(made) | more | {"output": str(path), "seconds": seconds})
    else:
        show(made)
        if batch_choices:
            batches.show(made, alone)
        if explain:
            show_reasons(made)
        console().print(f"{path}: written", markup=False)


def _is_model(words: Sequence[str]) -> bool:
    """One word that is no file of a trace."""
    return len(words) == 1 and not Path(words[0]).is_file() and not words[0].endswith(".trace")


def _refuse(given: dict[str, object], needs: str = "traces, not a model's name") -> None:
    """Options of the other form."""
    for name, value in given.items():
        if value or (value == 0 and value is not False):
            raise TesseraError(f"{name} needs {needs}", "Leave it out, or see `tessera plan --help`.", name)


def _cluster(devices: str | None, links: list[str], buses: list[str]) -> Cluster:
    from tessera.profile import parse_devices, wire

    if devices is None:
        raise TesseraError("no devices were named", "Name them: --devices emu:a100,emu:l40s.", "--devices")
    return wire(parse_devices(devices), links, buses)


def _variant(
    traces: Sequence[Trace],
    counts: tuple[int, ...] | None,
    prices: Callable[[WorkUnit], tuple[Cluster, tuple[Costs, ...]]],
    advance: Callable[[str], None],
) -> tuple[Cluster, Variant]:
    """The steps of one batch, priced."""
    from tessera.flow import make_unit

    unit = make_unit(traces, counts)
    advance("pricing")
    cluster, costs = prices(unit)
    advance("planning")
    return cluster, Variant(unit, costs)


def _planned(
    cluster: Cluster,
    variants: list[Variant],
    goal: Objective,
    slots: int,
    policy: str | None,
    wishes: "tuple[Wish, ...]",
    advance: Callable[[str], None],
) -> "tuple[Plan, tuple[Tried, ...]]":
    """The plan, and what each batch by itself gives."""
    from tessera.flow import make_batched_plan
    from tessera.plan import PlanConfig

    config = PlanConfig(objective=goal, slots=slots, policy=policy, wishes=wishes)
    found = make_batched_plan(variants, cluster, config, advance)
    return found.plan, found.tried


def _wishes(pins: list[str], forbidden: list[str]) -> "tuple[Wish, ...]":
    from tessera.plan import parse_wish

    return (*(parse_wish(x, True) for x in pins), *(parse_wish(x, False) for x in forbidden))


def _objective(name: str) -> Objective:
    if name not in tuple(Objective):
        raise UnknownName("objective", name, tuple(Objective))
    return Objective(name)


def _counts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise TesseraError(
            f"'{text}' is not a list of counts", "Write one per trace, as 1,32.", "--counts"
        ) from None


def _prices(
    unit: WorkUnit,
    known: set[str],
    files: list[Path],
    devices: str | None,
    links: list[str],
    buses: list[str],
) -> tuple[Cluster, tuple[Costs, ...]]:
    """Costs from the files given, or made from the best source present; known: digests of all traces."""
    from tessera.flow import price
    from tessera.profile import wire

    if files and devices:
        raise TesseraError(
            "--costs and --devices were both given", "The costs name their devices; leave one."
        )
    if not files:
        if devices is None:
            raise TesseraError("neither --costs nor --devices was given", "Name devices: emu:a100,emu:l40s.")
        cluster = _cluster(devices, links, buses)
        return cluster, price(unit, cluster)
    loaded = {path: load(Costs, path) for path in files}
    by_trace = {c.trace_digest: c for c in loaded.values()}
    steps = {g.trace.digest: g.trace.step for g in unit.graphs}
    for path, found in loaded.items():
        if found.trace_digest not in known:
            raise MismatchError(
                "these are costs of another trace", "Price this trace with `tessera profile`.", str(path)
            )
    missing = [step.kind for digest, step in steps.items() if digest not in by_trace]
    if missing:
        raise MismatchError(f"no costs for {', '.join(missing)}", "Give --costs once for every trace.")
    cluster = wire(next(iter(loaded.values())).devices, links, buses)
    for path, found in loaded.items():
        if found.devices != cluster.devices:
            raise MismatchError("these costs are for other devices than the first", place=str(path))
    return cluster, tuple(by_trace[digest] for digest in (g.trace.digest for g in unit.graphs))
