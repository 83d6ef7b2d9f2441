"""How `tessera serve` does under load: errors, mixed-up answers, memory, and the plain way beside it.

    python -m benchmarks.bench_serve [--requests 2000] [--clients 200] [--out benchmarks/results/serve_202611]

The tiny Llama on this machine's CPU. `load`: streaming clients against `tessera serve` and against FastAPI
with `generate` in threads (`serve_plain.py`, which gets the first of the same requests), one after the other;
every answer is compared with the one given when its prompt was asked alone. `faults`: ten thousand open
sockets, slow readers and clients that go away, while 32 good clients ask. `prefix`: the same load twice, of
prompts that begin alike and of prompts that do not. Latencies are the clients'; memory
is resident, of the server and its workers, sampled twice a second; seconds of processor are of the server's
processes alone, so other work on the machine does not count in them.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.serve_process import Server, Watched, environment

from tessera.serve.load import LoadOptions, figures, measure

ROOT = Path(__file__).resolve().parents[1]
MODEL = "tiny-llama"
# Room for the requests asked here; the model could have more.
SERVE = ["--seqs", "32", "--microbatches", "7", "--max-model-len", "128", "--max-batch-tokens", "128"]
# Tokens that prompts have in common.
PREFIX = 512
# (name, words): the plain server was quickest here with two workers of one thread each.
PLAIN = ("plain FastAPI + generate", [str(ROOT / "benchmarks" / "serve_plain.py"), "--workers", "2"])
KEPT = (
    "completed", "errors", "errors_by_kind", "duration", "request_throughput", "output_throughput",
    "mean_ttfb_ms", "median_ttfb_ms", "p99_ttfb_ms", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "median_itl_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms", "total_input_tokens",
    "total_output_tokens", "verify",
)  # fmt: skip


def ask(server: Server, wanted: LoadOptions, memory: Watched | None = None) -> dict[str, Any]:
    """What `tessera bench serve` measures; processor time and memory of the crowd alone."""
    begun = server.processor_s()

    def on_done(what: str) -> None:
        nonlocal begun
        if what == "asked alone":
            begun = server.processor_s()
            if memory is not None:
                memory.samples.clear()

    measured = asyncio.run(measure(server.url, wanted, on_done))
    used = server.processor_s() - begun
    found = figures(measured)
    kept = {key: found[key] for key in KEPT}
    return kept | {"processor_ms_a_token": 1e3 * used / max(1, found["total_output_tokens"])}


def load(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The same requests to both servers."""
    crowd = LoadOptions(
        asked.requests,
        asked.clients,
        prompt_tokens=asked.prompt,
        output_tokens=asked.tokens,
        api="completions",
        num_distinct=20,
    )
    ours = [(f"tessera serve --devices {d}", _served(d, asked), crowd) for d in asked.devices]
    rows = []
    for name, command, wanted in [*ours, (*PLAIN, replace(crowd, num_requests=asked.plain))]:
        with Server(command) as server, server.watched() as memory:
            warm = min(asked.clients, wanted.num_requests // 10)
            ask(server, replace(wanted, num_requests=warm, num_distinct=None))  # until memory has settled
            found = ask(server, wanted, memory)
        rows.append({"server": name, "start_s": server.start_s, **found, "memory": memory.thirds()})
        print(shown(rows[-1]), flush=True)
    return rows


def _served(devices: str, asked: argparse.Namespace) -> list[str]:
    return ["-m", "tessera", "serve", MODEL, "--devices", devices, *asked.serve]


def ahead(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every `tessera serve` against the plain server; above 1 is ahead."""
    *ours, plain = rows
    return [
        {
            "server": row["server"],
            "throughput": row["output_throughput"] / plain["output_throughput"],
            "mean_ttfb": plain["mean_ttfb_ms"] / row["mean_ttfb_ms"],
            "mean_ttft": plain["mean_ttft_ms"] / row["mean_ttft_ms"],
            "p99_ttft": plain["p99_ttft_ms"] / row["p99_ttft_ms"],
            "processor_time": plain["processor_ms_a_token"] / row["processor_ms_a_token"],
        }
        for row in ours
    ]


def prefix(asked: argparse.Namespace) -> dict[str, Any]:
    """Prompts of 544 tokens, of which all but 32 are the same for all, or none are."""
    crowd = LoadOptions(96, 16, prompt_tokens=PREFIX + 32, output_tokens=4, api="completions")
    words = ["--seqs", "16", "--microbatches", "1", "--max-model-len", "640"]
    with Server(_served(asked.devices[0], argparse.Namespace(serve=words))) as server:
        found = {
            name: ask(server, replace(crowd, prefix_tokens=tokens, seed=tokens))
            for name, tokens in (("without sharing", 0), ("shared", PREFIX))
        }
    ratio = found["shared"]["request_throughput"] / found["without sharing"]["request_throughput"]
    return {"prefix": found, "prefix_gain": ratio}


def faults(asked: argparse.Namespace) -> dict[str, Any]:
    """Good clients beside bad ones."""
    few = LoadOptions(256, 32, prompt_tokens=32, output_tokens=16, api="completions", num_distinct=8)
    with Server(_served(asked.devices[0], asked)) as server, server.watched() as memory:
        alone = ask(server, few)
        command = [sys.executable, str(ROOT / "tests" / "bad_clients.py"), "--url", server.url]
        command += ["--idle", str(asked.sockets), "--slow", "64", "--leave", "8", "--max-tokens", "64"]
        pipe = subprocess.PIPE
        bad = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment())
        assert bad.stdout is not None
        up = json.loads(bad.stdout.readline())
        beside = ask(server, few)
        counts, _ = bad.communicate("")
        after = ask(server, few)
    good = {"alone": alone, "beside the bad ones": beside, "after they went": after}
    return {"bad_clients_up": up, "bad_clients": json.loads(counts), "good": good, "memory": memory.thirds()}


def main() -> None:
    """Prints; with --out writes JSON and Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--plain", type=int, default=300, help="how many of them the plain server gets")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--sockets", type=int, default=10_000)
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=SERVE, help="further words of `tessera serve`"
    )
    parser.add_argument("--parts", nargs="+", default=["load", "faults", "prefix"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "parts": " ".join(asked.parts),
        "serve": " ".join(asked.serve),
        "clients": asked.clients,
        "plain": asked.plain,
    }
    for part in asked.parts:
        found |= {"load": _load_part, "faults": _faults_part, "prefix": prefix}[part](asked)
        if asked.out is not None:
            asked.out.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
            asked.out.with_suffix(".md").write_text(document(found))
    print(document(found))


def _load_part(asked: argparse.Namespace) -> dict[str, Any]:
    rows = load(asked)
    return {"load": rows, "ahead": ahead(rows)}


def _faults_part(asked: argparse.Namespace) -> dict[str, Any]:
    return {"faults": faults(asked)}


def shown(part: Any) -> str:
    """As JSON, on as few lines as can be read."""
    return json.dumps(part, indent=1)


def document(found: dict[str, Any]) -> str:
    """Everything as Markdown."""
    parts = [HEAD.format(**found)]
    if "load" in found:
        parts += [
            "## Load",
            LOAD.format(**found),
            table([_row(x["server"], x) | _memory(x) for x in found["load"]]),
        ]
        parts += ["Against the plain server, above 1 is ahead:", table(found["ahead"])]
        parts += [
            "Resident MB over the run, in twelfths; a microbatch takes its memory when it is first opened:",
            "\n".join(f"- {x['server']}: {x['memory']['every_twelfth_mb']}" for x in found["load"]),
        ]
    if "faults" in found:
        faults = found["faults"]
        parts += ["## Faults", FAULTS, table([_row(name, x) for name, x in faults["good"].items()])]
        parts += ["What the bad clients did:", table([faults["bad_clients"]])]
    if "prefix" in found:
        parts += [f"## A beginning of {PREFIX} tokens that all prompts share", PREFIXED]
        parts += [table([_row(name, x) for name, x in found["prefix"].items()])]
        parts += [f"Requests a second, shared over without: {found['prefix_gain']:.2f}"]
    return "\n\n".join(parts) + "\n"


def _row(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "clients of": name,
        "answered": row["completed"],
        "errors": row["errors"],
        "mixed up": row["verify"]["mixed_up"] if row["verify"] else "-",
        "requests/s": row["request_throughput"],
        "tokens/s": row["output_throughput"],
        "first byte, mean ms": row["mean_ttfb_ms"],
        "first byte, p99 ms": row["p99_ttfb_ms"],
        "whole, mean ms": row["mean_e2el_ms"],
        "processor ms a token": row["processor_ms_a_token"],
    }


def _memory(row: dict[str, Any]) -> dict[str, Any]:
    memory = row["memory"]
    return {"first third MB": memory["first_third_mb"], "last third MB": memory["last_third_mb"]}


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


HEAD = """# Serving under load

Made by `python -m benchmarks.bench_serve --parts {parts}`: the tiny Llama on this machine's CPU ({machine}).
Other work on the machine slows everything, so rates are less than it can do; `processor ms a token` is of the
servers' own processes and hardly depends on that."""
LOAD = """`tessera serve` with `{serve}`.
The same requests went to both servers from {clients} clients, one server after the other; the plain one is
FastAPI with `generate` in two threads and got the first {plain} of them, as it is slow. Every answer was
compared with the one given when its prompt was asked alone. Memory is resident, of all processes of a server
together."""
FAULTS = """The bad clients hold idle and half-open sockets (opened again when the server closes them), read
slowly, or leave streams in the middle."""
PREFIXED = """96 prompts of 544 tokens, 16 at once, with 4 tokens of answer each, twice to one server: first
with beginnings of their own, then with the same one."""


if __name__ == "__main__":
    main()
