"""tessera demo: a load planned for two unlike cards, a proof that dividing changes no bit, and a service."""

import asyncio
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import RenderableType
from rich.rule import Rule
from rich.text import Text

from tessera.cli import plan_model
from tessera.cli.output import HIDDEN, Illustrated, Record, option, progress
from tessera.cli.plan import PlanFigures, plan_figures
from tessera.cli.render import RecordTable
from tessera.cli.run import overlap, run_plans, shares
from tessera.errors import TesseraError, WorkerError
from tessera.ir import Cluster, GroupSize, Load, Objective, Plan, ServicePlan, Step, Timeline, save
from tessera.plan import QUICK, PlanConfig
from tessera.profile import parse_devices, wire
from tessera.report import layer_picture, main_lane, write_perfetto, write_report
from tessera.simulate import simulate

if TYPE_CHECKING:
    from tessera.serve.records import Ask
    from tessera.serve.service import Service

# A model with shipped outlines, on two cards of opposite strength.
FULL_MODEL, FULL = "llama-3-8b", plan_model.PlannedLoad(prompt_tokens=1024, output_tokens=256, tpot_ms=50.0)
FULL_DEVICES, FULL_LINK = "emu:h20,emu:l40s", "pcie4"
# The policies always divide the work, whether or not that pays for such a small model.
MODEL = "tiny-llama"
SERVED_POLICY, DIVIDED_POLICY = "prefill-decode", "attention-ffn"
NUM_REQUESTS, PROMPT_TOKENS, MICROBATCHES = 6, 48, 4
SIMULATED_REQUESTS = 12
FIRST_LINE = (
    f"Plans a load of {FULL_MODEL} for two different cards, proves that dividing a small model changes no "
    "bit, and serves it on two unlike devices. No GPU, no weights; about a minute."
)


class ServedDemo(Record, frozen=True):
    """Requests to the small model, served by a plan for a load."""

    policy: str
    groups: tuple[GroupSize, ...]
    requests: int
    tokens: int
    pages_moved: int
    # Whether every token is that of the model itself.
    verified: bool


class DemoRun(Record, frozen=True):
    """The results of the demo; people read the text printed before."""

    headline: Annotated[plan_model.ModelPlanFigures, HIDDEN]
    verified: bool
    model: Annotated[str, HIDDEN]
    devices: Annotated[tuple[str, ...], HIDDEN]
    requests: Annotated[int, HIDDEN]
    service: Annotated[ServedDemo, HIDDEN]
    plans: Annotated[dict[str, PlanFigures], HIDDEN]
    measured: Annotated[dict[str, dict[str, Any]], HIDDEN]
    files: Annotated[dict[str, str], HIDDEN]
    seconds: float = 0.0

    def problem(self) -> TesseraError | None:
        if self.verified:
            return None
        return TesseraError("the divided run differs from the reference run", "Please report this.")


@dataclass(frozen=True)
class SmallRuns:
    served: ServedDemo
    plan: Plan
    measured: Timeline
    verified: bool


def demo(
    devices: str = option("emu:a100,emu:l40s", "Two or more devices that serve the small model."),
    link: str = option("pcie4", "Link between the devices."),
    tokens: int = option(16, "Tokens to generate for each request.", min=1),
    effort: plan_model.EffortOption = "full",
    output: Path = option(Path("tessera-demo"), "Folder for what is written.", "-o", "--output"),
) -> Illustrated[DemoRun]:
    """Show the gain, the proof and a service, without a GPU.

    Plans a load for two different cards, checks every bit of a divided small model, and serves it.
    """
    cluster = _cluster(devices, link)
    output.mkdir(parents=True, exist_ok=True)
    print(FIRST_LINE, file=sys.stderr)
    spawn = multiprocessing.get_context("spawn")
    with (
        progress("importing torch", 16 + 2 * NUM_REQUESTS) as advance,
        ProcessPoolExecutor(1, spawn) as second,
    ):
        full = second.submit(plan_full, replace(FULL, effort=effort))
        small = _run_small(cluster, tokens, output, advance)
        advance(f"planning {FULL_MODEL}, in a second process since the start")
        planned = full.result()
    files = _write(planned.plan, small, output)
    names, measured = small.plan.cluster.names, small.measured
    run = DemoRun(
        headline=plan_model.model_figures(planned),
        verified=small.served.verified and small.verified,
        model=MODEL,
        devices=names,
        requests=NUM_REQUESTS,
        service=small.served,
        plans={small.plan.policy: plan_figures(small.plan)},
        measured={
            small.plan.policy: {"overlap": overlap(measured), "shares": shares(names, measured.busy_us())}
        },
        files=files,
    )
    return Illustrated(run, tuple(_story(run, small.plan)))


def plan_full(options: plan_model.PlannedLoad) -> plan_model.PlannedModel:
    return plan_model.plan_load(options.target(FULL_MODEL), _cluster(FULL_DEVICES, FULL_LINK))


def _cluster(devices: str, link: str) -> Cluster:
    cluster = wire(parse_devices(devices), [link])
    if len(cluster.devices) < 2:
        remedy = "Name two or more, such as emu:a100,emu:l40s."
        raise TesseraError("the demo divides work, and one device divides none", remedy, "--devices")
    return cluster


def _run_small(cluster: Cluster, tokens: int, output: Path, advance: Callable[[str], None]) -> SmallRuns:
    from tessera.capture import build, record
    from tessera.flow import make_plan, make_unit, price, requests_of

    steps = (
        Step(MODEL, "prefill", 1, PROMPT_TOKENS, reserve=tokens),
        Step(MODEL, "decode", 1, PROMPT_TOKENS + tokens),
    )
    advance("capturing prefill and decode")
    traces = [record(build(step)) for step in steps]
    for trace in traces:
        save(trace, output / f"{trace.step.kind}.trace")
    advance("planning kernel by kernel")
    unit = make_unit(traces)
    costs = price(unit, cluster)
    config = PlanConfig(Objective.THROUGHPUT, MICROBATCHES, DIVIDED_POLICY, search=QUICK)
    plan = make_plan(unit, costs, cluster, config)
    save(plan, output / f"{plan.policy}.plan")
    ran = run_plans([plan], NUM_REQUESTS, True, 1, None, {}, advance)
    if failed := next((r.error for r in ran.results if r.error), ""):
        raise WorkerError(failed, "Check the memory of this machine, then run again.")
    prompts = []
    for request in requests_of(plan, NUM_REQUESTS, is_fresh=True).work:
        row, last = request.first["tokens"][0], int(request.first["last"][0])
        prompts.append(tuple(row[: last + 1].tolist()))
    answers = [[int(out["next_tokens"][0]) for out in result.outputs] for result in ran.results]
    served = _serve(cluster, tokens, prompts, answers, output, advance)
    return SmallRuns(served, plan, ran.timeline, bool(ran.verified))


def _serve(
    cluster: Cluster,
    tokens: int,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    output: Path,
    advance: Callable[[str], None],
) -> ServedDemo:
    from tessera.capture import place_of
    from tessera.serve.planning import prepare
    from tessera.serve.records import Ask, Sampling, ServeSpec
    from tessera.serve.service import Service
    from tessera.serve.text import open_text

    advance(f"planning a load of {MODEL}")
    load, policies = Load(PROMPT_TOKENS, tokens), (SERVED_POLICY,)
    spec = ServeSpec(load=load, is_for_load=True, policies=policies, effort="quick")
    prepared = prepare(MODEL, cluster, spec, advance=advance)
    plan = prepared.policies[0]
    save(plan, output / f"{MODEL}.plan")
    greedy = Sampling(temperature=0.0)
    asks = [Ask(prompt, tokens + 1, greedy, ignores_end=True) for prompt in prompts]
    advance("starting workers")
    text = open_text(place_of(MODEL))
    with (
        prepared.workers() as stepper,
        Service(stepper, prepared.policies, prepared.model.shape, text, model=MODEL) as service,
    ):
        answers = asyncio.run(_answers(service, asks))
        pages_moved = service.snapshot().pages_moved
    return ServedDemo(
        policy=plan.policy,
        groups=tuple(group.size for group in plan.groups),
        requests=len(asks),
        tokens=sum(map(len, answers)),
        pages_moved=pages_moved,
        verified=answers == expected,
    )


async def _answers(service: "Service", asks: "list[Ask]") -> list[list[int]]:
    from tessera.serve.records import AnswerPiece

    async def answer(ask: "Ask") -> list[int]:
        events = [event async for event in service.answer(ask)]
        pieces = (event for event in events if isinstance(event, AnswerPiece))
        return [token.number for piece in pieces for token in piece.tokens]

    return list(await asyncio.gather(*map(answer, asks)))


def _write(full: ServicePlan | Plan, divided: SmallRuns, output: Path) -> dict[str, str]:
    files = {
        "page": output / "report.html",
        "full_plan": output / f"{FULL_MODEL}.plan",
        "served_plan": output / f"{MODEL}.plan",
        "plan": output / f"{divided.plan.policy}.plan",
        "perfetto": output / "timeline.perfetto.json",
        "perfetto_measured": output / "measured.perfetto.json",
    }
    save(full, files["full_plan"])
    run = simulate(divided.plan, SIMULATED_REQUESTS)
    write_perfetto(run, files["perfetto"])
    write_perfetto(divided.measured, files["perfetto_measured"])
    write_report(output, [(MODEL, divided.plan, run)], files["page"])
    return {name: str(path) for name, path in files.items()}


def _story(run: DemoRun, divided: Plan) -> Iterator[RenderableType]:
    gain, served, names = run.headline, run.service, run.devices
    yield Rule(f"1. The gain: {FULL_MODEL} on {' beside '.join(FULL_DEVICES.split(','))}", align="left")
    yield Text(
        f"Requests of {FULL.prompt_tokens:,} + {FULL.output_tokens:,} tokens; every policy has the memory of "
        f"both cards and keeps to {FULL.tpot_ms:.0f} ms a token."
    )
    plan = plan_model.PolicyFigures.of(gain, batch=gain.batches)
    policies = gain.baselines | {f"the plan: {gain.policy}": plan}
    yield RecordTable("each policy at its own best (rehearsed)", policies)
    yield Text(gain.headline, style="bold")
    yield Text(gain.notes[1])
    yield Rule(f"2. The proof: {MODEL}, divided kernel by kernel over {len(names)} workers", align="left")
    yield layer_picture(divided, main_lane(divided), 0)
    word = "equal bit for bit" if run.verified else "DIFFERENT"
    yield Text(f"{divided.policy}: tokens, logits and bytes of state {word} (measured)", style="bold")
    yield Rule(f"3. The service: {MODEL}, planned and served on {' beside '.join(names)}", align="left")
    for group in served.groups:
        yield Text(f"{group.role} on {', '.join(group.devices)}, {group.sequences} sequences")
    word = "equal to the model's own" if served.verified else "DIFFERENT from the model's own"
    yield Text(
        f"{served.policy}: {served.requests} requests at once, {served.pages_moved} pages moved, "
        f"{served.tokens} tokens {word} (measured)",
        style="bold",
    )
    yield Rule("4. Where to look next", align="left")
    yield Text(f"tessera simulate {run.files['full_plan']}  the plan of part 1, played on a virtual clock")
    yield Text(f"tessera serve {MODEL} --devices {','.join(names)}  an OpenAI-compatible endpoint")
    yield Text(f"{run.files['page']}  the divided plan as a page, for any browser")
    yield Text(f"{run.files['perfetto_measured']}  the measured run, for https://ui.perfetto.dev")
