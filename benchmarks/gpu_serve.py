"""Serving on one GPU: tokens per second against Hugging Face's static cache. (Two devices: gpu_services.py.)

    export CUDA_MPS_PIPE_DIRECTORY=... CUDA_MPS_LOG_DIRECTORY=...; nvidia-cuda-mps-control -d
    python benchmarks/gpu_serve.py --out benchmarks/results --name serve_h200_202611

The service's engine on one device, all rows decoding, in turn with the Hugging Face model with a static cache
under torch.compile, which is a process of its own on the same card; processes on one card run side by side
only under CUDA MPS. The run is a process of its own with a time limit; its results are written as they come.

Real widths (llama-3-8b), random weights, bfloat16, greedy. In the Hugging Face loop nobody looks at tokens;
the engine hands each to its reader.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_common import Log, about

MODEL = "llama-3-8b"


def engine(log: Log, args: argparse.Namespace) -> None:
    """The service's engine on one device, in turn with Hugging Face's loop."""
    from benchmarks.gpu_common import whole_card
    from benchmarks.gpu_serve_hf import Beside, named
    from benchmarks.gpu_serve_load import run_full, stepper_per_s

    from tessera.serve.service import Service
    from tessera.serve.text import ByteText

    rates: dict[str, list[float]] = {"tessera": [], "hf": []}
    with Beside({**sizes(args), "model": MODEL, "steps": args.steps, "mode": args.hf}) as theirs:
        prepared = _prepared(log, args, named(MODEL, args.layers), whole_card(), ("single",))
        shape = prepared.model.shape
        log.put("hf", theirs.ready())
        with prepared.workers() as stepper:
            log.attempt("stepper alone", lambda: stepper_per_s(stepper, prepared.model, args.steps))
            with Service(stepper, prepared.policies, shape, ByteText()) as service:

                def round_of() -> dict[str, Any]:
                    found = run_full(service, args.batch, args.prompt, args.output, shape.vocab_size)
                    rates["tessera"].append(found["decoding, tokens per s"])
                    return found

                for number in range(args.rounds + 1):
                    log.attempt(f"engine, round {number}", round_of)
                    rates["hf"].append(theirs.ask())
                    log.put("tokens per s", compared(rates, args.hf))


def _prepared(log: Log, args: argparse.Namespace, model: str, cluster: Any, policies: tuple[str, ...]) -> Any:
    from tessera.ir import Load
    from tessera.serve.planning import prepare
    from tessera.serve.records import ServeSpec

    began, moments = time.monotonic(), list[Any]()
    prepared = prepare(
        model,
        cluster,
        ServeSpec(
            args.microbatches,
            args.batch,
            args.capacity,
            args.max_batch_tokens,
            load=Load(args.prompt, args.output),
            policies=policies,
        ),
        advance=lambda what: moments.append([_since(began), what]),
    )
    launches = [len(g.trace.launches) for g in prepared.plans[0].unit.graphs]
    totals = [[round(c.total_us(d), 1) for d in range(len(cluster.devices))] for c in prepared.plans[0].costs]
    rehearsed = {p.policy: round(p.expected.tokens_per_s, 1) for p in prepared.policies if p.expected}
    log.put("rehearsed, tokens per s", rehearsed)
    more = {"prepared s": _since(began), "moments": moments, "launches": launches, "steps us": totals}
    log.put("model", {**sizes(args), **more, "counts": prepared.plans[0].unit.counts})
    return prepared


def compared(rates: dict[str, list[float]], hf: str) -> dict[str, Any]:
    """Medians without the first round, and Tessera's against Hugging Face's."""
    found = {name: round(statistics.median(r[1:] or r), 1) for name, r in rates.items() if r}
    ratio = round(found["tessera"] / found["hf"], 4) if "hf" in found and "tessera" in found else None
    return {**found, "tessera / hf": ratio, "hf compiled by": hf, "rounds": rates}


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """What was asked for."""
    return {"batch": args.batch, "capacity": args.capacity, "layers": args.layers}


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


# All --------------------------------------------------------------------------------------------------------

WHAT: dict[str, Callable[[Log, argparse.Namespace], None]] = {"engine": engine}


def run_parts(args: argparse.Namespace, command: str) -> None:
    """Each part in a process of its own; what it found is joined into NAME.json and NAME.md."""
    from benchmarks.gpu_serve_table import table

    began = time.monotonic()
    path = args.out / f"{args.name}.json"
    kept = path if path.exists() or args.keep is None else args.keep
    whole: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    whole |= {"about": about()}
    for part in args.parts.split(","):
        left = args.limit - (time.monotonic() - began)
        name = f"{part} {args.tag}".strip()
        result = args.out / f"{args.name}.{name.replace(' ', '_')}.json"
        print(f"== {name}, {left:.0f} s left", flush=True)
        call = [sys.executable, __file__, *sys.argv[1:], "--child", part, "--result", str(result)]
        more = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        try:
            done = subprocess.run(call, timeout=max(5.0, left), env={**os.environ, **more}, check=False)
            ended = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "stopped at its time limit"
        found = json.loads(result.read_text()) if result.exists() else {}
        result.unlink(missing_ok=True)
        whole[name] = {**found, "ended": ended, "command": command}
        path.write_text(json.dumps(whole, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(whole))
    print(f"wrote {path}", flush=True)


def parsed(words: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description="Serving on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="serve")
    parser.add_argument("--parts", default="engine")
    parser.add_argument("--tag", default="", help="told apart from other runs of the same part")
    parser.add_argument("--keep", type=Path, default=None, help="results whose other parts are taken over")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32, help="rows of a microbatch")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--capacity", type=int, default=1088, help="positions of a row")
    parser.add_argument("--max-batch-tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of an average prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an average answer")
    parser.add_argument("--steps", type=int, default=64, help="of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--hf", default="reduce-overhead", help="or: default, own graph; or: max-autotune, own graph"
    )
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all parts")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    """All parts, or one as a child."""
    args = parsed(sys.argv[1:])
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        log = Log(args.result)
        try:
            WHAT[args.child](log, args)
        except Exception:  # noqa: BLE001 - the parent reads what went wrong from the file
            print(traceback.format_exc(), flush=True)
            log.put("error", traceback.format_exc()[-4000:])
    else:
        words = ["OUT" if word == str(args.out) else word for word in sys.argv[1:]]
        run_parts(args, f"python benchmarks/gpu_serve.py {' '.join(words)}")


if __name__ == "__main__":
    main()
