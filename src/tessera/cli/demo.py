"""tessera demo: what Tessera gains, the proof that it changes nothing, and where it does not pay.

The gain is of a full-size model on two cards nobody has to own: planned from its outlines, without weights,
by a process of its own. The proof is a four-layer Llama-style model with random weights: captured, analyzed,
priced for two GPUs, planned three times, run for real on one worker process per device, and compared bit for
bit with the model itself. So small a model is also the case that gains nothing.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tessera.cli.output import AsJson, console, print_json, progress
from tessera.cli.plan_load import PlannedLoad, curve, how_sure, planned, policies_table, verdict
from tessera.cli.plan_load import document as load_document
from tessera.errors import TesseraError
from tessera.ir import Cluster, Objective, Plan, Step, Timeline, save

if TYPE_CHECKING:
    import torch

    from tessera.execute.offline import RunResult
    from tessera.execute.worker_stepper import WorkerStepper
    from tessera.flow import ReferenceRun, UnitRequest
    from tessera.plan import LoadPlan

# The gain: a model whose outlines are shipped, decodes alone, ten tokens a second for everyone at least; and
# two cards of opposite strength.
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
# Its tokens are bytes, a begin and an end.
BEGIN, END = 256, 257
SIMULATED_REQUESTS = 12
# Both objectives, and a policy that always divides every layer: whether the best plan divides so small a
# model hangs on a per cent, and the comparison of bits should not.
POLICIES = (
    (Objective.THROUGHPUT, None),
    (Objective.LATENCY, None),
    (Objective.THROUGHPUT, "attention-ffn"),
)
FIRST_LINE = (
    f"Plans {FULL.model} for two different cards, proves on a small model that dividing it changes no bit, "
    "and shows where dividing does not pay. No GPU, no weights; less than a minute."
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
        """True iff nothing differs from the reference run."""
        return self.tokens_equal and self.logits_equal and self.state_equal


def demo(
    devices: Annotated[
        str, typer.Option(help="Two or more devices that divide the small model.")
    ] = "emu:a100,emu:l40s",
    link: Annotated[str, typer.Option(help="What joins them.")] = "pcie4",
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each request.")] = 16,
    microbatches: Annotated[int, typer.Option(help="Requests in flight.")] = 4,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for what is written.")] = Path(
        "tessera-demo"
    ),
    as_json: AsJson = False,
) -> None:
    """Plan a large model on two different cards; run a small one divided, and check every bit."""
    if tokens < 1:
        raise TesseraError(f"{tokens} tokens are none", "Generate at least one.", "--tokens")
    started = time.perf_counter()
    cluster = _cluster(devices, link)
    output.mkdir(parents=True, exist_ok=True)
    if not as_json:
        console().print(FIRST_LINE, markup=False)
    spawn = multiprocessing.get_context("spawn")
    with (
        progress("importing torch", 8 + 4 * len(PROMPTS)) as advance,
        ProcessPoolExecutor(1, spawn) as second,
    ):
        full = second.submit(plan_full, FULL)
        policies = _run(cluster, tokens, microbatches, output, advance)
        advance(f"planning {FULL.model}, in a second process since the start")
        found = full.result()
    files = _write(found, policies, output)
    shown = _document(found, policies, files)
    shown["seconds"] = round(time.perf_counter() - started, 1)
    print_json(shown) if as_json else _show(found, policies, shown)
    if not shown["verified"]:
        raise TesseraError("the divided run differs from the reference run", "Please report this.")


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
    cluster: Cluster, tokens: int, microbatches: int, output: Path, advance: Callable[[str], None]
) -> list[Policy]:
    from tessera.capture import build, record
    from tessera.execute.stepper import SpanLog
    from tessera.execute.worker_stepper import WorkerStepper
    from tessera.flow import UnitRequest, make_plan, make_unit, price, run_reference

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
        plans.append(make_plan(unit, costs, cluster, objective, microbatches, policy))
        save(plans[-1], output / f"{plans[-1].policy}.plan")
    requests = [UnitRequest(workloads, _prompt_inputs(prompt), seed) for seed, prompt in enumerate(PROMPTS)]
    reference = []
    for request in requests:
        reference.append(run_reference(unit, request))
        advance("generating on one device, for comparison")
    with WorkerStepper(plans, workloads[0].weights(), max_failures=3) as stepper:
        stepper.spans = SpanLog(plans[0])
        return [_run_policy(stepper, i, requests, reference, advance) for i in range(len(plans))]


def _run_policy(
    stepper: "WorkerStepper",
    policy: int,
    requests: "list[UnitRequest]",
    reference: "list[ReferenceRun]",
    advance: Callable[[str], None],
) -> Policy:
    from tessera.execute.offline import run_offline, timeline_of
    from tessera.execute.reference import same_bits

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


def _write(full: "LoadPlan", policies: list[Policy], output: Path) -> dict[str, str]:
    from tessera.plan import explain
    from tessera.report import Shown, write_perfetto, write_report
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
    plans = [
        (FULL.model, Shown(full.plan, runs[0], f"{verdict(full)} {how_sure(full)}")),
        (MODEL, Shown(first.plan, runs[1], explain(first.plan).verdict)),
    ]
    write_report(output, plans, None, files["page"])
    return {name: str(path) for name, path in files.items()}


def _document(full: "LoadPlan", policies: list[Policy], files: dict[str, str]) -> dict[str, Any]:
    from tessera.cli.plan import document
    from tessera.cli.run import overlap, shares

    plan = policies[0].plan
    return {
        "headline": _headline(full),
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
            p.plan.policy: {
                "overlap": overlap(p.measured),
                "shares": shares(p.plan.cluster.names, p.measured.busy_us()),
            }
            for p in policies
        },
        "files": files,
    }


def _headline(full: "LoadPlan") -> dict[str, Any]:
    """The gain; `tpot_ms` is the limit that the plan and every baseline keep to."""
    found = load_document(full)
    same = (
        "ratio_to_data_parallel", "ratio_to_best_baseline", "best_baseline", "source", "tokens_per_s",
        "batches", "baselines", "frontier",
    )  # fmt: skip
    return {
        "model": FULL.model,
        "devices": list(full.plan.cluster.names),
        "tpot_ms": FULL.tpot_ms,
        "rel_error": found["costs"]["rel_error"],
        **{key: found[key] for key in same},
    }


def _show(full: "LoadPlan", policies: list[Policy], shown: dict[str, Any]) -> None:
    out = console()
    _show_gain(out, full, shown["headline"])
    _show_proof(out, policies)
    _show_no_gain(out, policies[0].plan)
    out.rule("4. Where to look next", align="left")
    files = shown["files"]
    for line in (
        f"{files['page']}  the plans as a page, for any browser",
        f"{files['full_perfetto']}  a simulated run, for https://ui.perfetto.dev",
        f"{files['perfetto_measured']}  a measured one",
        f"tessera plan {FULL.model} --devices {FULL_DEVICES} --tpot-ms 50  another limit, other cards",
        f"tessera serve {MODEL} --devices {','.join(shown['devices'])}  an OpenAI-compatible endpoint",
        f"done in {shown['seconds']} s",
    ):
        out.print(line, markup=False, soft_wrap=True)


def _show_gain(out: Console, full: "LoadPlan", headline: dict[str, Any]) -> None:
    from tessera.report import layer_picture, main_lane

    out.rule(f"1. The gain: {FULL.model} on {' beside '.join(headline['devices'])}", align="left")
    out.print(
        f"Decodes at a context of {FULL.prompt_tokens:,}; every policy has the memory of both cards and "
        f"keeps to {FULL.tpot_ms:.0f} ms a token.",
        markup=False,
    )
    out.print(policies_table(full))
    for line in curve(full):
        out.print(line, markup=False)
    out.print(layer_picture(full.plan, main_lane(full.plan), 0))
    out.print(f"Why: {_why(full.plan)} (modelled).", markup=False)
    out.print(verdict(full), markup=False, style="bold")
    out.print(how_sure(full), markup=False)


def _why(plan: Plan) -> str:
    """Of each device the kernel that would be missed most: its time there and on the best other one."""
    from tessera.plan import explain
    from tessera.report import duration, short_name

    weightiest: dict[str, str] = {}
    for r in explain(plan).reasons:
        here, there = duration(r.here_us), duration(r.there_us)
        module = ".".join(r.scope.split(".")[-2:])
        takes = f"takes {here} on {r.device} and would take {there} on {r.other}"
        weightiest.setdefault(r.device, f"{short_name(r.kernel)} of {module} {takes}")
    return "; ".join(weightiest.values())


def _show_proof(out: Console, policies: list[Policy]) -> None:
    num = len(policies[0].plan.cluster.devices)
    out.rule(f"2. The proof: {MODEL}, divided over {num} worker processes", align="left")
    for policy in policies:
        word = "equal bit for bit" if policy.verified else "DIFFERENT"
        runs = sum(len(r.outputs) for r in policy.results)
        out.print(
            f"{policy.plan.policy}: {len(policy.results)} requests, {runs} steps; tokens, logits and bytes "
            f"of state {word} (measured)",
            markup=False,
        )


def _show_no_gain(out: Console, plan: Plan) -> None:
    from tessera.plan import explain
    from tessera.report import comparison_table

    names = " beside ".join(plan.cluster.names)
    said = explain(plan)
    title = "Another gain" if said.is_gain else "No gain"
    out.rule(f"3. {title}: the same {MODEL} on {names}", align="left")
    out.print(comparison_table(plan))
    out.print(said.verdict, markup=False)


def _prompt_inputs(prompt: str) -> "dict[str, torch.Tensor]":
    """Inputs of a prefill: a begin, the bytes of the prompt, and ends to fill up."""
    import torch

    row = [BEGIN, *prompt.encode()][:PROMPT_TOKENS]
    tokens = torch.tensor([row + [END] * (PROMPT_TOKENS - len(row))])
    positions = torch.arange(PROMPT_TOKENS)[None]
    return {"tokens": tokens, "positions": positions, "last": torch.tensor([len(row) - 1])}
