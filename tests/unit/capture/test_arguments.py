"""Arguments, modules and results that are more than plain tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tessera
from tessera.capture.function import workload
from tessera.errors import CaptureError
from tessera.ir import BufferKind, Trace


class Doubling(torch.Tensor):
    """Its sine is twice the sine."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result * 2 if func is torch.sin else result


class Opposite(torch.Tensor):
    """Its operators are not those of torch."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass
class Pair:
    """A state as programs pass it on."""

    one: torch.Tensor
    other: list[torch.Tensor]
    length: int = 1


def marked(tensor: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """A tensor with attributes of the program's own."""
    tensor.__dict__ |= attributes
    return tensor


def by_kind(trace: Trace, kind: BufferKind) -> list[str]:
    """Names of the buffers of one kind, in order."""
    return [trace.buffers[b].name for b in trace.buffers_of(kind)]


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (torch.sin, torch.ones(3).as_subclass(Doubling)),
        (lambda x: x * (2 if isinstance(x, torch.nn.Parameter) else 3), torch.nn.Parameter(torch.ones(3))),
        (lambda x: x * (2 if x.requires_grad else 3), torch.ones(3, requires_grad=True)),
        (lambda x: x * x.factor, marked(torch.ones(3), factor=2)),
        (lambda x: x.add_(1) * x.factor, marked(torch.ones(3), factor=2)),
    ],
    ids=["class", "parameter", "flag", "attribute", "attribute of a state"],
)
def test_a_program_sees_the_class_and_the_attributes_of_an_argument(fn: Callable[..., Any], x: Any) -> None:
    """Branches on them are taken as without a capture."""
    with torch.no_grad():
        step = workload(fn, x)
        inputs, state = step.request(0)
        (found,) = step.run(inputs, state).values()

        assert torch.equal(fn(x).as_subclass(torch.Tensor), found)


@pytest.mark.parametrize("given", [SimpleNamespace(x=torch.ones(3)), Pair(torch.ones(3), [])], ids=type)
def test_tensors_in_an_object_are_inputs(given: Any) -> None:
    """A request decides them, so that they are not read on the host."""
    trace = tessera.capture(lambda o: next(iter(vars(o).values())) * 2, given)

    assert 1 == len(by_kind(trace, BufferKind.INPUT))
    with pytest.raises(CaptureError, match=r"bool\(\) reads"):
        tessera.capture(lambda o: 1 if next(iter(vars(o).values())).sum() > 0 else 2, given)


def test_a_dataclass_is_argument_and_result() -> None:
    """Its tensors are inputs, state and outputs, by their paths."""

    def fn(pair: Pair) -> Pair:
        pair.one.add_(1)
        return Pair(pair.one * 2, [pair.other[0] * pair.length], pair.length)

    trace = tessera.capture(fn, Pair(torch.ones(2), [torch.ones(2)]))

    assert (["pair.other.0"], ["pair.one"]) == (
        by_kind(trace, BufferKind.INPUT),
        by_kind(trace, BufferKind.STATE),
    )
    assert ["one", "other.0"] == [name for name, _ in trace.outputs]


@pytest.mark.parametrize(
    "change", [lambda d: d.update(length=3), lambda d: d.pop("length"), lambda d: d.update(more=1)]
)
def test_a_plain_value_of_an_argument_that_the_call_changes_is_refused(change: Any) -> None:
    """The caller would not see the change."""

    def fn(d: dict[str, Any]) -> Any:
        change(d)
        return d["x"] * 2

    with pytest.raises(CaptureError, match=r"replaces 'd\.(length|more)'.*in place"):
        tessera.capture(fn, {"x": torch.ones(2), "length": 2})


def test_tensors_in_a_returned_object_are_outputs() -> None:
    """Nothing that a call computes is lost with what it is wrapped in."""
    trace = tessera.capture(lambda x: (x + 1, SimpleNamespace(y=[x * 2])), torch.ones(3))

    assert ["output.0", "output.1.y.0"] == [name for name, _ in trace.outputs]


def test_a_module_holds_tensors_and_modules_in_lists() -> None:
    """What the call changes among them is state, the rest are weights."""

    class Listing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [torch.nn.Linear(200, 200)]
            self.kept = {"sums": [torch.zeros(200)]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.kept["sums"][0].add_(self.parts[0](x))

    trace = tessera.capture(Listing(), torch.ones(200))

    assert ["kept.sums.0"] == by_kind(trace, BufferKind.STATE)
    assert ["parts_0.weight", "parts_0.bias"] == by_kind(trace, BufferKind.WEIGHT)


@pytest.mark.parametrize("place", ["attribute", "dictionary"])
def test_a_constant_that_the_first_call_keeps_is_set_up(place: str) -> None:
    """It is the same for every request; what a request decides is refused."""

    class Keeping(torch.nn.Module):
        def __init__(self, is_varying: bool) -> None:
            super().__init__()
            self.is_varying, self.kept, self.table = is_varying, dict[str, torch.Tensor](), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = vars(self) if place == "attribute" else self.kept
            if kept.get("table") is None:
                kept["table"] = x * 2 if self.is_varying else torch.arange(3.0) * 2
            return x + kept["table"]

    assert tessera.capture(Keeping(False), torch.ones(3)).launches
    with pytest.raises(CaptureError, match=r"replaces the tensor '(kept\.)?table'"):
        tessera.capture(Keeping(True), torch.ones(3))


def test_memory_beside_an_argument_is_refused() -> None:
    """A step gets the bytes of its arguments, and no others of the same storage."""
    whole = torch.arange(40.0)

    with pytest.raises(CaptureError, match=r"memory beside 'x'.*larger tensor"):
        tessera.capture(lambda x: x.as_strided((2,), (1,), 0) * 2, whole[20:25])
    step = workload(lambda x, y: x.as_strided((2,), (1,), 0) * 2, whole[20:25], whole)
    assert [0, 2] == step.run(*step.request(0))["output"].tolist()


def test_a_state_is_detached_in_place() -> None:
    """What a program is given is no view."""
    assert 1 == len(tessera.capture(lambda x: x.detach_().add_(1), torch.ones(3)).launches)


def test_a_change_of_a_tensor_in_a_slot_is_refused() -> None:
    """It cannot be exchanged there."""

    class Slots:
        __slots__ = ("sum",)
        sum: torch.Tensor

    slots = Slots()
    slots.sum = torch.zeros(2)

    with pytest.raises(CaptureError, match=r"only a closure or tuple holds it.*register_buffer"):
        tessera.capture(lambda x: slots.sum.add_(x) * 2, torch.ones(2))


def test_a_change_of_a_tensor_that_is_not_found_is_refused() -> None:
    """Objects are not searched endlessly."""
    deep: Any = torch.zeros(2)
    for _ in range(9):
        deep = [deep]

    def fn(x: torch.Tensor) -> torch.Tensor:
        found = deep
        while isinstance(found, list):
            found = found[0]
        return found.add_(x) * 2  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"neither an argument nor found.*register_buffer"):
        tessera.capture(fn, torch.ones(2))


def test_a_class_with_operators_of_its_own_is_refused() -> None:
    """What they compute is not what would be recorded."""
    with pytest.raises(CaptureError, match="Opposite, whose operators are its own"):
        tessera.capture(lambda x: x * 2, torch.Tensor._make_subclass(Opposite, torch.ones(2)))
