"""tessera demo: the gain of a plan, the proof that results do not change, and a case without gain.

Gain: a full-size model on two cards, planned from its outlines in its own process. Proof: a small Llama with
random weights, planned three times, run on one worker process per device, and compared bit for bit.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.rule import Rule
from rich.text import Text

from tessera.cli.output import HIDDEN, Illustrated, Record, progress, shown
from tessera.cli.plan import EffortOption
from tessera.cli.plan_load import (
    BASELINES,
    PlannedLoad,
    PolicyFigures,
    curve,
    how_sure,
    load_figures,
    planned,
    policy_figures,
    verdict,
)
from tessera.cli.plan_text import PlanFigures, PlanTables, plan_figures, sure
from tessera.cli.run import is_equal, overlap, run_through, shares
from tessera.errors import TesseraError, WorkerError
from tessera.ir import Cluster, Objective, Plan, Step, Timeline, save
from tessera.plan import Option
from tessera.report import (
    Shown,
    compared,
    duration,
    layer_picture,
    main_lane,
    short_name,
    write_perfetto,
    write_report,
)

if TYPE_CHECKING:
    import torch

    from tessera.execute.offline import RunResult
    from tessera.plan import LoadPlan

# Gain: a model with shipped outlines, decodes only, at least ten tokens per second for each user, on two
# cards of opposite strength.
FULL = PlannedLoad("llama-3-8b", prompt_tokens=1024, output_tokens=0, tpot_ms=100.0)
FULL_DEVICES, FULL_LINK = "emu:h20,emu:l40s", "pcie4"
# The proof.
MODEL = "tiny-llama"
PROMPTS = (
    "Heterogeneous GPUs, working as one",
    "A kernel is code; a launch is one run of it",
    "Which card should run this?",
    "Sound before fast",
    "Transfers hide behind compute",
    "No gain: use one GPU",
)
PROMPT_TOKENS = 48
# Tokens of the small model are bytes, a begin and an end.
BEGIN, END = 256, 257
SIMULATED_REQUESTS = 12
# Two objectives, and a policy that always divides each layer, so that the bit comparison never depends on
# whether dividing such a small model pays.
POLICIES = ((Objective.THROUGHPUT, None), (Objective.LATENCY, None), (Objective.THROUGHPUT, "attention-ffn"))
FIRST_LINE = (
    f"Plans {FULL.model} for two different cards, proves on a small model that dividing it changes no bit, "
    "and shows where dividing does not pay. No GPU, no weights; less than a minute."
)


class DemoGain(Record, frozen=True):
    """The gain of the full-size model; the plan and every baseline keep to `tpot_ms`."""

    model: str
    devices: tuple[str, ...]
    tpot_ms: float | None
    rel_error: float
    ratio_to_data_parallel: float | None
    ratio_to_best_baseline: float | None
    best_baseline: str | None
    source: str
    tokens_per_s: float
    batches: dict[str, int]
    baselines: Annotated[dict[str, PolicyFigures], shown(BASELINES)]
    frontier: Annotated[tuple[Option, ...], HIDDEN]


class DemoRun(Record, frozen=True):
    """The results of the demo; people read the text printed before."""

    headline: Annotated[DemoGain, HIDDEN]
    verified: bool
    model: Annotated[str, HIDDEN]
    devices: Annotated[tuple[str, ...], HIDDEN]
    requests: Annotated[int, HIDDEN]
    # Requests per second of the small model by policy, with their unit and source.
    throughput: Annotated[dict[str, float | str | None], HIDDEN]
    plans: Annotated[dict[str, PlanFigures], HIDDEN]
    # Overlap of workers and figures of each device, by policy.
    measured: Annotated[dict[str, dict[str, Any]], HIDDEN]
    files: Annotated[dict[str, str], HIDDEN]
    seconds: float

    def problem(self) -> TesseraError | None:
        """A difference to the reference run."""
        if self.verified:
            return None
        return TesseraError("the divided run differs from the reference run", "Please report this.")


class DemoPolicies(Record, frozen=True):
    """The table of the first part."""

    policies: Annotated[dict[str, PolicyFigures], shown("each policy at its own best (simulated)")]


@dataclass(frozen=True)
class Policy:
    """One plan, run on workers and compared with the reference run."""

    plan: Plan
    results: "list[RunResult]"
    measured: Timeline
    verified: bool


def demo(
    devices: Annotated[
        str, typer.Option(help="Two or more devices that divide the small model.")
    ] = "emu:a100,emu:l40s",
    link: Annotated[str, typer.Option(help="Link between the devices.")] = "pcie4",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each request.")] = 16,
    microbatches: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 4,
    effort: EffortOption = "full",
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for what is written.")] = Path(
        "tessera-demo"
    ),
) -> Illustrated[DemoRun]:
    """Plan a large model on two different cards; run a small one divided, and check every bit."""
    started = time.perf_counter()
    cluster = _cluster(devices, link)
    output.mkdir(parents=True, exist_ok=True)
    print(FIRST_LINE, file=sys.stderr)
    spawn = multiprocessing.get_context("spawn")
    with (
        progress("importing torch", 8 + 4 * len(PROMPTS)) as advance,
        ProcessPoolExecutor(1, spawn) as second,
    ):
        full = second.submit(plan_full, replace(FULL, effort=effort))
        policies = _run(cluster, tokens, microbatches, effort, output, advance)
        advance(f"planning {FULL.model}, in a second process since the start")
        found = full.result()
    files = _write(found, policies, output)
    seconds = round(time.perf_counter() - started, 1)
    run = _record(found, policies, files, seconds)
    return Illustrated(run, tuple(_story(found, policies, run)))


def plan_full(load: PlannedLoad) -> "LoadPlan":
    """The full-size model, planned for its cards within the limit of time per token."""
    return planned(load, _cluster(FULL_DEVICES, FULL_LINK), lambda text: None)[0]


def _cluster(devices: str, link: str) -> Cluster:
    from tessera.profile import make_cluster, parse_devices

    cluster = make_cluster(parse_devices(devices), link)
    if len(cluster.devices) < 2:
        remedy = "Name two or more, such as emu:a100,emu:l40s."
        raise TesseraError("the demo divides work, and one device divides none", remedy, "--devices")
    return cluster


def _run(
    cluster: Cluster,
    tokens: int,
    microbatches: int,
    effort: str,
    output: Path,
    advance: Callable[[str], None],
) -> list[Policy]:
    from tessera.capture import build, record
    from tessera.execute.worker_stepper import WorkerStepper
    from tessera.flow import UnitRequest, make_plan, make_unit, price, run_reference
    from tessera.plan import search_config

    steps = (
        Step(MODEL, "prefill", 1, PROMPT_TOKENS, reserve=tokens),
        Step(MODEL, "decode", 1, PROMPT_TOKENS + tokens),
    )
    advance("capturing prefill and decode")
    workloads = [build(step) for step in steps]
    traces = [record(workload) for workload in workloads]
    for trace in traces:
        save(trace, output / f"{trace.step.kind}.trace")
    advance("finding dependencies")
    unit = make_unit(traces)
    advance(f"pricing every launch on {', '.join(cluster.names)}")
    costs = price(unit, cluster)
    plans = []
    for objective, policy in POLICIES:
        advance(f"planning for {policy or objective.value}")
        plans.append(
            make_plan(unit, costs, cluster, objective, microbatches, policy, search=search_config(effort))
        )
        save(plans[-1], output / f"{plans[-1].policy}.plan")
    requests = [UnitRequest(workloads, _prompt_inputs(prompt), seed) for seed, prompt in enumerate(PROMPTS)]
    reference = []
    for request in requests:
        reference.append(run_reference(unit, request))
        advance("generating on one device, for comparison")
    policies = []
    with WorkerStepper(plans, workloads[0].weights(), max_failures=3) as stepper:
        for number, plan in enumerate(plans):
            ran = run_through(stepper, requests, number, None, advance)
            if failed := next((r.error for r in ran.results if r.error), ""):
                raise WorkerError(failed, "Check the memory of this machine, then run again.")
            verified = all(map(is_equal, reference, ran.results))
            policies.append(Policy(plan, ran.results, ran.timeline, verified))
    return policies


def _write(full: "LoadPlan", policies: list[Policy], output: Path) -> dict[str, str]:
    from tessera.plan import explain
    from tessera.simulate import simulate

    first = policies[0]
    files = {
        "page": output / "report.html",
        "full_plan": output / f"{FULL.model}.plan",
        "full_perfetto": output / f"{FULL.model}.perfetto.json",
        "plan": output / f"{first.plan.policy}.plan",
        "perfetto": output / "timeline.perfetto.json",
        "perfetto_measured": output / "measured.perfetto.json",
    }
    save(full.plan, files["full_plan"])
    runs = [simulate(plan, SIMULATED_REQUESTS) for plan in (full.plan, first.plan)]
    write_perfetto(runs[0], files["full_perfetto"])
    write_perfetto(runs[1], files["perfetto"])
    write_perfetto(first.measured, files["perfetto_measured"])
    said = how_sure(full, sure(full.plan).rel_error)
    plans = [
        (FULL.model, Shown(full.plan, runs[0], f"{verdict(full)} {said}")),
        (MODEL, Shown(first.plan, runs[1], explain(first.plan).verdict)),
    ]
    write_report(output, plans, files["page"])
    return {name: str(path) for name, path in files.items()}


def _record(full: "LoadPlan", policies: list[Policy], files: dict[str, str], seconds: float) -> DemoRun:
    plan, gain = policies[0].plan, load_figures(full)
    same = (name for name in DemoGain.__struct_fields__ if hasattr(gain, name) and name != "tpot_ms")
    return DemoRun(
        headline=DemoGain(
            model=FULL.model,
            devices=full.plan.cluster.names,
            tpot_ms=FULL.tpot_ms,
            rel_error=gain.costs.rel_error,
            **{name: getattr(gain, name) for name in same},
        ),
        verified=all(p.verified for p in policies),
        model=MODEL,
        devices=plan.cluster.names,
        requests=len(PROMPTS),
        throughput={
            "unit": "requests/s",
            "source": "modelled",
            "plan": plan.simulated_per_s,
            "bound": plan.bound_per_s,
            **{b.name: b.throughput_per_s for b in plan.baselines},
        },
        plans={p.plan.policy: plan_figures(p.plan) for p in policies},
        measured={
            p.plan.policy: {
                "overlap": overlap(p.measured),
                "shares": shares(p.plan.cluster.names, p.measured.busy_us()),
            }
            for p in policies
        },
        files=files,
        seconds=seconds,
    )


def _story(full: "LoadPlan", policies: list[Policy], run: DemoRun) -> Iterator[RenderableType | Record]:
    yield from _gain(full, run.headline)
    yield from _proof(policies)
    yield from _no_gain(policies[0].plan)
    yield Rule("4. Where to look next", align="left")
    yield Text(f"{run.files['page']}  the plans as a page, for any browser")
    yield Text(f"{run.files['full_perfetto']}  a simulated run, for https://ui.perfetto.dev")
    yield Text(f"{run.files['perfetto_measured']}  a measured one")
    yield Text(f"tessera plan {FULL.model} --devices {FULL_DEVICES} --tpot-ms 50  another limit, other cards")
    yield Text(f"tessera serve {MODEL} --devices {','.join(run.devices)}  an OpenAI-compatible endpoint")


def _gain(full: "LoadPlan", gain: DemoGain) -> Iterator[RenderableType | Record]:
    yield Rule(f"1. The gain: {FULL.model} on {' beside '.join(gain.devices)}", align="left")
    yield Text(
        f"Decodes at a context of {FULL.prompt_tokens:,}; every policy has the memory of both cards and "
        f"keeps to {FULL.tpot_ms:.0f} ms a token."
    )
    yield DemoPolicies(policies=gain.baselines | {"the plan": policy_figures(full.chosen)})
    yield Text("\n".join(curve(full)))
    yield layer_picture(full.plan, main_lane(full.plan), 0)
    yield Text(f"Why: {_why(full.plan)} (modelled).")
    yield Text(verdict(full), style="bold")
    yield Text(how_sure(full, sure(full.plan).rel_error))


def _why(plan: Plan) -> str:
    """For each device its most important kernel: the time there and on the best other device."""
    from tessera.plan import explain

    weightiest: dict[str, str] = {}
    for r in explain(plan).reasons:
        here, there = duration(r.here_us), duration(r.there_us)
        module = ".".join(r.scope.split(".")[-2:])
        takes = f"takes {here} on {r.device} and would take {there} on {r.other}"
        weightiest.setdefault(r.device, f"{short_name(r.kernel)} of {module} {takes}")
    return "; ".join(weightiest.values())


def _proof(policies: list[Policy]) -> Iterator[RenderableType]:
    num = len(policies[0].plan.cluster.devices)
    yield Rule(f"2. The proof: {MODEL}, divided over {num} worker processes", align="left")
    for policy in policies:
        word = "equal bit for bit" if policy.verified else "DIFFERENT"
        runs = sum(len(r.outputs) for r in policy.results)
        yield Text(
            f"{policy.plan.policy}: {len(policy.results)} requests, {runs} steps; tokens, logits and bytes "
            f"of state {word} (measured)"
        )


def _no_gain(plan: Plan) -> Iterator[RenderableType | Record]:
    from tessera.plan import explain

    said = explain(plan)
    title = "Another gain" if said.is_gain else "No gain"
    yield Rule(f"3. {title}: the same {MODEL} on {' beside '.join(plan.cluster.names)}", align="left")
    yield PlanTables(devices=(), policies=compared(plan))
    yield Text(said.verdict)


def _prompt_inputs(prompt: str) -> "dict[str, torch.Tensor]":
    """Inputs of a prefill: a begin, the bytes of the prompt, and ends to fill up."""
    import torch

    row = [BEGIN, *prompt.encode()][:PROMPT_TOKENS]
    tokens = torch.tensor([row + [END] * (PROMPT_TOKENS - len(row))])
    positions = torch.arange(PROMPT_TOKENS)[None]
    return {"tokens": tokens, "positions": positions, "last": torch.tensor([len(row) - 1])}
