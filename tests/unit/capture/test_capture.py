"""Capture: what a model launched, told from views, in-place updates and undeclared aliases."""

from collections.abc import Callable

import pytest
import torch

import models
from sampling import num_layers
from tessera.capture import Workload, build, known_models, record
from tessera.errors import CaptureError, UnknownName
from tessera.ir import BufferKind, Step, Trace, arg_views

Fn = Callable[[torch.Tensor], torch.Tensor]


def capture(fn: Fn, module: torch.nn.Module | None = None) -> Trace:
    """The trace of a function of one 4 x 8 tensor."""
    return record(
        Workload(
            Step("made", "decode", 1, 1),
            module or torch.nn.Module(),
            lambda inputs, state: {"y": fn(inputs["x"])},
            lambda seed: {"x": torch.arange(32.0).reshape(4, 8)},
            lambda seed: {},
            lambda first, run, last: dict(first),
        )
    )


def names(trace: Trace) -> list[str]:
    """Kernel names in order."""
    return [trace.kernel_of(i).name for i in range(len(trace.launches))]


def test_views_are_not_launches() -> None:
    """Transposing, slicing and reshaping move no bytes."""
    trace = capture(lambda x: x.t()[2:6].reshape(4, 4) + 1)

    assert ["aten.add.Tensor"] == names(trace)[-1:]
    assert trace.num_views >= 2


def test_a_slice_is_recorded_byte_exactly() -> None:
    """Reading columns 2 to 4 of a 4 x 8 float matrix touches 8 bytes in each of 4 rows."""
    trace = capture(lambda x: x[:, 2:4] + 1)
    read = trace.launches[0].accesses[0]

    assert (8, 8, ((4, 32),)) == (read.region.start, read.region.item_bytes, read.region.dims)
    assert read.read
    assert not read.write


def test_an_in_place_update_reads_and_writes() -> None:
    """x.add_(1) needs what was there before."""
    trace = capture(lambda x: x.clone().add_(1))
    access = trace.launches[1].accesses[0]

    assert (True, True) == (access.read, access.write)


def test_an_overwrite_does_not_read() -> None:
    """zero_ and copy_ do not depend on the old contents."""
    trace = capture(lambda x: x.clone().zero_())
    access = trace.launches[1].accesses[0]

    assert (False, True) == (access.read, access.write)


def test_an_alias_the_schema_hides_is_found() -> None:
    """_unsafe_view shares memory without declaring it, so it must not count as a launch."""
    trace = capture(lambda x: torch.ops.aten._unsafe_view(x * 2, [32]) + 1)

    assert ["aten.mul.Tensor", "aten.add.Tensor"] == names(trace)
    read = trace.launches[1].accesses[0].buffer
    assert trace.launches[0].accesses[-1].buffer == read


def test_memory_used_again_is_another_buffer() -> None:
    """A freed temporary and its successor at the same address are told apart."""

    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x * 2
        return x

    trace = capture(many)

    assert 20 == len({launch.accesses[-1].buffer for launch in trace.launches})


def test_the_modules_path_is_kept() -> None:
    """A launch knows which module it came from."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    trace = capture(module, module)

    assert ["0", "1"] == [launch.scope for launch in trace.launches]


def test_a_python_constant_travels_with_the_trace() -> None:
    """A tensor made from Python values is carried, since nothing else could make it again."""
    trace = capture(lambda x: x + torch.tensor([1.0, 2.0]).repeat(4))
    (constant,) = (b for b in trace.buffers if b.constant_hex)

    assert bytes.fromhex(constant.constant_hex) == torch.tensor([1.0, 2.0]).numpy().tobytes()


def test_reading_a_value_on_the_host_is_refused_with_its_line() -> None:
    """A branch on data would make the trace a lie for other data."""
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: .*on the host"):
        capture(lambda x: x + 1 if x.sum().item() > 0 else x)


def test_a_large_unregistered_tensor_is_refused() -> None:
    """A weight outside any module would be missing when the plan is run."""
    table = torch.ones(1 << 20)

    with pytest.raises(CaptureError, match="register_buffer"):
        capture(lambda x: x + table[:8])


def test_an_unknown_model_answers_with_the_known_ones() -> None:
    """A typo in a model's name lists what there is."""
    with pytest.raises(UnknownName, match=r"unknown model 'tiny-lama'; known: .*tiny-llama"):
        build(Step("tiny-lama", "decode", 1, 8))


def test_an_unknown_step_answers_with_the_models_own() -> None:
    """A Llama does not denoise."""
    with pytest.raises(UnknownName, match="known: call, decode, prefill, tokens"):
        build(Step("tiny-llama", "denoise", 1, 8))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_real_model_is_captured_whole(kind: str) -> None:
    """Weights, inputs, state and outputs of a Llama step are all found by name."""
    trace = models.trace(kind)
    by_kind = {k: {trace.buffers[b].name for b in trace.buffers_of(k)} for k in BufferKind}

    assert {"tokens", "positions"} <= by_kind[BufferKind.INPUT]
    num = num_layers()
    assert {f"{part}.{i}" for part in ("keys", "values") for i in range(num)} == by_kind[BufferKind.STATE]
    assert f"model.layers.{num - 1}.mlp.down_proj.weight" in by_kind[BufferKind.WEIGHT]
    assert ["logits", "next_tokens"] == [name for name, _ in trace.outputs]


def test_every_state_buffer_is_updated_and_read() -> None:
    """Each layer writes its keys and values once and reads them back."""
    trace = models.trace("decode")
    for buffer in trace.buffers_of(BufferKind.STATE):
        touching = [a for x in trace.launches for a in x.accesses if a.buffer == buffer]

        assert any(a.write for a in touching)
        assert any(a.read and not a.write for a in touching)


def test_the_same_step_gives_the_same_trace() -> None:
    """Capture is deterministic, so that costs can refer to a trace by its digest."""
    assert models.trace("decode").digest == record(models.workload("decode")).digest


def test_every_argument_tensor_is_an_access() -> None:
    """No tensor that a launch is given escapes the dependency analysis."""
    trace = models.trace("prefill")
    for launch in trace.launches:
        given = {v.buffer for a in (*launch.args, *(x for _, x in launch.kwargs)) for v in arg_views(a)}

        assert given <= {a.buffer for a in launch.accesses}


def test_rows_decode_as_if_alone() -> None:
    """Rows of one batch at different positions give what each gives in a batch of its own."""
    both, alone = models.workload("decode", 2), models.workload("decode", 1)
    inputs, state = both.make_inputs(3), both.make_state(3)
    row = {name: t[1:2].clone() for name, t in inputs.items()}
    row_state = {name: t[1:2].clone() for name, t in state.items()}

    torch.testing.assert_close(both.run(inputs, state)["logits"][1:2], alone.run(row, row_state)["logits"])


def test_decoding_after_prefill_agrees_with_the_models_own_forward() -> None:
    """Prefill then decode gives the logits of one long forward pass of the Hugging Face model."""
    prefill, decode = models.workload("prefill"), models.workload("decode")
    inputs, state = prefill.make_inputs(5), prefill.make_state(5)
    inputs["last"] = torch.full_like(inputs["last"], models.PROMPT - 1)
    outputs = prefill.run(inputs, state)
    step = decode.follow(inputs, 0, outputs)
    decoded = decode.run(step, state)["logits"]
    with torch.no_grad():
        whole = prefill.module(input_ids=torch.cat([inputs["tokens"], step["tokens"]], 1)).logits[:, -1]

    torch.testing.assert_close(decoded, whole, rtol=1e-4, atol=1e-4)


def test_every_built_in_model_says_its_steps() -> None:
    """The list that an error message and the help show."""
    assert known_models()["tiny-llama"] == ("prefill", "decode")
