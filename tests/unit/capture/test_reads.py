"""No value of a request is read on the host unseen: each way is refused with its line, or the runs differ."""

import copy
import cProfile
import ctypes
import datetime
import functools
import io
import itertools
import math
import operator
import os
import pickle
import queue
import random
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor_split
from torch.nn.functional import one_hot
from torch.utils import dlpack

import tessera
from tessera.capture import record_step
from tessera.capture.function import workload
from tessera.capture.reads import calls_refused, reads_allowed
from tessera.errors import CaptureError, MismatchError
from tessera.ir import Step

X = torch.arange(8.0) - 3
Read = Callable[[Any], Any]
TOLIST, TO_DLPACK = torch.Tensor.tolist, dlpack.to_dlpack  # type: ignore[attr-defined]
HERE = r"test_reads\.py:\d+: "


def saved(x: torch.Tensor) -> float:
    """A sum, by way of a file."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return float(torch.load(file).sum())


def swallowed(x: torch.Tensor) -> float:
    """The read fails while recording, and the program has a way round it."""
    try:
        return float(x.sum())
    except Exception:  # noqa: BLE001  # as programs do
        return 1.0


# Ways to a number that depends on a tensor of eight.
NUMBERS: dict[str, Read] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: 2.0 if x.sum() > 1 else 3.0,
    "index": lambda x: operator.index(x.sum().long()),
    "complex": lambda x: complex(x.sum()).real,
    "math": lambda x: math.floor(x.sum()),
    "range": lambda x: len(range(x.abs().sum().long())),
    "iteration": lambda x: sum(float(v) for v in x),
    "max": lambda x: float(max(x)),
    "contains": lambda x: 2.0 if 3.0 in x else 3.0,
    "numpy": lambda x: float(x.numpy().sum()),
    "asarray": lambda x: float(np.asarray(x).sum()),
    "ufunc": lambda x: float(np.exp(x.sum())),
    "np.float32": lambda x: float(np.float32(x[0])),
    "memoryview": lambda x: memoryview(x.numpy())[0],
    "tolist": lambda x: x.tolist()[0],
    "dlpack": lambda x: float(np.from_dlpack(x).sum()),
    "to_dlpack": lambda x: float(dlpack.to_dlpack(x) is None),  # type: ignore[attr-defined]
    "data_ptr": lambda x: ctypes.c_float.from_address(x.data_ptr()).value,
    "storage": lambda x: ctypes.c_float.from_address(x.untyped_storage().data_ptr()).value,
    "storage item": lambda x: x.untyped_storage()[0],
    "storage list": lambda x: x.untyped_storage().tolist()[0],
    "repr": lambda x: len(repr(x)),
    "str": lambda x: len(str(x)),
    "format": lambda x: len(f"{x}"),
    "percent": lambda x: len("%s" % x),  # noqa: UP031
    "equal": lambda x: 2.0 if torch.equal(x, x.abs()) else 3.0,
    "allclose": lambda x: 2.0 if torch.allclose(x, x.abs()) else 3.0,
    "is_nonzero": lambda x: 2.0 if torch.is_nonzero(x[0]) else 3.0,
    "deepcopy": lambda x: float(copy.deepcopy(x).sum()),
    "copy": lambda x: float(copy.copy(x).sum()),
    "pickle": lambda x: float(pickle.loads(pickle.dumps(x)).sum()),
    "save": saved,
    "swallowed": swallowed,
    "a method kept from before": lambda x: 2.0 if TOLIST(x)[0] > 1e9 else 3.0,
    "a method of torch's base class": lambda x: 2.0 if torch._C.TensorBase.numpy(x)[0] > 1e9 else 3.0,
    "a function kept from before": lambda x: float(TO_DLPACK(x) is None),
    "number of nonzero": lambda x: x.nonzero().shape[0],
}
# Ways to a tensor that holds, or has a shape by, what was read.
TENSORS: dict[str, Read] = {
    "torch.tensor": lambda x: torch.tensor([x.sum(), 1.0]),
    "as_tensor": lambda x: torch.as_tensor([x[0], x[1]]),
    "new_tensor": lambda x: x.new_tensor([x[0], 2]),
    "legacy": lambda x: torch.FloatTensor([x[0], 2]),
    "full": lambda x: torch.full((8,), x[0]),
    "arange": lambda x: torch.arange(x.abs().max()),
    "slice": lambda x: x[: x.abs().sum().long()],
    "select": lambda x: x[x[-1].long()],
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0)[0],
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.abs().long()),
    "bincount": lambda x: torch.bincount(x.abs().long()),
    "one_hot": lambda x: one_hot(x.abs().long()),
    "tensor_split": lambda x: tensor_split(x, (x[:1] > 0).long() + 2)[0],
    "packed": lambda x: torch.nn.utils.rnn.pack_padded_sequence(x.view(1, 8, 1), x[-1:].long()).data,
}


@pytest.mark.parametrize("way", NUMBERS)
def test_a_number_read_on_the_host_is_refused(way: str) -> None:
    """The line is the one that reads."""
    with pytest.raises(CaptureError, match=HERE):
        tessera.capture(lambda x: x * NUMBERS[way](x * 1), X)


@pytest.mark.parametrize("way", TENSORS)
def test_a_tensor_made_of_what_was_read_is_refused(way: str) -> None:
    """Its values, or its shape, would be those of the recorded request."""
    with pytest.raises(CaptureError, match=HERE):
        tessera.capture(lambda x: TENSORS[way](x * 1).sum() + x, X)


def test_classes_are_counted_by_a_call_that_the_refusal_shows() -> None:
    """The operator that reads is not one that the program names."""
    with pytest.raises(CaptureError, match=HERE + r"one_hot\(x\) reads"):
        tessera.capture(lambda x: one_hot(x), X.abs().long())  # noqa: PLW0108


def test_values_that_are_only_checked_are_not_read() -> None:
    """A number of classes that is given, and parameters of a distribution; whatever is imported."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        spread: torch.Tensor = torch.distributions.Normal(x, x.abs() + 1).log_prob(x)
        return one_hot(x.abs().long(), 7).sum(0) + spread[:7]

    step = workload(fn, X)

    assert torch.equal(fn(X), step.run({"x": X}, {})["output"])


def test_text_that_the_program_makes_of_a_tensor_is_refused() -> None:
    """Also beside transformers, whose own messages are not."""
    with pytest.raises(CaptureError, match=HERE + "printing reads"):
        tessera.capture(lambda x: x * len(f"{x.sum():.1f}"), X)


@pytest.mark.parametrize("over", [torch.func.vmap, torch.func.grad])
def test_a_read_inside_a_function_transform_is_refused(over: Any) -> None:
    """Its tensors wrap those that have memory."""
    with pytest.raises(CaptureError, match=HERE + r"float\(\) reads"):
        tessera.capture(over(lambda x: (x * float(x.sum())).sum()), X)


def test_what_compares_shapes_alone_is_no_read() -> None:
    """Forward derivatives ask whether a tangent fits."""
    assert tessera.capture(lambda x: torch.func.jvp(torch.sin, (x,), (x,)), X).launches


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("name", ["summed", "branched", "masked", "counting", "chancy", "remembering"])
def test_a_module_of_the_users_own_is_refused_on_any_device(name: str, device: str) -> None:
    """Without values the same program is refused by the same line."""
    with pytest.raises(CaptureError, match=r"host_reads_model\.py:\d+: "):
        record_step(Step(f"host_reads_model:{name}", "call", 1, 1), device)


@pytest.mark.parametrize("way", ["item", "tolist", "numpy", "data_ptr", "repr", "torch.tensor"])
def test_what_no_request_changes_may_be_read(way: str) -> None:
    """Weights, and what is computed from them and from plain numbers, are the same in every call."""
    scale = torch.full((8,), 2.0)
    read = {**NUMBERS, **TENSORS}[way]

    assert tessera.capture(
        lambda x: x * scale + torch.as_tensor(read(scale + torch.ones(8))).sum(), X
    ).launches


def test_a_mask_that_no_request_changes_may_decide_a_shape() -> None:
    """Rows chosen by a constant are the same rows in every call."""
    trace = tessera.capture(lambda x: x[torch.arange(8) > 3] * 2, X)

    assert (4,) == trace.outputs[0][1].shape


def test_state_is_a_requests_own() -> None:
    """What earlier calls left in a buffer must not be read either."""
    module = Keeps("counter")

    def fn(x: torch.Tensor) -> torch.Tensor:
        module.held.add_(x)
        return x * float(module.held[0])

    with pytest.raises(CaptureError, match=rf"{HERE}float\(\) reads"):
        tessera.capture(fn, X)


def test_an_operator_over_functions_is_refused_with_its_line() -> None:
    """torch.cond looks at its condition."""
    with pytest.raises(CaptureError, match=rf"{HERE}cond is an operator over functions.*torch\.where"):
        tessera.capture(lambda x: torch.cond(x.sum() > 0, torch.exp, torch.tanh, (x,)), X)


def test_a_random_number_is_a_requests_own() -> None:
    """Torch's generator is state of the step."""
    with pytest.raises(CaptureError, match=rf"{HERE}float\(\) reads"):
        tessera.capture(lambda x: x * float(torch.randn(1)), X)


def test_reading_is_as_before_after_a_capture() -> None:
    """The methods of torch's classes are put back."""
    before = torch.Tensor.numpy, torch.Tensor.__float__, torch.Tensor.__repr__, torch.UntypedStorage.data_ptr
    with pytest.raises(CaptureError):
        tessera.capture(lambda x: x * float(x.sum()), X)

    assert before == (
        torch.Tensor.numpy, torch.Tensor.__float__, torch.Tensor.__repr__, torch.UntypedStorage.data_ptr,
    )  # fmt: skip
    assert "numpy" not in vars(torch.Tensor)


def test_another_thread_reads_what_it_likes() -> None:
    """Only the thread that records is looked at."""
    found = queue.SimpleQueue[float]()

    def fn(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.put(float(x.sum())))
        thread.start()
        thread.join()
        return x * 2

    tessera.capture(fn, X)

    assert float(X.sum()) == found.get_nowait()


def test_another_thread_has_its_values_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the thread that records leaves the parameters of distributions unchecked."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # Dynamo switches it off
    found = queue.SimpleQueue[str]()

    def elsewhere() -> None:
        with pytest.raises(ValueError, match="scale"):
            torch.distributions.Normal(0.0, -1.0)
        found.put("refused")

    def fn(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x * 2

    tessera.capture(fn, X)

    assert "refused" == found.get_nowait()


def test_what_another_thread_computes_is_no_constant() -> None:
    """Its operators are not seen, but its result is another for other values."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(x * 2))
        thread.start()
        thread.join()
        return made[0] + x

    with pytest.raises(CaptureError, match=rf"{HERE}aten.add.Tensor is given a tensor of bytes"):
        tessera.capture(fn, X)


class Keeps(torch.nn.Module):
    """Something in Python that a call changes, by name."""

    calls = 0
    hidden: Any
    held: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.n, self.seen, self.numbers = how, 0, list[int](), itertools.count()
        self.array, self.generator, self.own = np.zeros(2), random.Random(0), np.random.default_rng(0)
        self.table, self.made_one_by_one = dict[int, int](), (i for i in range(1_000_000))
        self.local = threading.local()
        self.local.n = 0
        self.register_buffer("held", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Changes one of them, and depends on it at most one time in a thousand."""
        return x * 2 if getattr(self, self.how)() > 1_000 else x + 1

    def counter(self) -> float:
        self.n += 1
        return self.n

    def list(self) -> float:
        self.seen.append(1)
        return len(self.seen)

    def dict(self) -> float:
        self.table[len(self.table)] = 1
        return len(self.table)

    def of_class(self) -> float:
        type(self).calls += 1
        return type(self).calls

    def of_file(self) -> float:
        CALLS.append(1)
        return len(CALLS)

    def iterator(self) -> float:
        return next(self.numbers)

    def of_numpy(self) -> float:
        self.array[0] += 1
        return float(self.array[0])

    def chance(self) -> float:
        return random.random()

    def own_chance(self) -> float:
        return self.generator.random()

    def numpy_chance(self) -> float:
        return float(np.random.rand())

    def own_numpy_chance(self) -> float:
        return float(self.own.random())

    def generator_function(self) -> float:
        return next(self.made_one_by_one)

    def of_thread(self) -> float:
        self.local.n += 1
        return float(self.local.n)

    def environment(self) -> float:
        os.environ["TESSERA_TEST_CALLS"] = str(int(os.environ.get("TESSERA_TEST_CALLS", "0")) + 1)
        return int(os.environ["TESSERA_TEST_CALLS"])

    def default(self, seen: Any = []) -> float:  # noqa: B006  # as programs do
        seen.append(1)
        return len(seen)

    def system(self) -> float:
        return 0.0 * uuid.uuid4().int

    def clock(self) -> float:
        return 0.0 * time.time()

    def date(self) -> float:
        return 0.0 * datetime.datetime.now().second

    def new_attribute(self) -> float:
        setattr(self, f"made{len(vars(self))}", 1)
        return 0.0

    def another_buffer(self) -> float:
        self.held = self.held + 1
        return 0.0


CALLS: list[int] = []
KEPT = [name for name, value in vars(Keeps).items() if callable(value) and not name.startswith(("_", "forw"))]


@pytest.mark.parametrize("how", KEPT)
def test_what_python_keeps_from_call_to_call_is_refused(how: str) -> None:
    """Also where it makes no difference in the calls that were recorded."""
    line = "" if how == "another_buffer" else HERE

    with pytest.raises(CaptureError, match=rf"{line}.*"):
        tessera.capture(Keeps(how), X)


class Remembers(torch.nn.Module):
    """Adds a tensor of an earlier call, kept by name where a search for tensors does not look."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.object, self.local = how, 0, SimpleNamespace(), threading.local()
        self.tensors, self.weak = deque[torch.Tensor](), WeakKeyDictionary[torch.nn.Module, torch.Tensor]()
        self.largest = functools.cache(lambda size: self.object.last.max())
        first: torch.Tensor | None = None

        def closure(x: torch.Tensor) -> torch.Tensor:
            nonlocal first
            first = x * 2 if first is None else first
            return first

        def default(x: torch.Tensor, kept: Any = {}) -> Any:  # noqa: B006  # as programs do
            return kept.setdefault(0, x * 2)

        self.closure, self.default = closure, default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = getattr(self, self.how)(x)
        return x + kept

    def of_object(self, x: torch.Tensor) -> Any:
        return vars(self.object).setdefault("first", x * 2)

    def view(self, x: torch.Tensor) -> Any:
        return vars(self.object).setdefault("first", (x * 2)[:1])

    def given(self, x: torch.Tensor) -> Any:
        return vars(self.object).setdefault("first", x)

    def given_later(self, x: torch.Tensor) -> Any:
        self.calls = min(self.calls + 1, 2)
        return self.given(x) if self.calls > 1 else x

    def of_thread(self, x: torch.Tensor) -> Any:
        return vars(self.local).setdefault("first", x * 2)

    def queue(self, x: torch.Tensor) -> Any:
        self.tensors.extend([] if self.tensors else [x * 2])
        return self.tensors[0]

    def weakly(self, x: torch.Tensor) -> Any:
        return self.weak.setdefault(self, x * 2)

    def cached(self, x: torch.Tensor) -> Any:
        self.object.last = x * 2
        try:
            return self.largest(len(x))
        finally:
            del self.object.last

    def of_last_call(self, x: torch.Tensor) -> Any:
        last = self.weak.get(self, torch.zeros(8))
        self.weak[self] = x * 2
        return last


REMEMBERED = (
    "of_object", "view", "given", "given_later", "of_thread", "queue", "weakly", "cached", "of_last_call",
    "closure", "default",
)  # fmt: skip


@pytest.mark.parametrize("how", REMEMBERED)
def test_a_tensor_of_an_earlier_call_is_no_constant(how: str) -> None:
    """The recordings agree on it: the first call, which finds what changes, has left it."""
    with pytest.raises(CaptureError, match=HERE + "the step uses a tensor left by an earlier call"):
        tessera.capture(Remembers(how), X)


def test_what_a_first_call_sets_up_may_change_then() -> None:
    """A flag that is set once is as it is in all later calls."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if not FLAG:
            FLAG.append(1)
            return x * 2
        return x * 3

    assert 3 == tessera.capture(fn, X).launches[0].args[1]


FLAG: list[int] = []


def test_an_array_over_a_state_is_refused_by_name() -> None:
    """Nobody sees who reads it."""
    module = Keeps("counter")
    module.hidden = module.held.numpy()

    def fn(x: torch.Tensor) -> torch.Tensor:
        module.held.add_(1)
        return x * float(module.hidden[0])

    with pytest.raises(
        CaptureError, match=r"'module.hidden' is a NumPy array over the memory of 'module.held'"
    ):
        tessera.capture(fn, X)


def test_a_python_value_that_was_changed_is_another_step() -> None:
    """A later call is bound to the capture only if Python holds what it held then."""
    module = Keeps("counter")
    step = workload(lambda x: x * module.n, X)
    step.function.bind((X,), {})
    module.n = 5

    with pytest.raises(MismatchError, match=r"'module.n' is not what it was"):
        step.function.bind((X,), {})


# Where a read is put, and what is done with the number.
PLACES = {"input": 0, "middle": 1, "end": 2}
USES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "factor": lambda x, n: x * (n + 0.5),
    "constant": lambda x, n: x + torch.tensor([float(n)]),
    "shape": lambda x, n: torch.cat([x, x.new_zeros(int(abs(n) * 1000) % 7)]).sum() + x,
    "branch": lambda x, n: x.exp() if n > 1.0 else x.tanh(),
}
HIDDEN: dict[str, Read] = {
    "as an extension": lambda x: _unseen(x),  # noqa: PLW0108
    "as two extensions": lambda x: _unseen(x) + _unseen(x + 1),
}


def _unseen(x: torch.Tensor) -> float:
    """As an extension in C would read."""
    with reads_allowed():
        return float(ctypes.c_float.from_address(x.data_ptr()).value)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted({**NUMBERS, **HIDDEN})),
    st.sampled_from(sorted(PLACES)),
    st.sampled_from(sorted(USES)),
)
def test_a_read_that_is_hidden_somewhere_is_found(way: str, place: str, use: str) -> None:
    """A program of three layers reads in one of them, and uses the number somehow."""
    read = {**NUMBERS, **HIDDEN}[way]
    if way in HIDDEN and use == "branch":
        use = "factor"  # no other value need take the other branch; verifying is for that

    def fn(x: torch.Tensor) -> torch.Tensor:
        for layer in range(3):
            x = torch.tanh(x * 0.5 + layer)
            if layer == PLACES[place]:
                x = USES[use](x, read(x))
        return x

    with pytest.raises(CaptureError):
        tessera.capture(fn, X)


def test_a_profiler_is_left_in_its_place() -> None:
    """The clock is watched by Python's profiling hook, which may be somebody else's."""

    def profile(*_: Any) -> None:
        return None

    sys.setprofile(profile)
    try:
        tessera.capture(lambda x: x * 2, X)
        assert profile is sys.getprofile()
    finally:
        sys.setprofile(None)


def test_a_program_may_be_profiled_while_it_is_captured() -> None:
    """What watches for clocks gives way to the profiler that was there before."""
    with cProfile.Profile() as profiler:
        with calls_refused():
            pass
        math.sqrt(2.0)

    assert any("sqrt" in str(entry.code) for entry in profiler.getstats())
