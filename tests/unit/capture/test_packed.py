"""Quantised checkpoints: packed as published, products as of the dequantised model, refusals by name."""

import json
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

from packed_factory import METHODS, write_folder
from sampling import one_of_each, some_of
from tessera.capture import Workload, build, record
from tessera.capture.models import checkpoint
from tessera.capture.models.packed import PackedWeight, packing_of
from tessera.capture.record import record_step
from tessera.capture.workload import on_device
from tessera.errors import CaptureError
from tessera.execute.reference import Replay
from tessera.ir import Step
from tessera.kernels.tensors import same_bits
from tessera.serve.compiling import layouts
from tessera.serve.records import ServeSpec
from tessera.serve.steps import served, smallest_step

FOLDERS: list[tuple[str, str]] = [
    *((method, "llama") for method in METHODS if method != "mxfp4"),
    ("mxfp4", "gpt_oss"), ("fp8-blocks", "qwen3"), ("gptq", "qwen3_moe"), ("fp8-blocks", "qwen3_moe"),
    ("gptq-ordered", "qwen3_moe"), ("gptq", "falcon"),
]  # fmt: skip


def kind_of(pair: tuple[str, str]) -> tuple[str, str]:
    """How weights are quantised, and the family."""
    method, family = pair
    return str(METHODS[method][0].get("quant_method")), family


# Other sizes of groups, parts of mixed ones, and families whose layers are those of these.
LIKE_OTHERS = [
    *((method, "llama") for method in ("gptq", "gptq-8", "gptq-64", "gptq-64-ordered", "int4", "fp8-rows")),
    ("gptq-ordered", "llama"), ("fp8-blocks", "llama"), ("fp8-blocks", "qwen3"),
    ("gptq", "qwen3_moe"), ("gptq", "falcon"),
]  # fmt: skip
# Dense layers, and both ways to write experts; the rest goes the same ways.
KINDS = some_of(
    one_of_each(FOLDERS, kind_of), [("gptq", "llama"), ("mxfp4", "gpt_oss"), ("fp8-blocks", "qwen3_moe")]
)


@dataclass(frozen=True)
class Written:
    """A folder that no test changes, with its dequantised model."""

    folder: Path
    reference: Any

    @cached_property
    def smallest(self) -> Workload:
        """Its smallest served step."""
        return build(smallest_step(str(self.folder), ServeSpec()))

    def copy(self, to: Path) -> None:
        shutil.copytree(self.folder, to, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Written]:
    """Folders by method and family."""

    @cache
    def make(method: str, family: str) -> Written:
        folder = tmp_path_factory.mktemp(f"{method}-{family}")
        return Written(folder, write_folder(folder, method, family, layers=1))

    return make


Folders = Callable[[str, str], Written]


@pytest.mark.parametrize(
    ("method", "family", "intermediate"),
    [*((*pair, 96) for pair in FOLDERS), ("mxfp4", "gpt_oss", 64), ("int4", "llama", 100)],
)
def test_a_packed_model_is_its_dequantised_model(
    method: str, family: str, intermediate: int, written: Folders, tmp_path: Path
) -> None:
    """The same logits from weights of a few bits, also where words have room; experts, also square ones, may
    be summed differently.
    """
    if intermediate == 96:
        folder, reference = written(method, family).folder, written(method, family).reference
    else:
        folder, reference = tmp_path, write_folder(tmp_path, method, family, intermediate, layers=1)
    model: Any = build(Step(str(folder), "call", 2, 8)).module
    words = torch.randint(0, 258, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted = (m(input_ids=words, use_cache=False).logits for m in (model, reference))

    assert any(isinstance(p, PackedWeight) for p in model.parameters())
    if (method, family) in (("mxfp4", "gpt_oss"), ("gptq-ordered", "qwen3_moe")):
        assert float((found - wanted).abs().max()) < 1e-6
    else:
        assert same_bits(wanted, found)


@pytest.mark.parametrize(
    ("method", "family", "products"),
    [("awq", "llama", (4, 0)), ("gptq-ordered", "llama", (4, 0)), ("mxfp4", "gpt_oss", (0, 2))],
)
def test_a_served_step_keeps_weights_packed(
    method: str, family: str, products: tuple[int, int], written: Folders
) -> None:
    """Products of one input are joined, also in the same order; a trace runs from the packed bytes."""
    spec = ServeSpec(microbatches=1, rows=2, capacity=32, max_batch_tokens=8)
    workload = served(str(written(method, family).folder), spec).workloads[-1]
    trace = record(workload)
    names = Counter(trace.kernel_of(i).name for i in range(len(trace.launches)))
    inputs, state = workload.make_inputs(0), workload.make_state(0)
    replayed = Replay(trace, workload.weights(), inputs, state).run_in_program_order()

    assert products == tuple(names[f"tessera.packed_{kind}.default"] for kind in ("linear", "grouped"))
    assert same_bits(workload.run(inputs, workload.make_state(0))["logits"], replayed.outputs["logits"])


@pytest.mark.parametrize(
    ("method", "family"), some_of(FOLDERS, [pair for pair in FOLDERS if pair not in LIKE_OTHERS])
)
def test_a_folder_is_built_without_its_weights(method: str, family: str, written: Folders) -> None:
    """Headers, zeros and groups tell what each weight consists of: the same parts."""
    workload = written(method, family).smallest
    real = workload.weights()
    with torch.device("meta"):
        outline = build(workload.step).weights()

    assert layouts(real) == layouts(outline)
    assert list(real) == list(outline)


@pytest.mark.parametrize(("method", "family"), KINDS)
def test_a_step_without_weights_has_the_same_products(method: str, family: str, written: Folders) -> None:
    workload, kinds = written(method, family).smallest, ("packed_linear", "packed_grouped")
    traces = record(workload), record_step(workload.step, "fake", is_compared=True)
    found = [[trace.kernel_of(i).name for i in range(len(trace.launches))] for trace in traces]
    products = [[name for name in names if any(kind in name for kind in kinds)] for names in found]

    assert products[0] == products[1] != []


def test_only_what_decides_is_read(written: Folders) -> None:
    """Codes, scales and plain weights are known by the headers."""
    folder = written("gptq-ordered", "llama").folder
    read, held = list[str](), checkpoint.read_weights(folder)

    class Noted:
        def __init__(self, name: str) -> None:
            self._name, self._slice = name, held[name]

        def __getitem__(self, what: Any) -> torch.Tensor:
            found: torch.Tensor = self._slice[what]
            read.extend([self._name] * bool(found.numel()))
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._slice, name)

    tensors = {name: Noted(name) for name in held}
    with patch.object(checkpoint, "read_weights", lambda folder: tensors), torch.device("meta"):
        build(Step(str(folder), "call", 1, 4))

    assert {"qzeros", "g_idx"} == {name.rpartition(".")[2] for name in read}


def test_a_packed_model_has_small_steps_also_where_others_have_none(written: Folders) -> None:
    """A GPU reads plain weights as fast for 64 rows as for one."""
    found = served(str(written("gptq", "llama").folder), ServeSpec(1, 64, 32, 128), min_size=64)
    assert found.shape.sizes == (8, 16, 32, 64, 128)


def test_weights_take_the_bytes_of_their_codes(written: Folders) -> None:
    """Half a byte and its share of scales and zeros for each weight of a linear layer."""
    weights = build(Step(str(written("awq", "llama").folder), "call", 1, 4)).weights()
    size = {name: t.nbytes for name, t in weights.items() if "layers.0.mlp.up_proj" in name}
    num = 64 * 96

    assert {"codes": num // 2, "scales": num // 32 * 2, "zeros": num // 32} == {
        name.rpartition(".")[2]: nbytes for name, nbytes in size.items()
    }


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gguf"}, "GGUF"),
        ({"quant_method": "exl2"}, "EXL2"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "quanto"}, "quanto"),
        ({"quant_method": "tomorrow"}, "tomorrow"),
        ({"bits": 4}, r"without quant_method"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ 3-bit"),
        ({"quant_method": "gptq", "dynamic": {"+:.*up_proj": {"bits": 2}}}, "GPTQ 2-bit"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ gemv"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt NVFP4"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors marlin-24"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "GPTQ marlin"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "transform_config": {"a": {}}},
            "compressed-tensors transformed",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "compressed-tensors sparse-24-bitmask",
        ),
    ],
)
def test_a_format_that_is_not_handled_is_named(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Before weights are looked for, with what to do instead."""
    config = {"model_type": "llama", "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(CaptureError, match=rf"{name}.* weights are not supported.*bfloat16"):
        build(Step(str(tmp_path), "decode", 1, 8))


@pytest.mark.parametrize(
    ("method", "part", "message"),
    [
        ("gptq", "", "lack {}weight"),
        ("gptq", "scales", "lack {}scales"),
        ("gptq", "qzeros", "lack {}qzeros"),
        ("gptq-ordered", "g_idx", "lack {}g_idx"),
        ("int4", "weight_scale", "lack {}weight_scale"),
        ("fp8-rows", "weight_scale", "{}weight in 8-bit floats, without scales"),
    ],
)
def test_a_folder_that_lacks_parts_is_named(
    method: str, part: str, message: str, written: Folders, tmp_path: Path
) -> None:
    """Nothing is made up."""
    from safetensors.torch import load_file, save_file

    written(method, "llama").copy(tmp_path)
    tensors, layer = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj."
    kept = {n: t for n, t in tensors.items() if not n.startswith(layer + part)}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(CaptureError, match=f"{tmp_path.name}: .*{message.format(layer)}"):
        build(Step(str(tmp_path), "decode", 1, 8))


def test_a_configuration_is_found_where_tools_write_it(written: Folders, tmp_path: Path) -> None:
    """ModelOpt's has a file of its own; a weight of 8-bit floats is never taken without its scale."""
    written("fp8-tensor", "llama").copy(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    inner = document.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(CaptureError, match="in 8-bit floats, without scales"):
        build(Step(str(tmp_path), "decode", 1, 8))

    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    folders = tmp_path, written("fp8-tensor", "llama").folder
    found, own = (layouts(build(Step(str(folder), "decode", 1, 8)).weights()) for folder in folders)

    assert own == found
    assert packing_of(Path(), {"text_config": {"quantization_config": inner}}) is not None


@pytest.mark.parametrize(
    ("method", "part", "change", "message"),
    [
        ("gptq", ".scales", lambda t: t[:, :48], r"shape \[48, 2\], where \[96, 2\] fits"),
        ("gptq", ".scales", lambda t: t.int(), "scales of torch.int32"),
        ("gptq", ".qzeros", lambda t: t[:1], r"shape \[96, 1\], where \[96, 2\] fits"),
        ("gptq", ".g_idx", lambda t: t + 1000, "g_idx has no groups of 32 columns"),
        ("gptq", ".g_idx", lambda t: (torch.arange(64) > 9).int(), "g_idx has no groups of 32 columns"),
        ("gptq", ".g_idx", lambda t: t[:10], "g_idx has no groups of 32 columns"),
        ("gptq", ".qweight", lambda t: t.float(), r"packed as \(8, 96\) of torch.float32"),
        (
            "int4",
            ".weight_zero_point",
            lambda t: torch.full((96, 2), 20, dtype=torch.int8),
            "no code of 4 bits",
        ),
        ("fp8-tensor", ".weight_scale", lambda t: torch.ones(3), r"shape \[3, 1\], where \[96, 1\] fits"),
        ("fp8-rows", ".weight", lambda t: t.half(), "of torch.float16"),
    ],
)
def test_parts_that_do_not_fit_one_another_are_named(
    method: str, part: str, change: Any, message: str, written: Folders, tmp_path: Path
) -> None:
    """Nothing is multiplied by another column's scale."""
    from safetensors.torch import load_file, save_file

    written(method, "llama").copy(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj"
    tensors[name + part] = change(tensors[name + part]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(CaptureError, match=rf"{name}.weight .*{message}.*Download the model again"):
        build(Step(str(tmp_path), "call", 1, 4))


def test_scales_of_exponents_are_numbers(written: Folders, tmp_path: Path) -> None:
    """GPU kernels read no 8-bit scales."""
    from safetensors.torch import load_file, save_file

    written("fp8-blocks", "llama").copy(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {n: t.to(torch.float8_e8m0fnu) if n.endswith("_inv") else t for n, t in tensors.items()}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    weights = build(Step(str(tmp_path), "call", 1, 4)).weights()

    assert {torch.float32} == {t.dtype for n, t in weights.items() if n.endswith(".scales")}


def test_packed_weights_stay_on_their_device(written: Folders) -> None:
    """Torch moves no wrapping tensor while the memory of a fake mode refers to it."""
    workload = build(Step(str(written("gptq", "llama").folder), "call", 1, 4))
    weights = dict(workload.module.named_parameters())
    references = [weakref.ref(weight) for weight in weights.values()]

    moved = dict(on_device(workload, "cpu").module.named_parameters())

    assert references
    assert all(moved[name] is weight for name, weight in weights.items())
