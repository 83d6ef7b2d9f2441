"""Which models Tessera takes: small random ones of many architectures, each through the whole flow.

    python -m benchmarks.coverage [--only NAME ...] [-o FILE] [--again] [--timeout 300] [--json | --markdown]

For every architecture of `coverage_models`, in a process of its own:
  captured  each of its steps (an encode, a prefill and a decode; a denoise; or a call) is recorded on the CPU
  planned   its steps as one request, on emu:a100,emu:l40s over pcie4
  verified  two such requests on two worker processes; every output and state is the model's own, bit for bit
  served    `tessera serve`'s preparation takes it, and a greedy answer is `generate`'s, token for token

A plan that keeps every request on one device proves little: it is made again as a layer pipeline where that
applies. The file is written after every architecture, and those in it are not run again without --again.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.coverage_models import MODELS, Model

# One request: a prompt of so many tokens a row, and so many decodes.
BATCH, PROMPT, TOKENS = 2, 20, 3
REQUESTS = 2
# A picture: some denoisers take squares only.
PATCHES = 16
DEVICES, LINK = "emu:a100,emu:l40s", "pcie4"
CACHED = ("encode", "prefill", "decode")
PICTURES = "qwen2_5_vl"
STAGES = ("captured", "planned", "verified", "served")
RESULTS = Path(__file__).parent / "results" / "coverage_202611.json"

Row = dict[str, Any]


def check(model: Model, is_served: bool = True, method: str = "fork") -> Row:
    """All stages of one architecture; a stage that fails says why in one line, and ends those behind it.

    `method` is how workers are started (see `hub`).
    """
    row: Row = {"name": model.name, "class": model.kind, "library": model.library}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Failed):
        model.write(Path(folder))
        traces = _stage(row, "captured", lambda: _capture(model, row, folder))
        plan = _stage(row, "planned", lambda: _plan(row, traces))
        _stage(row, "verified", lambda: _verify(plan, method))
        if is_served:
            _stage(row, "served", lambda: _serve(row, folder))
    return {k: v.replace(folder, model.name) if isinstance(v, str) else v for k, v in row.items()}


class _Failed(Exception):
    """A stage has failed; the row says why."""


def _stage(row: Row, name: str, work: Callable[[], Any]) -> Any:
    from tessera.errors import TesseraError

    try:
        made = work()
    except TesseraError as error:
        row[name] = " ".join(str(error).split())
        raise _Failed from error
    except Exception as error:  # a stranger's model: any defect is a row of the table
        row[name] = f"DEFECT {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise _Failed from error
    row[name] = True
    return made


def _capture(model: Model, row: Row, folder: str) -> Sequence[Any]:
    from tessera.capture import record_step
    from tessera.capture.models import steps_of_model
    from tessera.ir import Step

    kinds = steps_of_model(folder)
    mine = [k for k in CACHED if k in kinds] or kinds[:1]
    row["steps"] = list(mine)
    sizes = {"decode": (PROMPT + TOKENS, 0), "denoise": (PATCHES, 0)}
    if model.family == PICTURES:  # an encode makes half of the prompt
        sizes["encode"] = (PROMPT // 2, 0)
    traces = []
    for kind in mine:
        context, reserve = sizes.get(kind, (PROMPT, TOKENS))
        traces.append(record_step(Step(folder, kind, BATCH, context, 0, reserve, True)))
    row["launches"] = [len(trace.launches) for trace in traces]
    return traces


def _plan(row: Row, traces: Sequence[Any]) -> Any:
    from tessera import flow
    from tessera.ir import Objective
    from tessera.plan import PlanConfig
    from tessera.profile import parse_devices, wire

    unit = flow.make_unit(traces)
    cluster = wire(parse_devices(DEVICES), [LINK])
    costs = flow.price(unit, cluster)
    plan = flow.make_plan(unit, costs, cluster, PlanConfig(Objective.THROUGHPUT, REQUESTS))
    if not _crosses(plan) and any(b.name == "layer-pipeline" and b.throughput_per_s for b in plan.baselines):
        plan = flow.make_plan(
            unit, costs, cluster, PlanConfig(Objective.THROUGHPUT, REQUESTS, "layer-pipeline")
        )
    row["crosses"] = _crosses(plan)
    return plan


def _crosses(plan: Any) -> bool:
    """True if some request runs on both devices."""
    return any(len({d for step in lane.placement.devices for d in step}) > 1 for lane in plan.lanes)


def _verify(plan: Any, method: str) -> None:
    from tessera.cli.run import is_equal
    from tessera.errors import TesseraError
    from tessera.execute.offline import run_offline
    from tessera.execute.worker_stepper import WorkerStepper
    from tessera.flow import requests_of, run_reference

    asked = requests_of(plan, REQUESTS, is_fresh=True)
    with WorkerStepper([plan], asked.weights, method=method, max_failures=1) as stepper:
        run = run_offline(stepper, asked.work)
    run.raise_failures()
    for request, result in zip(asked.work, run.results, strict=True):
        if not is_equal(run_reference(plan.unit, request), result):
            raise TesseraError("the divided run differs from the reference run")


def _serve(row: Row, folder: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from own_code import reference
    from serving_factory import policies_of
    from tessera.errors import TesseraError
    from tessera.serve.records import AnswerPiece, Ask, Sampling, ServeSpec, step_name
    from tessera.serve.service import Service
    from tessera.serve.steps import served
    from tessera.serve.text import ByteText

    if "decode" not in row["steps"]:
        raise TesseraError("it generates no text")
    if "encode" in row["steps"] and row["name"] != PICTURES:
        raise TesseraError("what it encodes is no prompt of text")
    sizes: dict[str, Any] = {"microbatches": 1, "rows": BATCH, "capacity": 32, "max_batch_tokens": 8}
    model = served(folder, ServeSpec(**sizes, random_weights=True, joined=False))
    for workload in model.workloads:
        try:
            workload.run(workload.make_inputs(0), workload.make_state(0))
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TesseraError(
                f"its {step_name(workload.step)} for serving fails: {' '.join(str(error).split())[:120]}"
            ) from error
    ask = Ask(tuple(range(5, 5 + PROMPT)), 6, Sampling(temperature=0.0), ignores_end=True)

    async def answer(service: Any) -> list[int]:
        return [
            t.number
            async for event in service.answer(ask)
            if isinstance(event, AnswerPiece)
            for t in event.tokens
        ]

    with (
        reference(model, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, model.shape), model.shape, ByteText()) as service,
    ):
        found = asyncio.run(answer(service))
    if found != _generated(model, ask):
        raise TesseraError("its greedy answer is not `generate`'s")


def _generated(model: Any, ask: Any) -> list[int]:
    """What transformers generates with the same weights, with its own masks and attention."""
    import torch
    import transformers

    module = model.workloads[-1].module
    plain = getattr(transformers, type(module).__name__)._from_config(
        module.config, attn_implementation="eager", dtype=torch.float32
    )
    plain.load_state_dict(module.state_dict())
    prompt = torch.tensor([ask.prompt])
    out = plain.eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ask.max_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in out[0, len(ask.prompt) :]]


def _alone(model: Model, timeout_s: float) -> Row:
    """In a process of its own, forked from this one, which has the libraries at hand."""
    started = time.monotonic()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(model, theirs))
    child.start()
    theirs.close()
    row: Row = {"name": model.name, "class": model.kind, "library": model.library}
    try:
        row = (
            ours.recv()
            if ours.poll(timeout_s)
            else row | {"captured": f"DEFECT not done in {timeout_s:.0f} s"}
        )
    except EOFError:
        child.join()
        row["captured"] = f"DEFECT the process ended with {child.exitcode}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)  # it leads its own group: its workers too
    child.join()
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _child(model: Model, pipe: Any) -> None:
    os.setsid()
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 2)  # advice of libraries
    pipe.send(check(model))


def _warm_up() -> None:
    """Imports what every architecture needs."""
    import torch

    torch.set_num_threads(1)
    for name in ("transformers", "diffusers", "tessera.flow", "tessera.serve.service", "tessera.serve.steps"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def summary(rows: Sequence[Row]) -> Row:
    """How many came how far."""
    return {"architectures": len(rows)} | {s: sum(r.get(s) is True for r in rows) for s in STAGES}


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/models.md."""
    lines = [
        "| architecture | class | steps | captured | planned | run and verified | served |",
        "|---|---|---|---|---|---|---|",
    ]
    notes: dict[str, int] = {}
    for row in rows:
        cells = []
        for stage in STAGES:
            said = row.get(stage)
            if said is None or said is True:
                cells.append("yes" if said else "-")
            else:
                reason = re.sub(rf"\b(an? )?{re.escape(row['name'])}\b", "it", str(said)).removeprefix("it: ")
                cells.append(f"no ({notes.setdefault(reason, len(notes) + 1)})")
        steps = ", ".join(row.get("steps", ())) or "-"
        lines.append(f"| {row['name']} | {row['class']} | {steps} | {' | '.join(cells)} |")
    counts = summary(rows)
    ending = f"{counts['architectures']} architectures: " + ", ".join(f"{counts[s]} {s}" for s in STAGES)
    told = [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([*lines, "", f"{ending}.", "", *told]).rstrip() + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Which models Tessera takes.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="results; read first, to go on")
    parser.add_argument("--again", action="store_true", help="run also what the file has")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one architecture")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the rows")
    shown.add_argument("--markdown", action="store_true", help="print the table, run nothing")
    args = parser.parse_args()
    names = [m.name for m in MODELS]
    for name in args.only:
        if name not in names:
            parser.error(f"unknown architecture {name!r}; known: {', '.join(names)}")
    known: dict[str, Row] = {}
    if args.output.exists():
        known = {row["name"]: row for row in json.loads(args.output.read_text(encoding="utf-8"))["rows"]}
    if not args.markdown:
        _warm_up()
        _sweep([m for m in MODELS if m.name in (args.only or names)], known, args)
    rows = [known[name] for name in names if name in known]
    print(json.dumps(rows, indent=1) if args.json else markdown(rows) if args.markdown else summary(rows))


def _sweep(models: Sequence[Model], known: dict[str, Row], args: argparse.Namespace) -> None:
    for number, model in enumerate(models, 1):
        if model.name in known and not args.again:
            continue
        row = known[model.name] = _alone(model, args.timeout)
        said = ", ".join(f"{s} {'yes' if row[s] is True else row[s]}" for s in STAGES if s in row)
        print(
            f"[{number}/{len(models)}] {model.name}: {said} ({row['seconds']} s)", file=sys.stderr, flush=True
        )
        order = [known[m.name] for m in MODELS if m.name in known]
        command = "python -m benchmarks.coverage"
        text = json.dumps({"command": command, "summary": summary(order), "rows": order}, indent=1)
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
