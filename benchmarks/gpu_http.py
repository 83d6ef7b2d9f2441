"""A model behind HTTP on one GPU against what the card allows.

    python benchmarks/gpu_http.py --out benchmarks/results --name http_h200_202611

First the card: bytes a second of a copy (read and written), operations a second of a matrix product. The
limit of a load is computed from them: every prompt token's products at that peak, then, a step at a time, the
weights, the keys and values really there and recurrent states (read and written) at that bandwidth.
`tessera serve` is a process of its own, as are its workers; the load comes from this one. Random weights:
tokens mean nothing, their number does.
"""

import argparse
import asyncio
import fcntl
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.serve_process import Server


@dataclass(frozen=True)
class Load:
    """So many requests, so many at once."""

    prompt: int
    output: int
    at_once: int
    num: int
    # Prompts of 1/8 of `prompt` to twice as many tokens.
    is_mixed: bool = False

    @property
    def name(self) -> str:
        mixed = f"{self.prompt // 8} to {2 * self.prompt}" if self.is_mixed else str(self.prompt)
        return f"{mixed} in, {self.output} out, {self.at_once} at once"

    @property
    def prompts(self) -> list[int]:
        if not self.is_mixed:
            return [self.prompt] * self.num
        drawn = random.Random(0)
        return [drawn.randint(self.prompt // 8, 2 * self.prompt) for _ in range(self.num)]


@dataclass(frozen=True)
class Sizes:
    """What a token of a decoder costs."""

    # Parameters in the products of one token, and bytes of all weights that a step reads.
    parameters: float
    weight_bytes: float
    # Keys and values of one token; recurrent states of one sequence.
    token_bytes: float
    sequence_bytes: float = 0.0


# Ways to choose tokens: further fields of each request.
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 1": {"temperature": 1.0},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}}},
}
# Longest wait for the other processes.
TURN_S = 75.0
# Servers that are ready capture steps of further sizes, and take the GPU for it.
IDLE_S = 12.0
# Seeds of prompts, one per load.
SEEDS = itertools.count(1)
CHOICES_ALL = tuple(map(str, range(len(CHOICES))))
LOADS = (
    Load(512, 128, 64, 256),
    Load(128, 128, 256, 768),
    Load(128, 512, 64, 128),
    Load(4096, 64, 64, 64),
    Load(512, 128, 32, 96),
    Load(1024, 128, 48, 144, is_mixed=True),
)


def card() -> dict[str, float]:
    """What the card's own copies and products do."""
    import torch

    def best_s(what: Any, rounds: int) -> float:
        times: list[float] = []
        for _ in range(rounds):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                what()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e-3 / 5)
        return min(times)

    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied_s = best_s(lambda: target.copy_(source), 5)
    one, two = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_s = best_s(lambda: torch.mm(one, two), 5)
    return {"bytes per s": 2 * (2 << 30) / copied_s, "operations per s": 2 * 8192**3 / product_s}


def sizes_of(model: str) -> Sizes:
    """By the model's own configuration, and what its served step keeps; packed weights by their files."""
    import torch

    from tessera.capture import build
    from tessera.capture.models.paged import layout_of
    from tessera.ir import Step
    from tessera.kernels import PAGE

    folder = Path(model)
    with tempfile.TemporaryDirectory() as plain, torch.device("meta"):
        if folder.is_dir():
            document = json.loads((folder / "config.json").read_text())
            document.pop("quantization_config", None)
            (Path(plain) / "config.json").write_text(json.dumps(document))
        place = plain if folder.is_dir() else model
        step = Step(place, "tokens", 1, 1, reserve=2 * PAGE, random_weights=folder.is_dir())
        module: Any = build(step).module
    layout = layout_of(module)
    pages, rows = (
        sum(math.prod(shape) * dtype.itemsize for shape, dtype in kept.values())
        for kept in (layout.pages, layout.rows)
    )
    config: Any = module.config.get_text_config()
    looked_up = module.get_input_embeddings().weight.numel()  # one row of it is read
    if getattr(config, "tie_word_embeddings", False):
        looked_up = 0
    num = sum(p.numel() for p in module.parameters()) - looked_up
    # A token uses some of the experts; a step of many tokens reads all.
    experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    used = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", 1)
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
    weight_bytes = files - 2.0 * looked_up if files else 2.0 * num
    return Sizes(num - experts * (1 - used), weight_bytes, pages / PAGE, float(rows))


def limit_per_s(load: Load, prompt: float, sizes: Sizes, found: dict[str, float]) -> float:
    """Tokens a second if nothing but the card's peaks counted, `at_once` requests beside one another.

    `prompt`: tokens of an average prompt, as the server counts them.
    """
    prompts_s = load.at_once * prompt * 2 * sizes.parameters / found["operations per s"]
    there = load.at_once * (prompt + load.output / 2) * sizes.token_bytes
    there += load.at_once * 2 * sizes.sequence_bytes
    steps_s = load.output * (sizes.weight_bytes + there) / found["bytes per s"]
    return load.at_once * load.output / (prompts_s + steps_s)


def ask(url: str, load: Load, **fields: Any) -> dict[str, Any]:
    """One load over HTTP, with prompts of its own: none is in the prefix cache."""
    from tessera.ir import Arrivals
    from tessera.serve.load import LoadOptions, figures, measure

    prompts = tuple(load.prompts)
    together = Arrivals(load.name, (0.0,) * load.num, prompts, (load.output,) * load.num)
    options = LoadOptions(
        num_requests=load.num,
        arrivals=together if load.is_mixed else None,
        concurrency=load.at_once,
        prompt_tokens=load.prompt,
        output_tokens=load.output,
        api="completions",
        seed=next(SEEDS),
        timeout_s=120.0,
        fields=fields,
    )
    run = asyncio.run(measure(url, options, lambda what: None))
    return dict(figures(run))


def mean_prompt(got: dict[str, Any]) -> float:
    return float(got["total_input_tokens"]) / float(got["completed"])


def by_choice(
    url: str, numbers: str, limit_of: Callable[[Load, float], float], put: Callable[[str, Any], None]
) -> None:
    """The first load in every way to choose tokens, with its parts of the greedy rate and of the limit."""
    load, greedy = LOADS[0], 0.0
    ways = list(CHOICES.items())
    for name, fields in (ways[int(number)] for number in numbers.split(",")):
        got = ask(url, load, **fields)
        per_s = float(got["output_throughput"])
        greedy, limit = greedy or per_s, limit_of(load, mean_prompt(got))
        shares = {"of greedy": round(per_s / greedy, 4), "share": round(per_s / limit, 4)}
        put(f"{load.name}, {name}", {"tokens per s": per_s, "limit": limit, **shares, "figures": got})


def load_of(word: str) -> Load:
    """512/128/32: prompt, output, at once; three rounds, or 512/128/8/96. ~1024/128/48: mixed prompts."""
    prompt, output, at_once, *num = map(int, word.removeprefix("~").split("/"))
    return Load(prompt, output, at_once, num[0] if num else 3 * at_once, word.startswith("~"))


def continuous_batching(model: str) -> dict[str, Any]:
    """The first load by Hugging Face's continuous batching, in a process of its own."""
    script = str(Path(__file__).resolve().parent / "gpu_http_hf.py")
    done = subprocess.run(
        [sys.executable, script, "--model", model], capture_output=True, text=True, timeout=240.0, check=False
    )
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def reported(path: Path | None) -> Iterator[None]:
    """A server that does not start has no turn."""
    try:
        yield
    except SystemExit:
        if path:
            path.open("a").write("-")
        raise


@contextmanager
def turn(path: Path | None, num: int) -> Iterator[None]:
    """One process after another, the first when `num` have told the file that they are ready or failed."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        file.write("+")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        until = time.monotonic() + TURN_S
        while path.stat().st_size < num and time.monotonic() < until:
            time.sleep(0.2)
        if path.stat().st_size < 2 * num:
            path.open("a").write("+" * num)  # nobody waits again
            time.sleep(IDLE_S)
        yield


def put_card(put: Callable[[str, Any], None]) -> None:
    import torch

    put("card", card())
    torch.cuda.empty_cache()  # of the server's GPU


def ask_all(
    url: str,
    loads: Sequence[Load] | None,
    choices: str | None,
    sizes: Sizes,
    peaks: dict[str, float],
    put: Callable[[str, Any], None],
) -> None:
    """Every load, each with its share of the limit."""

    def limit_of(load: Load, prompt: float) -> float:
        return limit_per_s(load, prompt, sizes, peaks)

    ask(url, Load(64, 8, 64, 64))  # connections, first steps of every size
    if choices:
        by_choice(url, choices, limit_of, put)
    for load in loads or ([] if choices else LOADS):
        began = time.monotonic()
        got = ask(url, load)
        per_s, limit = float(got["output_throughput"]), limit_of(load, mean_prompt(got))
        row = {"tokens per s": per_s, "limit": limit, "share": round(per_s / limit, 4)}
        put(load.name, {**row, "seconds": round(time.monotonic() - began, 1), "figures": got})


def main() -> None:
    """The card, then every load."""
    parser = argparse.ArgumentParser(description="A model behind HTTP on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="http")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument(
        "--load", action="append", type=load_of, help="PROMPT/OUTPUT/AT_ONCE[/NUMBER] for all; ~: mixed"
    )
    parser.add_argument("--starts", type=int, default=1, help="starts of the server; the last one is asked")
    parser.add_argument(
        "--choices",
        nargs="?",
        const=",".join(CHOICES_ALL),
        help="the first load in ways to choose tokens: 0,1,4",
    )
    parser.add_argument("--turn", type=Path, help="file by which processes side by side take turns")
    parser.add_argument("--of", type=int, default=1, help="processes that take turns")
    parser.add_argument("--hf", action="store_true", help="Hugging Face's continuous batching after it")
    parser.add_argument("more", nargs="*", help="further options of tessera serve, behind --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    words = ["OUT" if word == str(args.out) else word for word in sys.argv[1:]]
    found: dict[str, Any] = {"command": "python benchmarks/gpu_http.py " + " ".join(words)}

    def put(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)
        (args.out / f"{args.name}.json").write_text(json.dumps(found, indent=1) + "\n")

    if not args.turn:
        put_card(put)
    sizes = sizes_of(args.model)
    length = ["--max-model-len", str(args.max_len)]
    serve = ["-m", "tessera", "serve", args.model, "--devices", args.devices, *length]
    for start in range(args.starts):
        with reported(args.turn), Server([*serve, *args.more]) as server:
            put(f"ready after s, start {start + 1}", round(server.start_s, 1))
            if start + 1 < args.starts:
                continue
            with turn(args.turn, args.of):
                if args.turn:
                    put_card(put)
                ask_all(server.url, args.load, args.choices, sizes, found["card"], put)
    if args.hf:
        put("hugging face, 512 in, 128 out, 64 at once", continuous_batching(args.model))


if __name__ == "__main__":
    main()
