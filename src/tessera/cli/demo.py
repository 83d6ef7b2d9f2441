"""tessera demo: the whole flow on a small model, on devices nobody has to own.

A four-layer Llama-style model with random weights is captured, analyzed, priced for two GPUs, planned twice,
run for real on one worker process a device, and compared bit for bit with the undivided model.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from tessera.cli.output import AsJson, console, print_json, progress
from tessera.errors import TesseraError
from tessera.ir import Clock, Objective, Plan, Step, Timeline, save

if TYPE_CHECKING:
    from tessera.execute.offline import RunResult
    from tessera.execute.worker_stepper import WorkerStepper
    from tessera.flow import Undivided, UnitRequest

MODEL = "tiny-llama"
PROMPTS = (
    "Unlike GPUs, working as one",
    "A kernel is code; a launch is one run of it",
    "Which card should run this?",
    "Sound before fast",
    "Transfers hide behind compute",
    "No gain: use one GPU",
)
PROMPT_TOKENS = 48
SIMULATED_REQUESTS = 12
WORDS = (
    "A lane is one way to place the launches; each microbatch keeps to one of the lanes. "
    "Rates by busy time alone leave out all waiting."
)
SMALL = (
    "So small a model seldom gains by dividing a request between two GPUs; "
    'for one that does, see "The gain, and its limits" in the README.'
)
# Both objectives, and a policy that always divides every layer: whether the best plan divides so small a
# model hangs on a per cent, and the comparison of bits should not.
POLICIES = (
    (Objective.THROUGHPUT, None),
    (Objective.LATENCY, None),
    (Objective.THROUGHPUT, "attention-ffn"),
)


@dataclass(frozen=True)
class Policy:
    """One plan, run for real."""

    plan: Plan
    results: "list[RunResult]"
    measured: Timeline
    tokens_equal: bool
    logits_equal: bool
    state_equal: bool

    @property
    def verified(self) -> bool:
        """True iff nothing differs from the undivided run."""
        return self.tokens_equal and self.logits_equal and self.state_equal


def demo(
    devices: Annotated[str, typer.Option(help="Two or more devices.")] = "emu:a100,emu:l40s",
    link: Annotated[str, typer.Option(help="What joins them.")] = "pcie4",
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each request.")] = 24,
    slots: Annotated[int, typer.Option(help="Requests in flight.")] = 4,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for what is written.")] = Path(
        "tessera-demo"
    ),
    as_json: AsJson = False,
) -> None:
    """Capture, plan and run a small model on two unlike devices, and check every bit."""
    if tokens < 1:
        raise TesseraError(f"{tokens} tokens are none", "Generate at least one.", "--tokens")
    started = time.perf_counter()
    with progress("importing torch", 7 + 4 * len(PROMPTS)) as advance:
        policies = _run(devices, link, tokens, slots, output, advance)
    files = _write(policies, output)
    found = _document(policies, files, round(time.perf_counter() - started, 1))
    print_json(found) if as_json else _show(policies, files, found)
    if not found["verified"]:
        raise TesseraError("the divided run differs from the undivided one", "Please report this.")


def _run(
    devices: str, link: str, tokens: int, slots: int, output: Path, advance: Callable[[str], None]
) -> list[Policy]:
    from tessera.capture import build, record
    from tessera.capture.text import prompt_inputs
    from tessera.execute.spans import SpanLog
    from tessera.execute.worker_stepper import WorkerStepper
    from tessera.flow import UnitRequest, make_plan, make_unit, price, run_undivided
    from tessera.profile import make_cluster, parse_devices

    cluster = make_cluster(parse_devices(devices), link)
    if len(cluster.devices) < 2:
        remedy = "Name two or more, such as emu:a100,emu:l40s."
        raise TesseraError("the demo divides work, and one device divides none", remedy, "--devices")
    output.mkdir(parents=True, exist_ok=True)
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
    advance(f"pricing every launch on {devices}")
    costs = price(unit, cluster)
    plans = []
    for objective, policy in POLICIES:
        advance(f"planning for {policy or objective.value}")
        plans.append(make_plan(unit, costs, cluster, objective, slots, policy))
        save(plans[-1], output / f"{plans[-1].policy}.plan")
    requests = [
        UnitRequest(workloads, prompt_inputs([prompt], PROMPT_TOKENS), seed)
        for seed, prompt in enumerate(PROMPTS)
    ]
    reference = []
    for request in requests:
        reference.append(run_undivided(unit, request))
        advance("generating undivided, for comparison")
    with WorkerStepper(plans, workloads[0].weights(), max_failures=3) as stepper:
        stepper.spans = SpanLog(plans[0])
        return [_run_policy(stepper, i, requests, reference, advance) for i in range(len(plans))]


def _run_policy(
    stepper: "WorkerStepper",
    policy: int,
    requests: "list[UnitRequest]",
    reference: "list[Undivided]",
    advance: Callable[[str], None],
) -> Policy:
    from tessera.execute.offline import run_offline, timeline_of
    from tessera.execute.replay import same_bits

    plan, log = stepper.plans[policy], stepper.spans
    assert log is not None, "set when the workers were started"
    what = f"generating on {len(plan.cluster.devices)} workers, {plan.policy} policy"
    run = run_offline(stepper, requests, policy=policy, on_done=lambda number: advance(what), spans=log)
    run.raise_failures()
    results, measured = run.results, timeline_of(log, stepper.plans, run.results)
    pairs = list(zip(reference, results, strict=True))

    def equal(name: str) -> bool:
        return all(
            same_bits(a[name], b[name])
            for one, other in pairs
            for a, b in zip(one.outputs, other.outputs, strict=True)
        )

    state = all(same_bits(t, other.state[name]) for one, other in pairs for name, t in one.state.items())
    return Policy(plan, results, measured, equal("next_tokens"), equal("logits"), state)


def _write(policies: list[Policy], output: Path) -> dict[str, str]:
    from tessera.plan import explain
    from tessera.report import write_page, write_perfetto
    from tessera.simulate import simulate

    first = policies[0]
    simulated = simulate(first.plan, SIMULATED_REQUESTS)
    assert simulated.clock is Clock.SIMULATED
    files = {
        "perfetto": output / "timeline.perfetto.json",
        "perfetto_measured": output / "measured.perfetto.json",
        "page": output / "timeline.html",
        "plan": output / f"{first.plan.policy}.plan",
    }
    write_perfetto(simulated, files["perfetto"])
    write_perfetto(first.measured, files["perfetto_measured"])
    write_page(first.plan, simulated, files["page"], explain(first.plan).verdict)
    return {name: str(path) for name, path in files.items()}


def _document(policies: list[Policy], files: dict[str, str], seconds: float) -> dict[str, Any]:
    from tessera.cli.plan import document
    from tessera.cli.run import overlap, per_device

    plan = policies[0].plan
    return {
        "verified": all(p.verified for p in policies),
        "tokens_equal": all(p.tokens_equal for p in policies),
        "logits_equal": all(p.logits_equal for p in policies),
        "state_equal": all(p.state_equal for p in policies),
        "model": MODEL,
        "devices": list(plan.cluster.names),
        "requests": len(PROMPTS),
        "throughput": {
            "unit": "requests/s",
            "source": "modelled",
            "plan": plan.simulated_per_s,
            "bound": plan.bound_per_s,
            **{b.name: b.throughput_per_s for b in plan.baselines},
        },
        "plans": {p.plan.policy: document(p.plan) for p in policies},
        "measured": {
            p.plan.policy: {"overlap": overlap(p.measured), "per_device": per_device(p.plan, p.measured)}
            for p in policies
        },
        "files": files,
        "seconds": seconds,
    }


def _show(policies: list[Policy], files: dict[str, str], found: dict[str, Any]) -> None:
    from tessera.plan import explain
    from tessera.report import comparison_table, devices_table, layer_picture, where_time_goes

    out = console()
    plan = policies[0].plan
    decode = len(plan.unit.graphs) - 1
    lane = max(range(len(plan.lanes)), key=lambda i: plan.lanes[i].rate_per_s)
    out.print(layer_picture(plan, lane, decode))
    out.print(devices_table(plan))
    out.print(comparison_table(plan))
    out.print(where_time_goes(plan))
    single = next(b.throughput_per_s for b in plan.baselines if b.name == "single")
    if single:
        ratio = plan.simulated_per_s / single
        out.print(f"{ratio:.2f}x the throughput of the better of the two alone (modelled).")
    said = explain(plan)
    out.print(said.verdict, markup=False)
    out.print(WORDS if said.is_gain else f"{WORDS} {SMALL}", markup=False)
    out.print(_generated(policies[0]))
    for policy in policies:
        word = "equal bit for bit" if policy.verified else "DIFFERENT"
        runs = sum(len(r.outputs) for r in policy.results)
        out.print(
            f"{policy.plan.policy} policy: {len(policy.results)} requests, {runs} steps on "
            f"{len(plan.cluster.devices)} worker processes; tokens, logits and state {word}"
        )
    for name, path in files.items():
        out.print(f"{name}: {path}", markup=False)
    out.print(f"done in {found['seconds']} s", markup=False)


def _generated(policy: Policy) -> Panel:
    """What the requests produced; the weights are random, so it is noise, but the same noise everywhere."""
    from tessera.capture.text import decode

    lines = []
    for prompt, result in zip(PROMPTS, policy.results, strict=True):
        text = decode([int(step["next_tokens"][0]) for step in result.outputs])
        lines.append(f"{prompt} -> {text}")
    title = "Generated (random weights: noise, but the same noise on every placement)"
    return Panel(Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)), title=title)
