"""Timers: what is fed to a launch, what timing leaves unchanged, and what is told apart."""

import functools
import gc
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import fake_cuda
from profile_factories import TraceMaker
from tessera.capture import Workload, build, record
from tessera.capture.record import capture
from tessera.errors import CannotTime, DeviceGone
from tessera.execute import timing
from tessera.execute.cuda.timing import CudaTimer
from tessera.execute.launcher import Launcher
from tessera.execute.memory import tensor_of
from tessera.execute.timing import CpuTimer, MakeTensors, StepMemory, copies_needed, synthetic, threads
from tessera.flow import UnitRequest, run_reference
from tessera.ir import Buffer, BufferKind, Step, Trace, WorkUnit

CPU = torch.device("cpu")
WARM: frozenset[int] = frozenset()


def once(samples: object, seconds: float) -> bool:
    """One round is enough."""
    return True


@functools.cache
def step() -> tuple[Workload, Trace]:
    """A decode step of the tiny Llama."""
    workload = build(Step("tiny-llama", "decode", 2, 16))
    return workload, record(workload)


def tensors() -> dict[str, torch.Tensor]:
    """Its weights, inputs and state."""
    workload, _ = step()
    return {**workload.weights(), **workload.make_inputs(0), **workload.make_state(0)}


def own() -> MakeTensors:
    """Given once and for all."""
    given = tensors()
    return lambda: (given, ())


def nothing() -> MakeTensors:
    """The model cannot be built."""
    return lambda: (None, ("tensors were made up",))


def test_every_launch_of_a_step_can_be_timed_on_the_cpu() -> None:
    """In program order, each on the step's own tensors, all above zero."""
    _, trace = step()
    timer = CpuTimer(trace, own())
    for launch in range(len(trace.launches)):
        assert min(timer.time(launch, WARM, once)) > 0
        timer.run(launch)


def test_timing_changes_nothing_that_later_launches_read() -> None:
    """A counter that is timed many times and run once has been counted up once."""
    counter = torch.zeros(4)
    trace = capture(lambda x: x.add_(1.0), counter)
    name = next(b.name for b in trace.buffers if b.kind is BufferKind.STATE)
    timer = CpuTimer(trace, lambda: ({name: counter}, ()))
    samples = timer.time(0, WARM, lambda found, seconds: len(found) >= 20)
    timer.run(0)
    (memory,) = timer._memory.copies(0, WARM, 1)

    view = next(v for v in trace.launches[0].outputs if v is not None)
    assert [1.0] * 4 == tensor_of(memory.get(view.buffer), view).tolist()
    assert ([0.0] * 4, True) == (counter.tolist(), len(samples) >= 20)


def test_without_the_models_tensors_launches_get_made_up_ones() -> None:
    """Every launch of the step still runs, indices and all, and the timer says so."""
    _, trace = step()
    timer = CpuTimer(trace, nothing())
    for launch in range(len(trace.launches)):
        assert min(timer.time(launch, WARM, once)) > 0

    assert ("tensors were made up",) == timer.remarks


def test_several_threads_are_timed_beside_a_process_that_ends_with_the_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker of a GPU polls beside a host's threads; times without it are kept apart."""
    started, plain = list[subprocess.Popen[bytes]](), timing._neighbour

    def neighbour() -> subprocess.Popen[bytes]:
        started.append(plain())
        return started[-1]

    monkeypatch.setattr(timing, "_neighbour", neighbour)
    one, two = CpuTimer(step()[1], own()), CpuTimer(step()[1], own(), 2)

    assert one.identity() != two.identity()
    (process,) = started
    assert process.poll() is None
    del two
    gc.collect()
    assert process.poll() is not None


def test_a_whole_step_needs_the_models_tensors() -> None:
    """Made-up ones cannot be chained: a computed index may lead anywhere."""
    with pytest.raises(CannotTime, match="own inputs are not there"):
        CpuTimer(step()[1], nothing()).whole(once)


def test_a_whole_step_is_timed_on_the_cpu() -> None:
    """All launches in a row take longer than none."""
    assert min(CpuTimer(step()[1], own()).whole(once)) > 0


def test_a_launch_that_raises_is_named_and_the_others_go_on() -> None:
    """An operator that the CPU lacks is no operator that stops the rest."""
    make = TraceMaker()
    x, y = make.tensor((4, 4), "float32"), make.tensor((4, 4), "float32")
    make.launch("aten.no_such_operator.default", (x,), y)
    make.launch("aten.relu.default", (y,), make.tensor((4, 4), "float32"))
    timer = CpuTimer(make.done(), nothing())

    with pytest.raises(CannotTime, match=r"no operator aten.no_such_operator.default"):
        timer.time(0, WARM, once)
    assert min(timer.time(1, WARM, once)) > 0


@pytest.mark.parametrize(("num", "largest"), [(10, 3), (1, 0)])
def test_made_up_indices_stay_inside_what_they_index(num: int, largest: int) -> None:
    """Embedding rows of a table of 10 by 4, or of its only row."""
    make = TraceMaker()
    table, rows = make.tensor((num, 4), "float32"), make.tensor((100,), "int64")
    make.launch("aten.embedding.default", (table, rows), make.tensor((100, 4), "float32"))
    memory = synthetic(make.done(), 0, CPU)

    found = tensor_of(memory.get(rows.buffer), rows)
    assert (0, largest) == (int(found.min()), int(found.max()))


def test_lengths_are_not_synthetic() -> None:
    """A wrong sequence length reads past the end, so the operator is refused."""
    make = TraceMaker()
    make.launch(
        "aten._flash_attention_forward.default",
        (make.tensor((8, 2, 16)), make.tensor((4,), "int32")),
        make.tensor((8, 2, 16)),
    )

    with pytest.raises(CannotTime, match="are lengths or tables"):
        synthetic(make.done(), 0, CPU)


def test_copies_of_cold_buffers_push_one_another_out() -> None:
    """A small buffer needs many copies, one larger than the cache few, none at all none."""
    _, trace = step()
    buffers = tuple(replace(b, size_bytes=n) for b, n in zip(trace.buffers, (1000, 5000), strict=False))
    sized = replace(trace, buffers=buffers)

    assert (1, 3, 2) == (
        copies_needed(sized, WARM, 1000, 16),
        copies_needed(sized, frozenset({0}), 1000, 16),
        copies_needed(sized, frozenset({1}), 1000, 16),
    )


def test_cold_buffers_are_another_copy_each_time_and_warm_ones_are_not() -> None:
    """The weight of a product is cold, its rows are warm."""
    make = TraceMaker()
    rows, weight = make.tensor((2, 4), "float32"), make.tensor((4, 4), "float32")
    make.launch("aten.mm.default", (rows, weight), make.tensor((2, 4), "float32"))
    make.buffers[weight.buffer] = Buffer("w", BufferKind.WEIGHT, 64)
    trace = make.done()
    walk = StepMemory(trace, Launcher(trace, CPU), CPU, None)
    copies = walk.copies(0, frozenset({weight.buffer}), 3)

    assert 3 == len({m.get(weight.buffer).data_ptr() for m in copies})
    assert 1 == len({m.get(rows.buffer).data_ptr() for m in copies})


# On a pretended GPU ---------------------------------------------------------------------------------------


def test_what_a_graph_costs_to_start_is_no_part_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of one and of many launches are told apart by the launches alone."""
    fake_cuda.install(monkeypatch, cost_us=5.0, start_us=40.0)
    timer = CudaTimer(step()[1], 0, own())

    assert {5.0} == {round(us, 6) for us in timer.time(0, WARM, once)}


def test_the_whole_step_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of all launches and one start."""
    fake_cuda.install(monkeypatch, cost_us=5.0, start_us=40.0)
    trace = step()[1]

    samples = CudaTimer(trace, 0, own()).whole(once)
    assert {40.0 + 5.0 * len(trace.launches)} == {round(us, 6) for us in samples}


def test_the_clock_is_read_off_a_kernel_that_counts_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles over microseconds are megahertz."""
    cuda = fake_cuda.install(monkeypatch)
    timer = CudaTimer(step()[1], 0, own())
    cuda.mhz = 1234.0

    assert 1234.0 == pytest.approx(timer.clock_mhz())


def refused(prepare: Callable[[fake_cuda.FakeCuda], None], monkeypatch: pytest.MonkeyPatch) -> CudaTimer:
    """A timer of a GPU on which launch 3 goes wrong in some way."""
    cuda = fake_cuda.install(monkeypatch)
    timer = CudaTimer(step()[1], 0, own())
    for launch in range(3):
        timer.run(launch)
    prepare(cuda)
    return timer


def test_a_launch_that_waits_for_the_host_is_refused_before_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would break the capture and what comes after."""
    timer = refused(lambda cuda: cuda.host_readers.add(3), monkeypatch)

    with pytest.raises(CannotTime, match="synchronizing"):
        timer.time(3, WARM, once)


def test_a_capture_that_breaks_is_one_launch_lost_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch is timed."""
    timer = refused(lambda cuda: cuda.broken.add(3), monkeypatch)

    with pytest.raises(CannotTime, match="not permitted when stream is capturing"):
        timer.time(3, WARM, once)
    timer.run(3)
    assert {5.0} == {round(us, 6) for us in timer.time(4, WARM, once)}


def test_a_device_that_is_gone_is_told_from_a_launch_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """When even waiting for it fails, nothing more can be timed there."""

    def lose(cuda: fake_cuda.FakeCuda) -> None:
        cuda.broken.add(3)
        cuda.is_lost = True

    timer = refused(lose, monkeypatch)

    with pytest.raises(DeviceGone, match="stopped answering"):
        timer.time(3, WARM, once)


def test_running_out_of_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is priced by the next source; the device goes on."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    fake_cuda.install(monkeypatch)
    timer = CudaTimer(step()[1], 0, own())
    monkeypatch.setattr(StepMemory, "copies", full)

    with pytest.raises(CannotTime, match="ran out of memory: CUDA out of memory"):
        timer.time(0, WARM, once)


def test_a_reference_run_gives_the_threads_back() -> None:
    """It computes on one thread, as workers do; what runs after it has as many as before."""
    used: list[int] = []

    class Counting(UnitRequest):
        def state(self) -> dict[str, torch.Tensor]:
            used.append(torch.get_num_threads())
            return {}

    with threads(3):
        run_reference(WorkUnit((), ()), Counting((), {}, 0))
        used.append(torch.get_num_threads())

    assert [1, 3] == used
