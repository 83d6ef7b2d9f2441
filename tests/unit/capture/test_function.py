"""Capture of any callable: what is an input, a weight, a state and an output, found without help."""

import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.linalg import cond, eigvalsh, matrix_norm, svdvals

import tessera
from tessera.capture import record
from tessera.capture.function import FunctionWorkload, workload
from tessera.errors import CaptureError, MismatchError
from tessera.execute.reference import InOrder
from tessera.ir import BufferKind, Trace

SCALE = torch.full((4,), 3.0)


class Counter(torch.nn.Module):
    """Counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.relu(self.fc(x))


def by_kind(trace: Trace, kind: BufferKind) -> list[str]:
    """Names of the buffers of one kind, in order."""
    return [trace.buffers[b].name for b in trace.buffers_of(kind)]


def rerun(step: FunctionWorkload, *args: Any, **kwargs: Any) -> Any:
    """Another call through the step, as a worker would run it: on copies, then handed to the caller."""
    given = step.function.bind(args, kwargs)
    state = {name: t.clone() for name, t in given.state.items()}
    outputs = step.run({name: t.clone() for name, t in given.inputs.items()}, state)
    return step.function.finish(given, outputs, state)


def test_the_package_is_called_like_a_function() -> None:
    """tessera.capture is a package and a function at once."""
    trace = tessera.capture(torch.nn.Linear(4, 2), torch.ones(3, 4))

    assert (["input"], ["weight", "bias"]) == (
        by_kind(trace, BufferKind.INPUT),
        by_kind(trace, BufferKind.WEIGHT),
    )
    assert [("output", (3, 2))] == [(name, view.shape) for name, view in trace.outputs]


def test_nested_arguments_are_named_by_their_path() -> None:
    """Tensors in lists and dicts, positional and by keyword, are inputs."""

    def fn(x: torch.Tensor, cache: dict[str, list[torch.Tensor]], *, bias: torch.Tensor) -> torch.Tensor:
        return x + cache["k"][1] + bias

    trace = tessera.capture(fn, torch.ones(2), {"k": [torch.ones(2), torch.ones(2)]}, bias=torch.ones(2))

    assert ["x", "cache.k.0", "cache.k.1", "bias"] == by_kind(trace, BufferKind.INPUT)


def test_missing_names_are_invented() -> None:
    """A built-in function has no parameter names."""
    trace = tessera.capture(torch.add, torch.ones(2), torch.ones(2))

    assert ["arg0", "arg1"] == by_kind(trace, BufferKind.INPUT)


@pytest.mark.parametrize("how", ["module", "method", "closure", "partial", "argument"])
def test_modules_are_found_wherever_they_are(how: str) -> None:
    """A module's parameters are weights by name, whether it is called, closed over or passed."""
    module = torch.nn.Linear(4, 4)
    call: Callable[..., torch.Tensor] = lambda m, x: m(x)  # noqa: E731
    x = torch.ones(2, 4)
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
        "module": (module, (x,), ""),
        "method": (module.forward, (x,), ""),
        "closure": (lambda x: module(x) + 1, (x,), "module."),
        "partial": (functools.partial(call, module), (x,), "0."),
        "argument": (call, (module, x), "m."),
    }
    fn, args, prefix = found[how]

    assert [f"{prefix}weight", f"{prefix}bias"] == by_kind(tessera.capture(fn, *args), BufferKind.WEIGHT)


def test_a_global_tensor_is_a_weight() -> None:
    """What a function names as a global, it reads as a weight of that name."""
    trace = tessera.capture(lambda x: x * SCALE, torch.ones(4))

    assert ["SCALE"] == by_kind(trace, BufferKind.WEIGHT)


def test_a_mutated_buffer_is_state() -> None:
    """A buffer that the module updates is state; one it only reads is a weight."""
    trace = tessera.capture(Counter(), torch.ones(2, 4))

    assert ["calls"] == by_kind(trace, BufferKind.STATE)
    assert ["fc.weight", "fc.bias"] == by_kind(trace, BufferKind.WEIGHT)


def test_capture_leaves_everything_as_it_was() -> None:
    """Finding out what a call changes does not change it."""
    module, cache = Counter(), torch.zeros(2, 4)

    def fn(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.copy_(module(x))
        return cache + 1

    tessera.capture(fn, torch.ones(2, 4), cache)

    assert (0.0, 0.0) == (float(module.calls), float(cache.abs().sum()))


def test_a_step_is_run_again_on_other_arguments() -> None:
    """The workload runs later calls: results are returned, and state is written where the caller has it."""
    module, reference = Counter(), Counter()
    reference.load_state_dict(module.state_dict())
    step = workload(module, torch.ones(2, 4))
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))

        assert torch.equal(rerun(step, x), reference(x))
    assert 3.0 == float(module.calls)


def test_a_part_of_a_cache_is_written_in_place() -> None:
    """A strided view into a larger tensor is state, and nothing around it is touched."""

    def fn(x: torch.Tensor, cache: torch.Tensor) -> None:
        cache[:, 1] += x

    whole = torch.arange(24.0).reshape(4, 6)
    expected = whole.clone()
    expected[:, 3] += 1
    step = workload(fn, torch.ones(4), whole[:, 2:5])
    rerun(step, torch.ones(4), whole[:, 2:5])

    assert torch.equal(expected, whole)
    assert ["cache"] == by_kind(record(step), BufferKind.STATE)


def test_a_constant_that_the_call_makes_and_writes_is_made_anew() -> None:
    """Every call writes a copy; the same values elsewhere stay as they are."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        made, other = torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 3])
        part = made[1:]
        made.add_(x)
        return part.sum() * other

    step = workload(fn, torch.ones(3))
    run = InOrder([record(step)], {}, torch.device("cpu"))
    for x in (torch.ones(3), torch.arange(3.0)):
        assert torch.equal(fn(x), run(0, {"x": x}, {})["output"])


def test_a_constant_without_values_is_a_constant() -> None:
    """transformers' caches begin as `torch.tensor([])`; no weight is asked for."""
    step = workload(lambda x: torch.cat([torch.tensor([]), x]), torch.ones(3))
    run = InOrder([record(step)], {}, torch.device("cpu"))

    assert [0.0, 1.0, 2.0] == run(0, {"x": torch.arange(3.0)}, {})["output"].tolist()


class Scripted(torch.nn.Module):
    """A buffer that is changed in place, and a number."""

    total: torch.Tensor
    calls: int

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.counts, self.calls = counts, 0
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum(0)
        if self.counts:
            self.calls += 1
        return self.fc(x) + self.total if self.calls < 1000 else x


def test_a_module_of_torchscript_is_captured() -> None:
    """Its parameters are weights, its buffers state."""
    torch.manual_seed(0)
    module = torch.jit.script(Scripted(counts=False))
    x, expected = torch.randn(2, 4), torch.jit.script(copy.deepcopy(module))
    step = workload(module, x)

    assert torch.equal(expected(x), rerun(step, x))
    assert torch.equal(expected(x), rerun(step, x))
    assert {"fc.weight", "fc.bias"} == set(by_kind(record(step), BufferKind.WEIGHT))


def test_a_number_that_torchscript_counts_is_refused() -> None:
    """Its attributes are Python state too, though no Python object holds them."""
    with pytest.raises(CaptureError, match=r"the call changes 'calls'"):
        tessera.capture(torch.jit.script(Scripted(counts=True)), torch.randn(2, 4))


def test_one_tensor_passed_twice_is_told_from_two_views_of_it() -> None:
    """By the program, by torch (self-attention in one product), and by later calls."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a if a is b else a + b

    x = torch.ones(4)
    step = workload(fn, x, x[:])

    assert torch.equal(x + x, rerun(step, x, x[:]))
    with pytest.raises(MismatchError):
        rerun(step, x, x)


def test_self_attention_of_torch_is_captured_as_it_runs() -> None:
    """Its one operator asks whether query, key and value are the same tensor."""
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 4, 8)
    step = workload(lambda x: attention(x, x, x, need_weights=False)[0], x)
    trace = record(step)
    with torch.no_grad():
        expected = attention(x, x, x, need_weights=False)[0]

    assert ["aten._native_multi_head_attention.default"] == [kernel.name for kernel in trace.kernels]
    run = InOrder([trace], step.weights(), torch.device("cpu"))
    assert torch.equal(expected, run(0, {"x": x}, {})["output"])


def test_threads_record_one_after_the_other() -> None:
    """What a recording replaces in torch is what it was when both have ended."""
    to_dlpack, has_begun, has_ended = vars(torch)["to_dlpack"], threading.Event(), threading.Event()

    def first(x: torch.Tensor) -> torch.Tensor:
        has_begun.set()
        return x + float(not has_ended.wait(0.05))

    def second(x: torch.Tensor) -> torch.Tensor:
        has_ended.set()
        return x + 1

    with ThreadPoolExecutor() as pool:
        recorded = pool.submit(tessera.capture, first, torch.ones(2))
        has_begun.wait()
        tessera.capture(second, torch.ones(2))
        assert recorded.result().launches

    assert vars(torch)["to_dlpack"] is to_dlpack


def test_threads_that_record_one_module_leave_its_state_as_it_was() -> None:
    """One at a time finds, changes and puts back what the module holds."""
    waits = threading.Event()

    class Slow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("count").add_(1)
            waits.wait(0.002)
            return x + self.get_buffer("count")

    slow = Slow()
    with ThreadPoolExecutor(2) as pool:
        recorded = [pool.submit(tessera.capture, slow, torch.ones(2)) for _ in range(8)]
        assert len({recording.result().launches for recording in recorded}) == 1

    assert torch.equal(torch.zeros(2), slow.get_buffer("count"))


def test_arguments_that_share_memory_are_one_buffer() -> None:
    """What is written through one view is read through the other."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return b + 1

    x = torch.ones(8)
    step = workload(fn, x[:6], x[2:])

    assert ["a"] == by_kind(record(step), BufferKind.STATE)
    assert torch.equal(torch.tensor([3.0, 3, 3, 3, 2, 2]), rerun(step, x[:6], x[2:]))
    assert torch.equal(torch.tensor([2.0] * 6 + [1.0] * 2), x)


def test_results_keep_their_structure_strides_and_aliases() -> None:
    """A nest of results comes back as the call gives it: views of one storage, arguments, plain values."""

    def fn(x: torch.Tensor) -> dict[str, Any]:
        y = x * 2
        return {"y": y, "columns": y.t(), "wide": y[:1].expand(3, 4), "same": x, "rows": x[1:], "n": 7}

    x = torch.randn(2, 4)
    got, expected = rerun(workload(fn, x), x), fn(x)

    for name in ("y", "columns", "wide", "rows"):
        assert torch.equal(expected[name], got[name]), name
        assert expected[name].stride() == got[name].stride(), name
    assert got["y"].data_ptr() == got["columns"].data_ptr()
    assert got["same"] is x
    assert got["rows"].data_ptr() == x[1:].data_ptr()
    assert 7 == got["n"]


def test_another_shape_is_another_step() -> None:
    """Binding arguments that are laid out otherwise, or another plain value, is refused."""
    step = workload(lambda x, n: x * n, torch.ones(4), 2)

    for args in ((torch.ones(5), 2), (torch.ones(4), 3), (torch.ones(8)[::2], 2)):
        with pytest.raises(MismatchError):
            step.function.bind(args, {})


def test_replacing_a_buffer_is_refused_by_name() -> None:
    """State that is exchanged instead of changed would be lost between steps."""

    class Replaces(Counter):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return torch.relu(self.fc(x))

    module = Replaces()
    with pytest.raises(
        CaptureError, match=r"test_function\.py:\d+: .* replaces the tensor 'calls'.*in place"
    ):
        tessera.capture(module, torch.ones(2, 4))
    assert 0.0 == float(module.calls)


def test_a_cache_that_grows_is_refused_by_name() -> None:
    """A list that the call appends to is no state that a step could hand on."""

    def fn(x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(x * 2)
        return x + 1

    with pytest.raises(CaptureError, match=r"'seen\.0'"):
        tessera.capture(fn, torch.ones(2), [])


def test_changing_what_only_a_closure_holds_is_refused() -> None:
    """Nothing could hand such a tensor to a worker and back."""
    total = torch.zeros(2)

    with pytest.raises(CaptureError, match=r"'total' is changed.*register_buffer"):
        tessera.capture(lambda x: total.add_(x) * 2, torch.ones(2))
    assert 0.0 == float(total.sum())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.conj() * x,
        lambda x: x.mH @ x,
        lambda x: x.conj().imag + 0,
        lambda x: torch.stack([x.conj(), x]),
        lambda x: torch.zeros_like(x).copy_(x.conj()),
        lambda x: x.clone().conj().mul_(2) + 0,
        lambda x: torch.linalg.solve_triangular(x.mH, x, upper=False),
        lambda x: svdvals(x) + cond(x) + matrix_norm(x, "nuc"),
        lambda x: eigvalsh(x @ x.mH) + torch.linalg.svd(x)[1],
        lambda x: torch.vmap(svdvals)(x[None])[0],
    ],
)
def test_complex_matrices_are_computed_as_torch_does(fn: Any) -> None:
    """Torch conjugates by a flag that decides its algorithm; whether vectors are needed decides it too,
    by whatever name a function is called.
    """
    x = torch.randn(6, 6, dtype=torch.complex64)
    run = InOrder([record(workload(fn, torch.randn_like(x)))], {}, torch.device("cpu"))
    result = run(0, {"x": x}, {})["output"]

    assert (fn(x).stride(), True) == (result.stride(), torch.equal(fn(x), result))


def test_rows_that_meet_one_matrix_are_multiplied_as_torch_does() -> None:
    """While operators are seen, torch folds them into one product, with other last bits."""
    trace = tessera.capture(torch.matmul, torch.randn(3, 7, 8), torch.randn(1, 8, 5))

    assert ["aten.bmm.default"] == [kernel.name for kernel in trace.kernels]


def test_complex_numbers_are_arguments() -> None:
    """Plain numbers of Python, also with zeros of either sign."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2j + complex(-0.0, 1.5) * torch.full_like(x, 1 - 3j)

    x = torch.randn(3, dtype=torch.complex64)
    step = workload(fn, x)
    run = InOrder([record(step)], {}, torch.device("cpu"))

    assert torch.equal(fn(x), run(0, {"x": x}, {})["output"])


@pytest.mark.parametrize("fn", [lambda x: (x * 2).conj(), lambda x: x.conj()])
def test_a_flag_of_conjugation_that_would_be_lost_is_refused(fn: Any) -> None:
    """In a result; the remedy resolves it."""
    with pytest.raises(CaptureError, match=r"conjugated by a flag.*resolve_conj\(\)"):
        tessera.capture(fn, torch.randn(3, dtype=torch.complex64))


def test_a_conjugated_argument_is_another_step() -> None:
    """Its bytes are not its values."""
    x = torch.randn(3, dtype=torch.complex64)
    with pytest.raises(MismatchError, match="laid out differently"):
        rerun(workload(lambda x: x * 2, x), x.conj())


def test_undeclared_writes_of_batch_norm_are_refused_before_they_happen() -> None:
    """Torch's schema of training batch norm hides that it writes; the line is named, nothing is changed."""
    norm = torch.nn.BatchNorm1d(4)

    with pytest.raises(CaptureError, match=r"test_function\.py:\d+: .*running statistics.*eval\(\)"):
        tessera.capture(norm, torch.randn(3, 4))
    assert 0.0 == float(norm.running_mean.abs().sum() if norm.running_mean is not None else 1)


def test_resizing_an_argument_is_refused() -> None:
    """The memory of an argument is the caller's."""
    with pytest.raises(CaptureError, match="changes the shape or memory of 'x'"):
        tessera.capture(lambda x: x.unsqueeze_(0) + 1, torch.ones(2))


@pytest.mark.parametrize(
    "use", [lambda y, x: y.resize_(x.shape).copy_(x), lambda y, x: torch.add(x, 1, out=y)]
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_memory_that_grows_is_refused(use: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_function\.py:\d+: a tensor's memory grows.*new tensor"):
        tessera.capture(lambda x: use(torch.empty(1), x), torch.randn(4, 4))


def test_a_sparse_argument_is_refused_by_name() -> None:
    """Only dense memory can be placed."""
    with pytest.raises(CaptureError, match="'x' is a sparse_coo tensor"):
        tessera.capture(lambda x: x * 2, torch.eye(3).to_sparse())


def test_tied_weights_are_one_buffer() -> None:
    """Two names of one tensor are one weight."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight

    assert ["0.weight", "0.bias", "1.bias"] == by_kind(
        tessera.capture(module, torch.ones(2, 4)), BufferKind.WEIGHT
    )


@pytest.mark.parametrize(
    ("fn", "x"), [(lambda x: x + 1, torch.zeros(0, 0)), (lambda x: x > torch.nan, torch.randn(3))]
)
def test_tensors_without_elements_and_nan_are_recorded(fn: Any, x: torch.Tensor) -> None:
    """Strides of no elements say nothing; a NaN is the same number in every call."""
    assert torch.equal(fn(x), rerun(workload(fn, x), x))
    assert tessera.capture(fn, x).launches
