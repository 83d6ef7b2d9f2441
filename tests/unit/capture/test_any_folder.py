"""Folders of transformers: steps, caches and inputs from what a model says of itself."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.coverage_models import MODELS, Model

import tessera
from sampling import some_of
from tessera.capture import build, record
from tessera.capture.models import steps_of_model
from tessera.capture.models.examples import MAKERS, tokens
from tessera.capture.models.hf import attention_of
from tessera.errors import CaptureError
from tessera.execute.reference import Replay
from tessera.ir import Step
from tessera.kernels.tensors import same_bits

BY_NAME = {model.name: model for model in MODELS}
CONTEXT, TOKENS, BATCH = 12, 4, 2
CACHED = ("gpt2", "opt", "falcon", "gemma2", "deepseek_v3", "jamba", "qwen3_next", "mamba", "recurrent_gemma",
          "t5", "whisper")  # fmt: skip


def folder_of(name: str, place: Path) -> str:
    """The configuration of a small model, in a folder."""
    BY_NAME[name].write(place)
    return str(place)


def step_of(folder: str, kind: str, inputs: str = "") -> Step:
    """Prefill and decode share their state."""
    prefill = kind == "prefill"
    context = CONTEXT if prefill else CONTEXT + TOKENS
    return Step(folder, kind, BATCH, context, 0, TOKENS if prefill else 0, True, inputs)


def own_logits(module: Any, tokens: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor:
    """The last logits of the model's plain forward over all tokens."""
    given: dict[str, Any] = {"input_ids": tokens}
    if encoded is not None:
        given = {"decoder_input_ids": tokens, "encoder_outputs": (encoded,)}
    with torch.no_grad():
        logits: torch.Tensor = module(**given, use_cache=False).logits[:, -1]
    return logits


@pytest.mark.parametrize("name", CACHED)
def test_decoding_after_a_prefill_agrees_with_the_models_plain_forward(name: str, tmp_path: Path) -> None:
    """Whatever a model remembers, a prefill and three decodes give the logits of one long forward."""
    folder = folder_of(name, tmp_path)
    prefill, decode = build(step_of(folder, "prefill")), build(step_of(folder, "decode"))
    inputs, state = prefill.make_inputs(1), prefill.make_state(1)
    if "last" in inputs:
        inputs["last"] = torch.full_like(inputs["last"], CONTEXT - 1)
    if "mask" in inputs:
        inputs["mask"] = torch.ones_like(inputs["mask"])
    tokens, outputs = inputs["tokens"], prefill.run(inputs, state)
    for run in range(3):
        following = decode.follow(inputs, run, outputs)
        tokens = torch.cat([tokens, following["tokens"]], 1)
        outputs = decode.run(following, state)
    wanted = own_logits(prefill.module, tokens, inputs.get("encoder_hidden_states"))

    torch.testing.assert_close(outputs["logits"], wanted, rtol=1e-4, atol=1e-5)


STEPS = (
    ("deepseek_v3", "decode"), ("rwkv", "decode"), ("m2m_100", "decode"), ("llava", "prefill"),
    *[(name, "call") for name in ("bert", "vit", "clip", "siglip", "wav2vec2")],
)  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), some_of(STEPS, STEPS[1:5]))
def test_a_recorded_step_gives_the_models_bits_for_other_inputs(name: str, kind: str, tmp_path: Path) -> None:
    """The launches of a step, run again on the inputs of another request, give what the model gives."""
    folder = folder_of(name, tmp_path)
    workload = build(Step(folder, kind, BATCH, 24, random_weights=True))
    trace = record(workload)
    workload = workload.drawing(trace)
    inputs, state = workload.make_inputs(7), workload.make_state(7)
    replay = Replay(trace, workload.weights(), inputs, {n: t.clone() for n, t in state.items()})
    found = replay.run_in_program_order().outputs
    wanted = workload.run(inputs, state)

    assert set(found) == set(wanted)
    assert all(same_bits(found[name], wanted[name]) for name in wanted)
    assert all(tensor.isfinite().all() for tensor in wanted.values())


def test_a_model_without_a_cache_has_the_plain_call_alone(tmp_path: Path) -> None:
    """A folder answers with the steps that its class has."""
    assert ("call",) == steps_of_model(folder_of("bert", tmp_path / "a"))
    assert ("encode", "prefill", "decode", "call") == steps_of_model(folder_of("t5", tmp_path / "b"))
    Model("bart", "BartForCausalLM", BY_NAME["bart"].sizes).write(tmp_path / "c")  # its decoder alone
    assert ("prefill", "decode", "call") == steps_of_model(str(tmp_path / "c"))


SWITCH = "switch_transformers", "SwitchTransformersForConditionalGeneration"


def test_a_decoder_gets_the_class_of_its_encoders_result(tmp_path: Path) -> None:
    """Switch Transformers ask it for the routing."""
    sizes = {**BY_NAME["t5"].sizes, "num_decoder_layers": 2}  # fewer layers than mixtures: it has none
    Model(*SWITCH, sizes).write(tmp_path)
    decode = build(step_of(str(tmp_path), "decode"))
    outputs = decode.run(decode.make_inputs(0), decode.make_state(0))

    assert outputs["logits"].isfinite().all()


def test_experts_that_are_chosen_by_name_are_refused_as_a_value_that_is_read(tmp_path: Path) -> None:
    """Values in the messages of transformers are not read, but the name of an expert is."""
    sizes = {**BY_NAME["t5"].sizes, "num_experts": 2, "num_sparse_encoder_layers": 1}
    Model(*SWITCH, sizes).write(tmp_path)
    with pytest.raises(CaptureError, match="expert_a tensor's value, which a step cannot read"):
        build(step_of(str(tmp_path), "decode"))


@pytest.mark.parametrize(
    ("config", "has_call"),
    [
        (transformers.OpenAIGPTConfig(n_embd=8, n_layer=1, n_head=1, n_positions=32, vocab_size=20), True),
        (transformers.XLMConfig(emb_dim=8, n_layers=1, n_heads=1, vocab_size=20), False),
    ],
    ids=["openai-gpt", "xlm"],
)
def test_a_cache_that_is_not_followed_is_refused_with_a_way_that_there_is(
    config: Any, has_call: bool, tmp_path: Path
) -> None:
    """The plain call is named where it can be captured: XLM's reads a length on the host."""
    name = {"openai-gpt": "OpenAIGPTLMHeadModel", "xlm": "XLMWithLMHeadModel"}[config.model_type]
    config.architectures = [name]
    config.save_pretrained(tmp_path)

    with pytest.raises(CaptureError, match=r"cannot be followed.*module:callable") as refused:
        build(step_of(str(tmp_path), "decode"))

    assert has_call == ("--step call" in str(refused.value))


def test_advice_of_transformers_is_not_logged(tmp_path: Path) -> None:
    """Other implementations of operators."""
    steps_of_model(folder_of("bert", tmp_path))

    assert not logging.getLogger("transformers.integrations.hub_kernels").isEnabledFor(logging.WARNING)


def test_a_model_with_a_table_of_attention_classes_gets_one_of_them() -> None:
    """The picture encoder of DeepSeek-OCR 2 knows eager and sdpa."""
    kinds = transformers.DeepseekOcr2ForConditionalGeneration, transformers.LlamaForCausalLM
    assert ["sdpa", "tessera"] == [attention_of(kind) for kind in kinds]


def test_pictures_that_are_more_than_pixels_are_refused(tmp_path: Path) -> None:
    """LLaVA-NeXT takes the sizes of pictures too."""
    Model("llava_next", "LlavaNextForConditionalGeneration", BY_NAME["llava"].sizes).write(tmp_path)
    with pytest.raises(
        CaptureError, match=r"its pictures are more than pixels: .*image_sizes.*--step decode"
    ):
        build(step_of(str(tmp_path), "prefill"))


def test_sound_of_a_prefill_is_as_long_as_that_of_its_decodes() -> None:
    """As tokens of an encoder are: an encode of context + reserve gives what both read."""
    random = torch.Generator()
    for name, config in (
        ("input_features", transformers.Speech2TextConfig()),
        ("input_values", transformers.MoonshineConfig()),
    ):
        sizes = {MAKERS[name](config, step_of("", kind), random).shape for kind in ("prefill", "decode")}
        assert 1 == len(sizes), name


def test_a_model_of_characters_needs_no_vocabulary() -> None:
    """CANINE's configuration has no size of one."""
    assert tokens(transformers.CanineConfig(), (1, 8), torch.Generator()).lt(256).all()


def test_inputs_of_a_file_are_those_of_the_first_request(tmp_path: Path) -> None:
    """Named tensors, with a mask that hides something, take the place of random ones."""
    folder = folder_of("bert", tmp_path)
    file = tmp_path / "inputs.json"
    file.write_text(json.dumps({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 0]]}), encoding="utf-8")
    workload = build(step_of(folder, "call", str(file)))
    outputs = workload.run(workload.make_inputs(0), {})

    assert [[5, 6, 7]] == workload.make_inputs(0)["input_ids"].tolist()
    assert (1, 3) == outputs["logits"].shape[:2]
    assert record(workload).launches


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"pixels": [1]}', "'pixels' of shape .* is no input.*input_ids"),
        ("{", "cannot be read"),
        ("{}", "no tensors"),
    ],
)
def test_a_file_that_does_not_suit_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """In one line, with what the model takes."""
    file = tmp_path / "inputs.json"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(CaptureError, match=words):
        build(step_of(folder_of("bert", tmp_path), "call", str(file))).make_inputs(0)


@dataclass
class Pair:
    """A result that torch does not know."""

    one: torch.Tensor
    other: torch.Tensor


def test_results_that_are_dataclasses_are_outputs_by_field() -> None:
    """Nothing of a dataclass is taken for a constant."""
    trace = tessera.capture(lambda x: Pair(x + 1, x * 2), torch.ones(3))

    assert ["one", "other"] == [name for name, _ in trace.outputs]
