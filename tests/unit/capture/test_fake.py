"""Fake captures: without a GPU and without weights, and still launch for launch what a real one gives."""

import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import families
from sampling import one_of_each
from tessera.capture import Workload, check_device, fake, record_step
from tessera.capture.fake import choose
from tessera.capture.models import catalog
from tessera.capture.record import Recordings
from tessera.errors import CaptureError, UnknownName
from tessera.ir import BufferKind, Step, Trace
from trace_agreement import compare

SAMPLE = one_of_each(families.STEPS, lambda row: row[0])


def capture_fake(fn: object, module: torch.nn.Module | None = None) -> Trace:
    """The trace of a function of one 4 x 8 tensor on the fake GPU."""
    assert callable(fn)
    workload = Workload(
        Step("made", "decode", 1, 1),
        module or torch.nn.Module(),
        lambda inputs, state: {"y": fn(inputs["x"])},
        lambda seed: {"x": torch.zeros(4, 8)},
        lambda seed: {},
        lambda first, run, last: dict(first),
    )
    with fake.machine():
        return Recordings(workload, "fake").once(0)[0]


def names(trace: Trace) -> list[str]:
    """Kernel names in order."""
    return [trace.kernel_of(i).name for i in range(len(trace.launches))]


@pytest.mark.parametrize(("model", "kind"), SAMPLE)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fake_and_real_captures_agree(model: str, kind: str, batch: int) -> None:
    """Every launch is the same, or differs as the table of `trace_agreement` says."""
    found = compare(families.trace(model, kind, "cpu", batch), families.trace(model, kind, "fake", batch))

    assert () == found.differences
    assert found.num_same > 8 * len(found.explained)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize(("model", "kind"), families.STEPS)
def test_fake_and_gpu_captures_are_the_same(model: str, kind: str) -> None:
    """On a real GPU even attention is the operator that the fake one named."""
    found = compare(families.trace(model, kind, "cuda:0"), families.trace(model, kind, "fake"))

    assert ((), ()) == (found.differences, found.explained)


def test_a_lost_launch_is_a_difference() -> None:
    """The comparison can fail: a trace without one of its launches does not agree."""
    real = families.trace("tiny-llama", "decode")
    launches = (*real.launches[:20], *real.launches[21:])

    assert compare(real, dataclasses.replace(real, launches=launches)).differences


def test_a_wider_access_is_a_difference() -> None:
    """The comparison can fail: accesses are compared byte by byte."""
    real = families.trace("tiny-llama", "decode")
    changed = next(i for i, x in enumerate(real.launches) if x.accesses[0].region.num_bytes > 4)
    old = real.launches[changed]
    region = dataclasses.replace(old.accesses[0].region, item_bytes=4, dims=())
    accesses = (dataclasses.replace(old.accesses[0], region=region), *old.accesses[1:])
    launches = list(real.launches)
    launches[changed] = dataclasses.replace(old, accesses=accesses)

    assert compare(real, dataclasses.replace(real, launches=tuple(launches))).differences


@pytest.mark.parametrize(
    ("model", "kind", "layers", "launches", "weight_gb"),
    [
        ("llama-3-8b", "decode", 4, 188, 3.8),
        pytest.param("llama-3-8b", "decode", 32, 1308, 16.1, marks=pytest.mark.slow),
        pytest.param("sd3.5-medium", "denoise", 24, 2356, 4.9, marks=pytest.mark.slow),
    ],
)
def test_a_full_size_model_needs_no_memory(
    model: str, kind: str, layers: int, launches: int, weight_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Billions of parameters are recorded by name and size alone."""
    if model in catalog.LANGUAGE:
        monkeypatch.setitem(catalog.LANGUAGE[model][1], "num_hidden_layers", layers)
    trace = record_step(Step(model, kind, 1, 512), "fake")
    weights = sum(trace.buffers[b].size_bytes for b in trace.buffers_of(BufferKind.WEIGHT))

    assert launches == len(trace.launches)
    assert weight_gb == round(weights / 1e9, 1)


def test_half_precision_attention_becomes_flash() -> None:
    """Without a mask, in 16 bits, a GPU runs the flash kernel."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.to(torch.bfloat16).view(1, 2, 2, 8)
        return scaled_dot_product_attention(q, q, q)

    assert "aten._scaled_dot_product_flash_attention.default" in names(capture_fake(attend))


def test_masked_attention_becomes_efficient() -> None:
    """A boolean mask is made additive, as a CUDA build does, and the efficient kernel takes it."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 2, 2, 8)
        return scaled_dot_product_attention(q, q, q, q[..., :2] > 0)

    found = names(capture_fake(attend))

    assert ["aten.where.self", "aten.constant_pad_nd.default"] == found[3:5]
    assert "aten._scaled_dot_product_efficient_attention.default" == found[-1]


@pytest.mark.parametrize(
    ("heads", "dtype", "masked", "wanted"),
    [
        ((4, 4), torch.bfloat16, False, "flash"),
        ((4, 2), torch.bfloat16, False, "flash"),
        ((4, 4), torch.bfloat16, True, "cudnn"),
        ((4, 4), torch.float32, True, "efficient"),
        ((4, 4), torch.float32, False, "efficient"),
        ((4, 2), torch.float32, False, "math"),
        ((4, 4), torch.float64, False, "math"),
    ],
)
def test_the_target_chooses_its_attention(
    heads: tuple[int, int], dtype: torch.dtype, masked: bool, wanted: str
) -> None:
    """The choice of torch for compute capability 8.0 and above; of cuDNN's for a few queries with a mask."""
    with fake.machine():
        query, key = (torch.empty(1, h, 4, 16, dtype=dtype, device="cuda") for h in heads)
        mask = torch.empty(1, 1, 4, 4, dtype=torch.bool, device="cuda") if masked else None

        assert wanted == choose(query, key, key, mask, enable_gqa=heads[0] != heads[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_that_repeats_a_head_is_no_library_call(dtype: torch.dtype) -> None:
    """torch repeats the one key head of Falcon in its own code; the libraries refuse it."""
    with fake.machine():
        query, key = (torch.empty(1, h, 4, 16, dtype=dtype, device="cuda") for h in (4, 1))

        assert "math" == choose(query, key, key)


def test_grouped_products_of_floats_need_rows_of_16_bytes() -> None:
    """Rows of 12 floats have 48 bytes; with 16 bits they would have 24."""

    def product(x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(3, dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x @ x.new_zeros(8, 12), x.new_zeros(3, 12, 8), offs=ends)

    assert "aten._grouped_mm.default" in names(capture_fake(product))


def test_attention_on_the_cpu_is_left_alone() -> None:
    """Outside the fake GPU nothing is re-routed."""
    query = torch.zeros(1, 1, 4, 16)

    assert "math" == choose(query, query, query)


def test_a_constant_keeps_its_value() -> None:
    """A tensor made from Python values travels with a fake trace, and moving it to the GPU is no launch."""
    trace = capture_fake(lambda x: x[:, :2] + torch.tensor([1.0, 2.0]).to("cuda"))
    (constant,) = (b for b in trace.buffers if b.constant_hex)

    assert bytes.fromhex(constant.constant_hex) == torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert ["aten.add.Tensor"] == names(trace)


def test_a_constant_of_unknown_value_is_kept_by_name() -> None:
    """A fake tensor outside any module has a size and no value; the trace says so by carrying none."""

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(8, device="cuda")

    with fake.machine():
        holder = Holder()
        x = {"x": torch.empty(4, 8, device="cuda")}
        workload = Workload(
            Step("made", "decode", 1, 1), holder, lambda i, s: {"y": i["x"] + holder.table},
            lambda seed: {}, lambda seed: {}, lambda first, run, last: {},
        )  # fmt: skip
        trace = Recordings(workload, "fake").record(x, {})[0]
    (constant,) = (b for b in trace.buffers if b.name.startswith("constant."))

    assert (32, "") == (constant.size_bytes, constant.constant_hex)


def test_a_shape_that_depends_on_values_is_refused() -> None:
    """nonzero of an input has another shape for every request: the line, and what to do."""
    with pytest.raises(CaptureError, match=r"test_fake\.py:\d+: aten.nonzero.*nonzero_static"):
        capture_fake(lambda x: x.nonzero())


def test_a_shape_that_depends_on_a_constant_needs_real_tensors() -> None:
    """A mask that is the same in every call could be looked at, but a fake one has no values."""
    with pytest.raises(CaptureError, match=r"test_fake\.py:\d+: aten.nonzero.*--device cpu or cuda:0"):
        capture_fake(lambda x: x[0, 0] + torch.ones(3, device=x.device).nonzero().sum())


def test_reading_a_fake_value_is_refused_with_its_line() -> None:
    """A branch on data has no answer without data."""
    with pytest.raises(CaptureError, match=r"test_fake\.py:\d+: .*on the host.*batched"):
        capture_fake(lambda x: x if x.sum() > 0 else -x)


def test_tensors_of_two_devices_are_refused_with_the_line() -> None:
    """A tensor that a model makes on the CPU, whatever its input's device."""
    with pytest.raises(CaptureError, match=r"test_fake\.py:\d+: .*two devices.*device=x\.device"):
        capture_fake(lambda x: x + torch.ones(8, device="cpu"))


def test_an_operator_without_a_fake_is_refused() -> None:
    """A custom operator must say what it returns."""
    torch.library.define("tessera_test::opaque", "(Tensor x) -> Tensor")

    with pytest.raises(CaptureError, match="register_fake"):
        capture_fake(torch.ops.tessera_test.opaque)


@pytest.mark.parametrize(("device", "words"), [("tpu", "known: cpu, cuda:N, fake"), ("cuda:x", "known")])
def test_an_unknown_device_lists_the_known(device: str, words: str) -> None:
    """A typo in --device."""
    with pytest.raises(UnknownName, match=words):
        check_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    """The message offers the fake GPU."""
    with pytest.raises(CaptureError, match=r"no CUDA device.*--device fake"):
        check_device("cuda:0")


def test_nothing_stays_fake() -> None:
    """After a fake capture tensors are real again, and so is what torch says about the GPU."""
    before = torch.cuda.get_device_capability
    with fake.machine():
        assert (8, 0) == torch.cuda.get_device_capability()

    assert before is torch.cuda.get_device_capability
    assert 3.0 == torch.ones(3).sum().item()
