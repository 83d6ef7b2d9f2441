"""The five families: what their steps compute, and what they hand on."""

from typing import Any

import numpy as np
import pytest
import torch

import families
from sampling import num_layers, one_of_each
from tessera.analyze import build_graph
from tessera.capture import build, known_models
from tessera.errors import CaptureError, MismatchError
from tessera.flow import make_unit
from tessera.ir import BufferKind, Step, Trace

Tensors = dict[str, torch.Tensor]
# Every model and every kind of step.
SAMPLE = sorted(
    {*one_of_each(families.STEPS, lambda row: row[0]), *one_of_each(families.STEPS, lambda row: row[1])}
)


def module_of(model: str) -> Any:
    """The Hugging Face model itself."""
    return families.workload(model, "prefill").module


def made_state(model: str) -> tuple[Tensors, Tensors, Tensors]:
    """Inputs of a prefill of full rows, its outputs, and the state it left."""
    prefill = families.workload(model, "prefill")
    inputs, state = prefill.make_inputs(5), prefill.make_state(5)
    if "last" in inputs:
        inputs["last"] = torch.full_like(inputs["last"], families.PROMPT - 1)
    if "mask" in inputs:
        inputs["mask"] = torch.ones_like(inputs["mask"])
    return inputs, prefill.run(inputs, state), state


def whole_logits(model: str, tokens: torch.Tensor) -> torch.Tensor:
    """The last logits of Hugging Face's own forward pass over all tokens, with its own attention."""
    module = module_of(model)
    if model == "tiny-gpt-oss":
        module.set_attn_implementation("eager")
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=tokens).logits[:, -1]
    if model == "tiny-gpt-oss":
        module.set_attn_implementation("tessera")
    return logits


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt-oss", "tiny-mamba"])
def test_decoding_after_prefill_agrees_with_the_models_own_forward(model: str) -> None:
    """Prefill and three decodes give the logits of one long forward pass of the Hugging Face model."""
    inputs, outputs, state = made_state(model)
    decode = families.workload(model, "decode")
    tokens = inputs["tokens"]
    for run in range(3):
        following = decode.follow(inputs, run, outputs)
        tokens = torch.cat([tokens, following["tokens"]], 1)
        outputs = decode.run(following, state)

    torch.testing.assert_close(outputs["logits"], whole_logits(model, tokens), rtol=2e-4, atol=2e-4)


def test_text_after_an_image_agrees_with_the_models_own_forward() -> None:
    """Encode, prefill and decode give the logits of the Hugging Face model for the same image and text."""
    encode = families.workload("tiny-qwen2.5-vl", "encode")
    prefill = families.workload("tiny-qwen2.5-vl", "prefill")
    decode = families.workload("tiny-qwen2.5-vl", "decode")
    pixels = encode.make_inputs(1)
    image = encode.run(pixels, {})
    inputs, state = prefill.follow(pixels, 0, image), prefill.make_state(0)
    inputs["last"] = torch.full_like(inputs["last"], families.PROMPT - 1)
    outputs = prefill.run(inputs, state)
    following = decode.follow(inputs, 0, outputs)
    decoded = decode.run(following, state)["logits"]
    model = module_of("tiny-qwen2.5-vl")
    tokens = torch.cat([inputs["tokens"], following["tokens"]], 1).clone()
    places = inputs["image_places"][0]
    rotary = torch.cat([inputs["rotary"], following["rotary"]], -1)
    language = model.model.language_model
    with torch.no_grad():
        embeds = language.embed_tokens(tokens)
        features = model.model.visual(
            pixels["pixel_values"], grid_thw=torch.tensor([[1, 6, 8]] * families.BATCH)
        ).pooler_output
        embeds[:, places] = features.view(families.BATCH, -1, embeds.shape[-1])
        hidden = language(inputs_embeds=embeds, position_ids=rotary).last_hidden_state[:, -1]
        whole = model.lm_head(hidden)

    torch.testing.assert_close(decoded, whole, rtol=2e-4, atol=2e-4)


def test_positions_of_an_image_are_those_of_the_model() -> None:
    """Time, height and width of image tokens, and of the text after them, as Hugging Face computes them."""
    from tessera.capture.models.vision import NUM_LEADING, grid_of, grid_places, rotary

    model = module_of("tiny-qwen2.5-vl")
    width, num = families.PROMPT, families.PROMPT // 2
    tokens = torch.zeros((1, width), dtype=torch.long)
    tokens[0, NUM_LEADING : NUM_LEADING + num] = model.config.image_token_id
    types = (tokens == model.config.image_token_id).int()
    rows, columns = grid_of(num)
    merge = model.config.vision_config.spatial_merge_size
    grid = torch.tensor([[1, rows * merge, columns * merge]])
    wanted, _ = model.model.get_rope_index(tokens, mm_token_type_ids=types, image_grid_thw=grid)

    assert wanted[:, 0].tolist() == rotary(np.arange(width), [NUM_LEADING], grid_places(num)).tolist()


@pytest.mark.parametrize("model", families.LANGUAGE)
def test_rows_decode_as_if_alone(model: str) -> None:
    """Rows of one batch at different places give what each gives in a batch of its own."""
    both, alone = families.workload(model, "decode", 2), families.workload(model, "decode", 1)
    inputs, state = both.make_inputs(3), both.make_state(3)
    row = {n: (t[:, 1:2] if n == "rotary" else t[1:2]).clone() for n, t in inputs.items()}
    row_state = {name: t[1:2].clone() for name, t in state.items()}

    torch.testing.assert_close(
        both.run(inputs, state)["logits"][1:2], alone.run(row, row_state)["logits"], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("model", families.LANGUAGE)
def test_padding_does_not_change_a_shorter_row(model: str) -> None:
    """What a prefill returns for a row does not depend on the tokens outside of it."""
    prefill = families.workload(model, "prefill")
    inputs = prefill.make_inputs(4)
    other = {name: tensor.clone() for name, tensor in inputs.items()}
    outside = (
        inputs["mask"] == 0 if "mask" in inputs else torch.arange(families.PROMPT) > inputs["last"][:, None]
    )
    assert outside.any()
    other["tokens"][outside] = 7
    found = [prefill.run(given, prefill.make_state(0))["logits"] for given in (inputs, other)]

    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_a_sliding_layer_keeps_only_its_window() -> None:
    """The layers of gpt-oss that look back 8 tokens hold 8 of them; the others hold all."""
    state = families.workload("tiny-gpt-oss", "decode").make_state(0)

    num = num_layers()
    assert [8, 28] * (num // 2) == [state[f"keys.{i}"].shape[2] for i in range(num)]


def test_denoising_ends_where_the_noise_does() -> None:
    """A step after the end of the schedule leaves the latents alone; one at its beginning does not."""
    denoise = families.workload("tiny-sd3.5", "denoise")
    first, state = denoise.make_inputs(0), denoise.make_state(0)
    before = state["latents"].clone()
    denoise.run(denoise.follow(first, 28, {}), state)

    assert torch.equal(before, state["latents"])
    denoise.run(denoise.follow(first, 0, {}), state)
    assert not torch.equal(before, state["latents"])


def test_the_denoiser_has_the_published_number_of_parameters() -> None:
    """Stable Diffusion 3.5 medium has 2.24 billion parameters outside its encoders."""
    with torch.device("meta"):
        module = build(Step("sd3.5-medium", "denoise", 1, 16)).module

    assert 2.2e9 < sum(p.numel() for p in module.parameters()) < 2.3e9


def test_an_image_of_another_size_is_refused() -> None:
    """A prefill tells which encode belongs to it."""
    prefill = families.workload("tiny-qwen2.5-vl", "prefill")

    with pytest.raises(MismatchError, match="half the prefill's context"):
        prefill.follow({}, 0, {"image": torch.zeros(2, 5, 128)})


def test_a_served_step_reads_parts_of_pictures() -> None:
    """Its picture input has a row for each of its tokens, and not those of one encode."""
    encode = families.trace("tiny-qwen2.5-vl", "encode", batch=1)

    assert 2 == len(make_unit([encode, families.trace("tiny-qwen2.5-vl", "tokens")]).graphs)


@pytest.mark.parametrize(("model", "kind"), SAMPLE)
def test_every_step_names_what_it_reads_keeps_and_returns(model: str, kind: str) -> None:
    """Buffers of every kind are found; the state is written; nothing is left unnamed."""
    trace: Trace = families.trace(model, kind)
    written = {a.buffer for x in trace.launches for a in x.accesses if a.write}
    state = trace.buffers_of(BufferKind.STATE)

    assert trace.buffers_of(BufferKind.INPUT)
    assert trace.outputs
    assert set(state) <= written
    assert bool(state) == (kind != "encode")
    assert len(build_graph(trace).edges) >= len(trace.launches) // 2


def test_every_family_is_known_in_two_sizes() -> None:
    """Each tiny model has a full-size one with the same steps."""
    full = {
        "tiny-llama": "llama-3-8b",
        "tiny-gpt-oss": "gpt-oss-20b",
        "tiny-mamba": "mamba-codestral-7b",
        "tiny-qwen2.5-vl": "qwen2.5-vl-7b",
        "tiny-sd3.5": "sd3.5-medium",
    }
    known = known_models()

    assert all(known[tiny] == known[large] for tiny, large in full.items())


def test_a_context_beyond_the_model_is_refused() -> None:
    """The message says how far the model goes."""
    with pytest.raises(CaptureError, match="beyond the 4096 positions of tiny-gpt-oss"):
        build(Step("tiny-gpt-oss", "decode", 1, 5000))
