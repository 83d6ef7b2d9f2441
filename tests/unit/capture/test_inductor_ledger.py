"""The ledger and the operators that compiled code dispatches."""

import pytest
import torch

from tessera.capture.inductor import ExternCalls, StepTracer, _compiles_groups, scoped
from tessera.capture.operators import whole_buffers
from tessera.capture.recorder import Ledger
from tessera.errors import CaptureError
from tessera.ir import BufferKind, Kernel, Launch, Origin, Step

STEP = Step("made", "decode", 1, 1)


def test_an_allocation_is_a_buffer_and_no_launch() -> None:
    """Memory that nobody has written holds nothing."""
    ledger = Ledger()
    with ExternCalls(ledger):
        torch.empty_strided((4,), (1,))

    assert [] == ledger.launches
    assert {0} == ledger.empty


def test_an_out_argument_is_overwritten() -> None:
    """mm(out=) reads its factors and only writes its result."""
    ledger, a, out = Ledger(), torch.ones(4, 4), torch.empty(4, 4)
    ledger.declare(BufferKind.INPUT, {"a": a})
    with ExternCalls(ledger):
        torch.mm(a, a, out=out)
    (launch,) = ledger.launches

    assert [(0, True, False), (0, True, False), (1, False, True)] == [
        (x.buffer, x.read, x.write) for x in launch.accesses
    ]
    assert set() == ledger.empty


def test_a_view_is_no_launch() -> None:
    """Slicing moves no bytes."""
    ledger, a = Ledger(), torch.ones(4, 4)
    ledger.declare(BufferKind.INPUT, {"a": a})
    with ExternCalls(ledger):
        _ = a[1:]

    assert [] == ledger.launches


def test_reading_a_value_on_the_host_is_refused() -> None:
    """What runs would depend on it."""
    with pytest.raises(CaptureError, match="on the host"), ExternCalls(Ledger()):
        torch.ones(1).item()


def test_an_argument_that_is_conjugated_by_a_flag_is_refused() -> None:
    """Its bytes are other values."""
    ledger, a = Ledger(), torch.ones(2, 2, dtype=torch.complex64)
    ledger.declare(BufferKind.INPUT, {"a": a})
    with (
        pytest.raises(CaptureError, match=r"an argument of aten\.mm.* conjugated by a flag"),
        ExternCalls(ledger),
    ):
        torch.mm(a.mH, a)


@pytest.mark.skipif(_compiles_groups(torch.float32), reason="this torch compiles them")
def test_experts_that_torch_does_not_compile_are_refused_by_their_type() -> None:
    """Grouped products of 32 bits."""
    with pytest.raises(CaptureError, match=r"experts in float32 cannot be compiled.*bfloat16"), StepTracer():
        torch._grouped_mm(torch.ones(4, 16), torch.ones(2, 16, 16), offs=torch.ones(2, dtype=torch.int32))


def test_draws_change_the_state_of_their_generator() -> None:
    """So the second waits for the first."""
    ledger = Ledger()
    with ExternCalls(ledger):
        torch.rand(3)
        torch.rand(3)
    found = [ledger.buffers[a.buffer] for x in ledger.launches for a in x.accesses if a.read and a.write]

    assert ["rng:cpu", "rng:cpu"] == [b.name for b in found]
    assert all(b.is_generator for b in found)


def test_two_names_for_one_memory_are_refused() -> None:
    """A weight that is also an input could not be placed."""
    ledger, a = Ledger(), torch.ones(4)
    ledger.declare(BufferKind.WEIGHT, {"a": a})

    with pytest.raises(CaptureError, match="shares its memory"):
        ledger.declare(BufferKind.INPUT, {"b": a[1:]})


def test_a_large_tensor_nobody_declared_is_refused() -> None:
    """It is no constant that a trace could carry."""
    with pytest.raises(CaptureError, match="register_buffer"):
        Ledger().declare_constant(torch.zeros(1 << 20))


def test_an_output_nobody_made_is_refused() -> None:
    """A step returns results of its launches."""
    with pytest.raises(CaptureError, match="no launch made"):
        Ledger().trace(STEP, {"y": torch.ones(1)})


def test_scope_is_the_module_of_a_weight_of_its_own() -> None:
    """A weight that several launches read says nothing; a launch without one follows the one before."""
    ledger = Ledger()
    tables, own, x = torch.ones(4), torch.ones(4), torch.ones(4)
    ledger.declare(BufferKind.WEIGHT, {"rotary.table": tables, "layers.0.up.weight": own})
    ledger.declare(BufferKind.INPUT, {"x": x})
    with ExternCalls(ledger):
        a = torch.add(x, own)
        b = torch.mul(a, tables)
        c = torch.sub(b, tables)
    trace = scoped(ledger.trace(STEP, {"c": c}))

    assert ["layers.0.up"] * 3 == [launch.scope for launch in trace.launches]


def test_an_unproved_launch_may_write_all_but_weights() -> None:
    """Weights are written only where the compiler says so."""
    ledger, weight, x = Ledger(), torch.ones(4), torch.ones(4)
    ledger.declare(BufferKind.WEIGHT, {"w": weight})
    ledger.declare(BufferKind.INPUT, {"x": x})
    number = ledger.kernel(Kernel("k", Origin.TRITON))
    launch = Launch(number, (ledger.arg(weight), ledger.arg(x[2:]), 3), (), (), ())
    found = whole_buffers(launch, ledger.buffers, frozenset())

    assert [(0, 16, False), (1, 16, True)] == [(a.buffer, a.region.num_bytes, a.write) for a in found]
