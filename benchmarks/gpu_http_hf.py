"""Hugging Face's continuous batching on the same card and load as gpu_http.py, which starts this.

Without HTTP: prompts are handed to `generate_batch` as lists of tokens, so many at once, and all answers are
waited for. The manager is kept and the first round is not counted. Prints one JSON object.
"""

import argparse
import json
import time
from typing import Any

import torch
from transformers import GenerationConfig

from tessera.capture import build
from tessera.ir import Step


def main() -> None:
    """One load, some rounds."""
    parser = argparse.ArgumentParser(description="Hugging Face's continuous batching.")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with torch.device(args.device):
        model: Any = build(Step(args.model, "tokens", 1, 1, reserve=32)).module
    model.set_attn_implementation("sdpa")
    config = GenerationConfig(
        max_new_tokens=args.output, do_sample=False, eos_token_id=model.config.vocab_size - 1, pad_token_id=0
    )
    random = torch.Generator().manual_seed(0)
    rates = []
    for _ in range(args.rounds + 1):
        words = torch.randint(3, 250, (args.at_once, args.prompt), generator=random).tolist()
        began = time.monotonic()
        told = model.generate_batch(words, generation_config=config, persistent_manager=True)
        seconds = time.monotonic() - began
        num = sum(len(one.generated_tokens) for one in told.values())
        rates.append({"seconds": round(seconds, 2), "tokens": num, "tokens per s": round(num / seconds, 1)})
    print(json.dumps({"first round": rates[0], "rounds": rates[1:]}))


if __name__ == "__main__":
    main()
