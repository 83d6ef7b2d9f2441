"""Weights of a few bits: the parts of a wrapping tensor are the weights, priced at their own bytes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import tessera
import tessera.kernels.packing
from tessera.capture import build, record
from tessera.capture.function import workload
from tessera.errors import CaptureError
from tessera.execute.reference import Replay
from tessera.ir import BufferKind, Step, Trace
from tessera.kernels.packing import tile
from tessera.kernels.tensors import same_bits
from tessera.profile.counts import OpClass, work_of

WIDTH, GROUP = 256, 32


def weights(trace: Trace) -> dict[str, int]:
    """Bytes by name."""
    return {trace.buffers[b].name: trace.buffers[b].size_bytes for b in trace.buffers_of(BufferKind.WEIGHT)}


def a_model() -> torch.nn.Linear:
    """Large enough that its weights are no constants."""
    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).eval()


def test_a_wrapper_is_taken_apart() -> None:
    """A weight that wraps two tensors is two weights, and the trace gives the model's own bits."""
    model = a_model()
    whole = model.weight.detach()
    model.weight = torch.nn.Parameter(TwoTensor(whole, whole * 2))
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)

    step = workload(lambda x: model(x).b, x)
    trace = record(step)
    replayed = Replay(trace, step.weights(), {"x": x}, {}).run_in_program_order()

    size = 2 * WIDTH * WIDTH
    assert {"model.weight.a": size, "model.weight.b": size} == weights(trace)
    assert same_bits(torch.nn.functional.linear(x, whole * 2), replayed.outputs["output"])


def test_weights_of_four_bits_are_priced_at_their_bytes() -> None:
    """A product with packed weights counts the packed bytes, and all of its operations."""
    codes = torch.randint(0, 16, (WIDTH, WIDTH), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.ones(WIDTH // GROUP, WIDTH, 2, dtype=torch.bfloat16)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)

    trace = tessera.capture(lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales), x)
    work = work_of(trace.kernel_of(0), trace.launches[0])

    assert OpClass.GEMM is work.op
    assert packed.nbytes + scales.nbytes + x.nbytes + 4 * WIDTH * 2 == work.num_bytes
    assert 2.0 * 4 * WIDTH * WIDTH == work.flops


def _torchao(name: str) -> object:
    quantization = pytest.importorskip("torchao.quantization")
    if name == "int4":
        prototype = pytest.importorskip("torchao.prototype.quantization.int4")
        return prototype.PrototypeInt4WeightOnlyConfig(group_size=GROUP)
    kind: Callable[[], object] = getattr(quantization, name)
    return kind()


@pytest.mark.parametrize(
    ("name", "most"), [("Int8WeightOnlyConfig", 1.1), ("Float8WeightOnlyConfig", 1.1), ("int4", 0.7)]
)
def test_weights_of_torchao_run_equal_to_themselves(name: str, most: float) -> None:
    """The trace has about a byte (or half of one) a weight, and gives the quantised model's own bits."""
    config = _torchao(name)
    from torchao.quantization import quantize_

    model = a_model()
    quantize_(model, config)
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)

    step = workload(model, x)
    trace = record(step)
    replayed = Replay(trace, step.weights(), {"input": x}, {}).run_in_program_order()

    assert sum(weights(trace).values()) <= most * WIDTH * WIDTH
    assert same_bits(model(x), replayed.outputs["output"])


def test_quantised_weights_are_not_made_up(tmp_path: Path) -> None:
    """A configuration that speaks of quantised weights is refused where there are none."""
    settings = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))

    with pytest.raises(CaptureError, match=r"quantised.*quantization_config"):
        build(Step(str(tmp_path), "decode", 1, 8, random_weights=True))


def test_idle_experts_are_not_read() -> None:
    """Two rows visit at most two of eight experts: a quarter of codes and scales."""
    plain = torch.zeros(8, 64, 64, dtype=torch.uint8), torch.full((8, 64, 4), 127, dtype=torch.uint8)
    codes, scales, *form = tile(*plain, None, "mxfp4", (1, 32))
    x, offsets = torch.ones(2, 128), torch.tensor([1, 1, 1, 2, 2, 2, 2, 2], dtype=torch.int32)

    trace = tessera.capture(
        lambda x, o: torch.ops.tessera.packed_grouped(x, codes, scales, None, o, *form), x, offsets
    )
    work = work_of(trace.kernel_of(0), trace.launches[0])

    assert OpClass.GROUPED is work.op
    assert (codes.nbytes + scales.nbytes) // 4 + 2 * (128 + 64) * 4 + offsets.nbytes == work.num_bytes
    assert 2.0 * 2 * 64 * 128 == work.flops
