"""LoRA adapters: rows of one step with different adapters, as of the merged models; refusals by name."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

pytest.importorskip("transformers")

from lora_factory import write_adapter
from packed_factory import write_folder
from sampling import some_of
from tessera.capture import build, record
from tessera.capture.models.lora import using_adapters
from tessera.errors import CaptureError
from tessera.execute.reference import Replay
from tessera.ir import Step
from tessera.kernels.tensors import same_bits
from tessera.profile.counts import OpClass, work_of
from tessera.serve.records import ServeSpec
from tessera.serve.steps import served

SPEC = ServeSpec(microbatches=1, rows=4, capacity=32, max_batch_tokens=8)


@pytest.mark.parametrize(
    ("method", "joined"),
    some_of(
        [(method, joined) for method in ("awq", "fp8-rows") for joined in (False, True)],
        [("awq", True), ("fp8-rows", False)],
    ),
)
def test_every_row_has_its_own_adapter(method: str, joined: bool, tmp_path: Path) -> None:
    """Two adapters of different ranks, layers and scales and none, beside packed weights."""
    base = write_folder(tmp_path / "base", method)
    models = [
        base,
        write_adapter(tmp_path / "one", base, 1, alpha_pattern={"0.self_attn.v_proj": 3, "v_proj": 40}),
        write_adapter(tmp_path / "two", base, 2, rank=6, targets=("k_proj", "q_proj"), use_rslora=True),
    ]
    folders = (str(tmp_path / "one"), str(tmp_path / "two"))
    step = Step(str(tmp_path / "base"), "call", 3, 5, joined_products=joined, adapters=folders)
    model: Any = build(step).module
    words = torch.randint(0, 258, (3, 5), generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([2, 0, 1]).repeat_interleave(5)
    with torch.no_grad(), using_adapters(model, rows):
        logits = model(input_ids=words, use_cache=False).logits
    for row, number in enumerate((2, 0, 1)):
        with torch.no_grad():
            wanted = models[number](input_ids=words[row : row + 1], use_cache=False).logits[0]

        assert_close(logits[row], wanted, rtol=1e-4, atol=1e-5)


def test_a_served_step_takes_the_adapter_of_each_token(tmp_path: Path) -> None:
    """A trace runs as the model does; adapters are priced by their bytes and operations."""
    base = write_folder(tmp_path / "base", "awq")
    write_adapter(tmp_path / "one", base, 1)
    spec = replace(SPEC, adapters=(("one", str(tmp_path / "one")),))
    workload = served(str(tmp_path / "base"), spec).workloads[-1]
    trace = record(workload)
    inputs = workload.make_inputs(0)
    replayed = Replay(trace, workload.weights(), inputs, workload.make_state(0)).run_in_program_order()
    number = next(i for i in range(len(trace.launches)) if trace.kernel_of(i).name == "tessera.lora.default")
    work = work_of(trace.kernel_of(number), trace.launches[number])

    assert {0, 1} == set(inputs["adapters"].tolist())
    assert same_bits(workload.run(inputs, workload.make_state(0))["logits"], replayed.outputs["logits"])
    assert OpClass.GEMM is work.op
    assert 2.0 * 8 * 4 * (64 + 64) == work.flops


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"use_later_idea": True}, "use_later_idea"),
        ({"targets": ("lm_head",)}, r"head \(lm_head\)"),
        ({"targets": ("embed_tokens",)}, "Embedding"),
    ],
)
def test_what_is_not_handled_is_named(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    """With what to do instead."""
    base = write_folder(tmp_path / "base", "awq")
    write_adapter(tmp_path / "one", base, 1, **settings)

    with pytest.raises(CaptureError, match=rf"{name}.*not supported.*[Mm]erge"):
        build(Step(str(tmp_path / "base"), "call", 1, 4, adapters=(str(tmp_path / "one"),)))


def test_a_layer_that_is_not_called_has_no_adapter(tmp_path: Path) -> None:
    """The model multiplies by its weight itself."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 8, "vocab_size": 64}
    model = MambaForCausalLM(MambaConfig(**sizes))
    model.save_pretrained(tmp_path / "base")
    write_adapter(tmp_path / "one", model, 1, targets=("in_proj", "dt_proj"))
    spec = replace(SPEC, adapters=(("one", str(tmp_path / "one")),))

    with pytest.raises(CaptureError, match=r"dt_proj are not supported: the model does not call it.*Merge"):
        served(str(tmp_path / "base"), spec)


@pytest.mark.parametrize(
    "settings", [{"alpha_pattern": {"(": 1}}, {"alpha_pattern": [1]}, {"lora_alpha": math.nan}]
)
def test_a_scale_that_cannot_be_read_is_the_adapters_fault(settings: dict[str, Any], tmp_path: Path) -> None:
    base = write_folder(tmp_path / "base", "awq", layers=1)
    write_adapter(tmp_path / "one", base, 1)
    path = tmp_path / "one" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    with pytest.raises(CaptureError, match=r"one: .*_proj has no scale.*adapter_config.json"):
        build(Step(str(tmp_path / "base"), "call", 1, 4, adapters=(str(tmp_path / "one"),)))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    """Layers that the model lacks, and other shapes."""
    base = write_folder(tmp_path / "base", "awq")
    wide = write_folder(tmp_path / "wide", "awq", "qwen3_moe")
    write_adapter(tmp_path / "one", wide, 1, targets=("gate",))
    with pytest.raises(CaptureError, match=r"has no .*mlp.gate"):
        build(Step(str(tmp_path / "base"), "call", 1, 4, adapters=(str(tmp_path / "one"),)))

    path = tmp_path / "one" / "adapter_model.safetensors"
    single = {name.replace("mlp.gate", "mlp.experts.0.up_proj"): t for name, t in load_file(path).items()}
    save_file(single, path)
    with pytest.raises(CaptureError, match=r"single expert \(.*experts.0.up_proj\) are not supported.*Merge"):
        build(Step(str(tmp_path / "wide"), "call", 1, 4, adapters=(str(tmp_path / "one"),)))

    write_adapter(tmp_path / "two", base, 1, targets=("up_proj",))
    path = tmp_path / "two" / "adapter_model.safetensors"
    save_file({name: t[:, :3].contiguous() for name, t in load_file(path).items()}, path)
    with pytest.raises(CaptureError, match=r"the layer is 96 x 64"):
        build(Step(str(tmp_path / "base"), "call", 1, 4, adapters=(str(tmp_path / "two"),)))
