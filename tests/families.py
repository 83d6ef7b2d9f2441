"""The tiny model of each family, built once a step."""

import functools

import pytest

from kept_traces import recorded
from tessera.capture import Workload, build
from tessera.ir import Step, Trace

PROMPT, TOKENS, BATCH = 24, 4, 2

# Every step of every tiny model.
STEPS = (
    ("tiny-llama", "prefill"),
    ("tiny-llama", "decode"),
    ("tiny-gpt-oss", "prefill"),
    ("tiny-gpt-oss", "decode"),
    ("tiny-mamba", "prefill"),
    ("tiny-mamba", "decode"),
    ("tiny-qwen2.5-vl", "encode"),
    ("tiny-qwen2.5-vl", "prefill"),
    ("tiny-qwen2.5-vl", "decode"),
    ("tiny-sd3.5", "denoise"),
    ("tiny-llama", "tokens"),
    ("tiny-gpt-oss", "tokens"),
    ("tiny-mamba", "tokens"),
    ("tiny-qwen2.5-vl", "tokens"),
)
LANGUAGE = ("tiny-llama", "tiny-gpt-oss", "tiny-mamba", "tiny-qwen2.5-vl")


def step(model: str, kind: str, batch: int = BATCH) -> Step:
    """A step whose prefill and decode share their state, and whose encode makes the prefill's image."""
    if model.startswith("tiny-sd"):
        pytest.importorskip("diffusers")
    if kind == "prefill":
        return Step(model, kind, batch, PROMPT, reserve=TOKENS)
    if kind == "tokens":
        return Step(model, kind, batch, PROMPT, reserve=256, pictures=model == "tiny-qwen2.5-vl")
    return Step(
        model, kind, batch, {"decode": PROMPT + TOKENS, "encode": PROMPT // 2, "denoise": PROMPT}[kind]
    )


@functools.cache
def workload(model: str, kind: str, batch: int = BATCH) -> Workload:
    """The step on real tensors."""
    return build(step(model, kind, batch))


def trace(model: str, kind: str, device: str = "cpu", batch: int = BATCH) -> Trace:
    """Its trace."""
    return recorded(step(model, kind, batch), device)
