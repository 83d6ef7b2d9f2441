"""Denoisers of diffusers: found in a folder, shown what their configuration says, replayed bit for bit."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers
from benchmarks.coverage_models import DIFFUSION, Model

from tessera.capture import build, record
from tessera.errors import CaptureError, UnknownName
from tessera.execute.reference import Replay, same_bits
from tessera.ir import Step


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


def test_it_has_no_other_step(tmp_path: Path) -> None:
    """A denoiser does not decode."""
    a_model("DiTTransformer2DModel").write(tmp_path)

    with pytest.raises(UnknownName, match="denoise"):
        build(a_step(tmp_path, "decode"))
