"""Greedy answers of services on two emulated devices, held against `generate`: ten architectures.

    python -m benchmarks.serve_models [--only NAME ...] [-o FILE]

For each, a small random model in a folder is planned for emu:a100,emu:l40s and served by two workers,
as `tessera serve FOLDER --devices emu:a100,emu:l40s --random-weights` does, without HTTP: prompts are tokens.
Eight of different lengths are answered with 24 tokens each, one after the other and all at once. The file is
written after every model.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.coverage_models import MODELS, Model

NAMES = (
    "gpt2", "opt", "falcon", "gpt_neox", "qwen3_moe", "deepseek_v3", "gemma3_text", "mamba2", "jamba",
    "qwen3_next",
)  # fmt: skip
DEVICES, LINK = "emu:a100,emu:l40s", "pcie4"
LENGTHS = (1, 3, 9, 16, 17, 30, 41, 64)
NUM_NEW = 24
RESULTS = Path(__file__).parent / "results" / "serve_models_202611.json"

Row = dict[str, Any]
Tokens = list[int]


def check(model: Model) -> Row:
    """One architecture."""
    from tessera.profile import parse_devices, wire
    from tessera.serve.planning import prepare
    from tessera.serve.records import ServeSpec
    from tessera.serve.service import Service
    from tessera.serve.text import ByteText

    rng = random.Random(0)
    prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in LENGTHS]
    spec = ServeSpec(capacity=128, max_batch_tokens=32, random_weights=True)
    cluster = wire(parse_devices(DEVICES), [LINK])
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        wanted = _generated(folder, prompts)
        prepared = prepare(folder, cluster, spec)
        shape = prepared.model.shape
        with prepared.workers() as stepper, Service(stepper, prepared.policies, shape, ByteText()) as service:
            alone = [asyncio.run(_answers(service, [prompt]))[0] for prompt in prompts]
            together = asyncio.run(_answers(service, prompts))
    return {
        "model": model.name,
        "class": model.kind,
        "step_tokens": list(shape.sizes),
        "alone": alone == wanted,
        "eight_at_once": together == wanted,
        "seconds": round(time.perf_counter() - begun_s, 1),
    }


async def _answers(service: Any, prompts: Sequence[Tokens]) -> list[Tokens]:
    from tessera.serve.records import AnswerPiece, Ask, Sampling

    async def one(prompt: Tokens) -> Tokens:
        ask = Ask(tuple(prompt), NUM_NEW, Sampling(temperature=0.0), ignores_end=True)
        events = [event async for event in service.answer(ask)]
        return [token.number for event in events if isinstance(event, AnswerPiece) for token in event.tokens]

    return list(await asyncio.gather(*map(one, prompts)))


def _generated(folder: str, prompts: Sequence[Tokens]) -> list[Tokens]:
    """What transformers makes of the same weights, with its own masks and attention."""
    import torch
    import transformers

    from tessera.serve.records import ServeSpec
    from tessera.serve.steps import served

    module: Any = (
        served(folder, ServeSpec(rows=1, capacity=128, random_weights=True, joined=False))
        .workloads[-1]
        .module
    )
    config = type(module.config).from_dict(module.config.to_dict())
    plain = getattr(transformers, type(module).__name__)._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    plain.load_state_dict(module.state_dict())
    found = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        made = plain.eval().generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=NUM_NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found.append(made[0, len(prompt) :].tolist())
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    path: Path = args.output
    rows: dict[str, Row] = {}
    if path.exists():
        rows = {row["model"]: row for row in json.loads(path.read_text())["models"]}
    by_name = {model.name: model for model in MODELS}
    for name in args.only:
        rows[name] = check(by_name[name])
        print(rows[name], flush=True)
        found = [rows[name] for name in NAMES if name in rows]
        document = {"command": "python -m benchmarks.serve_models", "tokens": NUM_NEW, "models": found}
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
