"""What MODEL can be besides a built-in name: a folder of Hugging Face, or module:callable."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.capture import build, record, record_step
from tessera.errors import CaptureError, UnknownName
from tessera.ir import BufferKind, Step

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

CUSTOM = """
import torch
from tessera.capture import build
from tessera.ir import Step

class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x, cache):
        cache.add_(x)
        self.seen.add_(x.sum(0))
        return {"y": self.linear(cache), "total": self.seen * 2}

def counter(step):
    torch.manual_seed(step.seed)
    return Counter(), {"x": torch.ones(step.batch, 4), "cache": torch.zeros(step.batch, 4)}

def borrowed(step):
    return build(Step("tiny-mamba", "decode", step.batch, step.context))

def plain(step):
    torch.manual_seed(step.seed)
    return torch.nn.Linear(4, 2), (torch.ones(step.batch, 4),)

def wrong(step):
    return 7

class Scaled(torch.nn.Module):
    def forward(self, x, factor):
        return x * factor

def with_number(step):
    return Scaled(), (torch.ones(step.batch, 4), 3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a user's module in the current folder."""
    (tmp_path / "users_model.py").write_text(CUSTOM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    return "users_model"


def test_a_folder_with_a_configuration_is_a_model(folder: Path) -> None:
    """Random weights, the same for the same seed."""
    step = Step(str(folder), "decode", 2, 16, random_weights=True)
    one, other = (build(step).run(build(step).make_inputs(0), build(step).make_state(0)) for _ in range(2))

    assert torch.equal(one["logits"], other["logits"])
    assert str(folder) == record_step(step, "fake").step.model


def test_the_weights_of_a_folder_are_read(folder: Path) -> None:
    """A safetensors checkpoint gives its own weights, whatever the seed."""
    saved: Any = build(Step(str(folder), "decode", 1, 8, seed=3, random_weights=True)).module
    saved.save_pretrained(folder)
    loaded = build(Step(str(folder), "decode", 1, 8, seed=9)).weights()

    assert all(
        torch.equal(tensor, loaded[name]) for name, tensor in saved.named_parameters() if name in loaded
    )
    assert "model.layers.1.mlp.up_proj.weight" in loaded


def test_pickled_weights_are_not_read(folder: Path) -> None:
    """A file that can run code when it is opened is named and refused."""
    (folder / "pytorch_model.bin").write_bytes(b"")

    with pytest.raises(CaptureError, match=r"pytorch_model\.bin.*safetensors"):
        build(Step(str(folder), "decode", 1, 8))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    """The folder is named."""
    with pytest.raises(CaptureError, match=r"no config\.json"):
        build(Step(str(tmp_path), "decode", 1, 8))


def test_a_configuration_of_an_unknown_type_is_refused(folder: Path) -> None:
    """No code that a folder brings along is run."""
    (folder / "config.json").write_text(json.dumps({"model_type": "nobody-knows", "auto_map": {}}))

    with pytest.raises(CaptureError, match="no model_type 'nobody-knows'"):
        build(Step(str(folder), "decode", 1, 8))


def test_a_folder_answers_with_its_steps(folder: Path) -> None:
    """A language model does not denoise."""
    with pytest.raises(UnknownName, match="known: call, decode, prefill"):
        build(Step(str(folder), "denoise", 1, 8))


def test_what_a_module_writes_becomes_state(custom: str) -> None:
    """An input and a buffer that a call updates in place are handed to the next step; the rest is not."""
    trace = record(build(Step(f"{custom}:counter", "decode", 3, 1)))
    kinds = {kind: {trace.buffers[b].name for b in trace.buffers_of(kind)} for kind in BufferKind}

    assert {"cache", "seen"} == kinds[BufferKind.STATE]
    assert {"x"} == kinds[BufferKind.INPUT]
    assert {"linear.weight", "linear.bias"} == kinds[BufferKind.WEIGHT]
    assert ["y", "total"] == [name for name, _ in trace.outputs]


def test_state_of_a_module_goes_from_step_to_step(custom: str) -> None:
    """Two runs add twice; a new request begins anew."""
    workload = build(Step(f"{custom}:counter", "decode", 1, 1))
    state = workload.make_state(0)
    for run in range(2):
        workload.run(workload.follow({}, run, {}), state)

    assert [2.0] * 4 == state["seen"].tolist()
    assert [0.0] * 4 == workload.make_state(0)["seen"].tolist()


def test_a_module_of_the_users_is_recorded_on_fakes_too(custom: str) -> None:
    """The same launches, without values."""
    step = Step(f"{custom}:counter", "decode", 1, 1)
    real, fake = record_step(step, "cpu"), record_step(step, "fake")

    assert [real.kernel_of(i).name for i in range(len(real.launches))] == [
        fake.kernel_of(i).name for i in range(len(fake.launches))
    ]
    assert len(real.buffers_of(BufferKind.STATE)) == len(fake.buffers_of(BufferKind.STATE)) == 2


def test_a_callable_may_return_a_workload(custom: str) -> None:
    """The convention of the built-in models is open to users."""
    assert 2 == build(Step(f"{custom}:borrowed", "decode", 2, 8)).step.batch


def test_positional_examples_are_named_by_parameter(custom: str) -> None:
    """A tuple of inputs."""
    trace = record(build(Step(f"{custom}:plain", "decode", 2, 1)))

    assert ["input"] == [trace.buffers[b].name for b in trace.buffers_of(BufferKind.INPUT)]
    assert ["output"] == [name for name, _ in trace.outputs]


def test_a_plain_example_is_fixed_in_the_trace(custom: str) -> None:
    """As for any captured call."""
    trace = record(build(Step(f"{custom}:with_number", "decode", 2, 1)))

    assert ["x"] == [trace.buffers[b].name for b in trace.buffers_of(BufferKind.INPUT)]
    assert 3 == trace.launches[0].args[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("users_model:wrong", "returned a int.*Workload"),
        ("users_model:absent", "no callable 'absent'.*counter"),
        ("no_such_module:f", "cannot be imported"),
    ],
)
def test_a_callable_that_is_none_is_refused(custom: str, name: str, words: str) -> None:
    """What is wrong with it, and what there is."""
    with pytest.raises(CaptureError, match=words):
        build(Step(name, "decode", 1, 1))
