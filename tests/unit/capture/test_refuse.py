"""What cannot be recorded: what, where, and what to do instead."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.two_tensor import TwoTensor

import tessera
from tessera.capture import Workload, record
from tessera.errors import CaptureError
from tessera.ir import Step, Trace


def capture(fn: Callable[[torch.Tensor], torch.Tensor]) -> Trace:
    """The trace of a function of one 4 x 8 tensor."""
    return record(
        Workload(
            Step("made", "decode", 1, 1),
            torch.nn.Module(),
            lambda inputs, state: {"y": fn(inputs["x"])},
            lambda seed: {"x": torch.arange(32.0).reshape(4, 8)},
            lambda seed: {},
            lambda first, run, last: dict(first),
        )
    )


def test_a_sparse_tensor_is_refused() -> None:
    """With its line, and the dense way out."""
    with pytest.raises(CaptureError, match=r"test_refuse\.py:\d+: .*sparse.*to_dense"):
        capture(lambda x: x.to_sparse().sum())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused() -> None:
    """It has the layout of a dense one, and no shape."""
    with pytest.raises(CaptureError, match=r"test_refuse\.py:\d+: .*nested"):
        capture(lambda x: torch.nested.nested_tensor([x, x]).to_padded_tensor(0.0))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch will drop them
def test_a_quantized_tensor_is_refused() -> None:
    """Its scale is not in its memory, so its memory alone cannot be moved."""
    with pytest.raises(CaptureError, match=r"quantized.*dequantize"):
        capture(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize())


def test_a_write_that_no_schema_declares_is_refused() -> None:
    """Training batch norm changes its running statistics unsaid."""
    norm = torch.nn.BatchNorm1d(8)
    norm.num_batches_tracked = None

    with pytest.raises(CaptureError, match=r"running statistics.*eval\(\)"):
        capture(norm)


def test_an_operator_of_gpus_alone_is_refused_on_the_cpu() -> None:
    """The message names the operator and the devices that have it."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 2, 2, 8)
        found: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, False)[0]
        return found

    with pytest.raises(CaptureError, match=r"test_refuse\.py:\d+: .*missing on this device.*--device fake"):
        capture(attend)


def test_eager_experts_are_refused_with_the_way_out() -> None:
    """Routing that Python looks at: the grouped or batched path needs no look."""

    def route(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in range(3):
            if (x.argmax(-1) == expert).any():
                total = total + x
        return total

    with pytest.raises(CaptureError, match=r"on the host.*grouped or batched path"):
        capture(route)


def test_a_shape_that_depends_on_a_constant_is_recorded() -> None:
    """nonzero of what no request changes has the same shape in every call."""
    trace = capture(lambda x: x[0, 0] + torch.ones(4).nonzero().sum())

    assert "aten.nonzero.default" in [kernel.name for kernel in trace.kernels]


def test_dropout_that_is_off_is_not_refused() -> None:
    """An attention kernel may draw numbers, and with a dropout of zero it does not."""
    q = torch.ones(1, 1, 4, 8)

    trace = capture(lambda x: torch.nn.functional.scaled_dot_product_attention(q + x[0, 0], q, q))

    assert any("attention" in kernel.name for kernel in trace.kernels)


def test_aliases_that_no_schema_declares_are_listed() -> None:
    """_unsafe_view shares memory and says nothing; view says so."""
    trace = capture(lambda x: torch.ops.aten._unsafe_view((x * 2).view(32), [4, 8]) + 1)

    assert (("aten._unsafe_view.default", 1),) == trace.aliases


@torch.library.custom_op("tessera_test::writes_unsaid", mutates_args=())
def writes_unsaid(x: torch.Tensor) -> torch.Tensor:
    """Changes its argument."""
    x.mul_(2)
    return x + 1


CALLS: list[int] = []


@torch.library.custom_op("tessera_test::counts", mutates_args=())
def counts(x: torch.Tensor) -> torch.Tensor:
    """Depends on how often it was called."""
    CALLS.append(1)
    return x + len(CALLS)


def test_a_custom_operator_that_writes_an_argument_unsaid_is_refused() -> None:
    """A launch that reads the argument would not wait for it."""
    with pytest.raises(
        CaptureError, match=r"test_refuse\.py:\d+: .*writes_unsaid.* writes 'x'.*mutates_args"
    ):
        capture(lambda x: writes_unsaid(x * 1))


def test_a_custom_operator_that_keeps_something_is_refused() -> None:
    """Each request would get the result of another call."""
    with pytest.raises(
        CaptureError, match=r"test_refuse\.py:\d+: .*counts.* gives other results for the same"
    ):
        capture(counts)


def test_a_class_of_tensors_made_in_the_step_is_refused() -> None:
    """Torch cannot make it while operators are seen."""
    with pytest.raises(CaptureError, match=r"test_refuse\.py:\d+: CausalBias is a class of tensors"):
        capture(lambda x: causal_lower_right(4, 8) + x)


def test_a_module_without_shapes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"'weight' has no shape before the first call.*once"):
        tessera.capture(torch.nn.LazyLinear(4), torch.ones(2, 4))


def test_an_argument_that_wraps_tensors_is_refused() -> None:
    """It has no memory of its own."""
    with pytest.raises(CaptureError, match=r"'x' is a TwoTensor, which wraps.*parameter of a module"):
        tessera.capture(lambda x: x * 2, TwoTensor(torch.ones(2), torch.ones(2)))


def test_a_tensor_of_zeros_without_memory_is_refused() -> None:
    """Forward derivatives make it."""
    with pytest.raises(CaptureError, match=r"zero without memory.*jacrev"):
        capture(lambda x: torch.func.hessian(lambda row: (row**3).sum())(x[0]))


def test_a_nested_encoder_is_refused_with_its_option() -> None:
    """It looks where the padding is."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval()

    with pytest.raises(CaptureError, match="enable_nested_tensor=False"):
        capture(lambda x: encoder(x[None], src_key_padding_mask=x[None, :, 0] > 9))
