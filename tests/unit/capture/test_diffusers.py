"""Denoisers of diffusers: found in a folder, shown what their configuration says, replayed bit for bit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from benchmarks.coverage_models import DIFFUSION, Model
from safetensors.torch import save_file

from tessera.capture import build, record
from tessera.errors import CaptureError, UnknownName
from tessera.execute.reference import Replay
from tessera.ir import Step
from tessera.kernels.tensors import same_bits


def a_model(kind: str) -> Model:
    """One of the small models of the benchmark."""
    return next(model for model in DIFFUSION if model.kind == kind)


def a_step(folder: Path, kind: str = "denoise") -> Step:
    """A picture of 16 patches for each of two rows."""
    return Step(str(folder), kind, 2, 16, random_weights=True)


@pytest.mark.parametrize("kind", ["SD3Transformer2DModel", "UNet2DConditionModel", "WanTransformer3DModel"])
def test_a_denoiser_is_captured(kind: str, tmp_path: Path) -> None:
    """The trace, replayed on another request, gives the model's own prediction and moves its latents."""
    a_model(kind).write(tmp_path)
    workload = build(a_step(tmp_path))
    trace = record(workload)
    inputs, state = workload.make_inputs(1), workload.make_state(1)

    replayed = Replay(trace, workload.weights(), inputs, state).run_in_program_order()
    before = state["latents"].clone()
    wanted = workload.run(inputs, state)

    assert same_bits(wanted["prediction"], replayed.outputs["prediction"])
    assert same_bits(state["latents"], replayed.state["latents"])
    assert not same_bits(before, state["latents"])


@pytest.mark.parametrize("kind", ["PixArtTransformer2DModel", "WanTransformer3DModel"])
def test_weights_have_the_types_of_their_library_without_values_too(kind: str, tmp_path: Path) -> None:
    """The type of most weights in the file; some layers of Wan stay in float32."""
    model = getattr(diffusers, kind).from_config(a_model(kind).sizes).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    step = Step(str(tmp_path), "denoise", 1, 16)
    with torch.device("meta"):
        bare = build(step).weights()
    types = {name: tensor.dtype for name, tensor in build(step).weights().items()}

    assert types == {name: tensor.dtype for name, tensor in bare.items()}
    assert (torch.float32 in types.values()) == ("Wan" in kind)


def test_files_that_were_not_downloaded_are_not_needed_for_shapes(tmp_path: Path) -> None:
    """An index alone, without values."""
    a_model("DiTTransformer2DModel").write(tmp_path)
    index = {"weight_map": {"proj.weight": "diffusion_pytorch_model-00001-of-00001.safetensors"}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with torch.device("meta"):
        weights = build(Step(str(tmp_path), "denoise", 1, 16)).weights()

    assert {torch.float32} == {tensor.dtype for tensor in weights.values()}


def test_a_pipeline_means_its_denoiser(tmp_path: Path) -> None:
    """The transformer or the UNet of a pipeline's folder is taken."""
    a_model("DiTTransformer2DModel").write(tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline", "vae": ["a", "b"]}))

    assert "DiTTransformer2DModel" == type(build(a_step(tmp_path)).module).__name__


def test_a_pipeline_without_one_is_refused(tmp_path: Path) -> None:
    """The message names the pipeline's parts."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "X", "vae": ["a", "b"]}))

    with pytest.raises(CaptureError, match=r"no transformer or unet.*vae"):
        build(a_step(tmp_path))


def test_another_part_is_refused(tmp_path: Path) -> None:
    """A class without a time step is no denoiser."""
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))

    with pytest.raises(CaptureError, match="no denoiser 'AutoencoderKL'"):
        build(a_step(tmp_path))


def test_inputs_and_latents_of_a_file_are_those_of_the_first_request(tmp_path: Path) -> None:
    """Other requests draw values of the same shapes."""
    a_model("PixArtTransformer2DModel").write(tmp_path)
    words = torch.randn(2, 3, 32)
    given = {"encoder_hidden_states": words, "hidden_states": torch.ones(2, 4, 8, 8)}
    save_file({**given, "encoder_attention_mask": torch.tensor([[1, 1, 0]] * 2)}, tmp_path / "i.safetensors")
    workload = build(replace(a_step(tmp_path), inputs=str(tmp_path / "i.safetensors")))

    assert torch.equal(words, workload.make_inputs(0)["encoder_hidden_states"])
    assert (2, 3, 32) == workload.make_inputs(1)["encoder_hidden_states"].shape
    assert (workload.make_state(0)["latents"] == 1).all()
    assert torch.isfinite(workload.run(workload.make_inputs(0), workload.make_state(0))["prediction"]).all()


def test_inputs_of_a_file_that_it_does_not_take_are_refused(tmp_path: Path) -> None:
    """They were ignored."""
    a_model("DiTTransformer2DModel").write(tmp_path)
    (tmp_path / "i.json").write_text('{"timestep": [3.0]}')

    with pytest.raises(CaptureError, match=r"i.json: 'timestep' of shape \(1,\) is no input.*class_labels"):
        build(replace(a_step(tmp_path), inputs=str(tmp_path / "i.json")))


def test_it_has_no_other_step(tmp_path: Path) -> None:
    """A denoiser does not decode."""
    a_model("DiTTransformer2DModel").write(tmp_path)

    with pytest.raises(UnknownName, match="denoise"):
        build(a_step(tmp_path, "decode"))
