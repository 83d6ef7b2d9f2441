"""Products of the same input become one, with weights laid out once; results stay what they were."""

import functools
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

from sampling import num_layers, some_of
from tessera.capture import Workload, build, record, record_step
from tessera.capture.models.joined import JoinedLinear, join_products
from tessera.execute.reference import Replay
from tessera.ir import Step, Trace
from tessera.kernels.tensors import same_bits

TINY = ("tiny-llama", "tiny-gpt-oss", "tiny-mamba", "tiny-qwen2.5-vl")


@functools.cache
def workload(model: str, is_joined: bool) -> Workload:
    """A step of two sequences; more tokens where the model reads several of one."""
    size = 2 if model == "tiny-mamba" else 6
    return build(Step(model, "tokens", 2, size, reserve=64, joined_products=is_joined))


def products(trace: Trace) -> int:
    """Matrix products of a trace."""
    names = [trace.kernel_of(i).name for i in range(len(trace.launches))]
    return sum(name in ("aten.mm.default", "aten.addmm.default") for name in names)


class Pair(torch.nn.Module):
    """Two layers, and what makes of them a result."""

    def __init__(self, left: torch.nn.Module, right: torch.nn.Module, read: Callable[..., Any]) -> None:
        super().__init__()
        self.left, self.right, self._read = left, right, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Whatever it is."""
        made: torch.Tensor = self._read(self, x)
        return made


def both(pair: Any, x: torch.Tensor) -> torch.Tensor:
    """Both layers read the input."""
    made: torch.Tensor = pair.left(x) * pair.right(x)
    return made


def make_pair(read: Callable[..., Any] = both, sizes: tuple[int, int] = (16, 16), **options: Any) -> Pair:
    """Two linear layers."""
    torch.manual_seed(0)
    left, right = (torch.nn.Linear(8, size, **options) for size in sizes)
    return Pair(left, right, read)


def joined(model: torch.nn.Module, x: torch.Tensor | None = None) -> int:
    """How many joined products a model gets by an example."""
    given = torch.randn(2, 3, 8) if x is None else x
    with torch.no_grad():
        return join_products(model, lambda: model(given))


def test_a_layer_of_llama_has_four_products_instead_of_seven() -> None:
    """Query, key and value are one; gate and up are one."""
    apart, together = (record(workload("tiny-llama", is_joined)) for is_joined in (False, True))

    assert 7 * num_layers() + 1 == products(apart)
    assert 4 * num_layers() + 1 == products(together)
    assert 3 * num_layers() == len(apart.launches) - len(together.launches)


@pytest.mark.parametrize("model", some_of(TINY, ("tiny-gpt-oss", "tiny-mamba")))
def test_greedy_tokens_are_the_same(model: str) -> None:
    """For any requests."""
    apart, together = workload(model, False), workload(model, True)
    for seed in range(3):
        wanted, found = (w.run(w.make_inputs(seed), w.make_state(seed)) for w in (apart, together))

        assert torch.equal(wanted["next_tokens"], found["next_tokens"])


def test_a_joined_trace_has_the_bits_of_the_joined_model() -> None:
    """What is replayed is what the model itself computes."""
    step = workload("tiny-llama", True)
    trace = record(step)
    inputs = step.make_inputs(1)
    state, own = step.make_state(1), step.make_state(1)
    wanted = step.run(inputs, own)
    found = Replay(trace, step.weights(), inputs, state).run(range(len(trace.launches)))

    assert same_bits(wanted["logits"], found.outputs["logits"])


@pytest.mark.parametrize("model", TINY)
def test_no_weight_is_there_twice(model: str) -> None:
    """As many bytes as before."""
    apart, together = (
        sum(t.untyped_storage().nbytes() for t in workload(model, is_joined).weights().values())
        for is_joined in (False, True)
    )

    assert apart == together


def test_replaced_weights_are_let_go() -> None:
    """Nobody holds them any more."""
    pair = make_pair()
    before = [StorageWeakRef(t.untyped_storage()) for t in pair.parameters()]

    assert 1 == joined(pair)
    gc.collect()
    assert all(storage.expired() for storage in before)


def test_a_fake_capture_has_the_same_launches() -> None:
    """Layers of weights that have no values are joined too."""
    step = workload("tiny-llama", True).step

    assert 4 * num_layers() + 1 == products(record_step(step, "fake"))


def test_a_model_with_nothing_to_join_is_left_as_it_is() -> None:
    """Module for module, weight for weight."""
    plain = workload("tiny-mamba", False).module
    step = workload("tiny-mamba", True)

    assert [type(m) for m in plain.modules()] == [type(m) for m in step.module.modules()]
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in step.module.named_parameters()]


def test_a_layer_with_an_input_of_its_own_multiplies_by_its_own_rows() -> None:
    """Two layers that read one tensor in the example, and different ones later."""
    pair = make_pair(lambda pair, x: pair.left(x) + pair.right(x if pair.training else x * 2))
    x = torch.randn(2, 3, 8)
    wanted = pair.eval()(x)

    assert 1 == joined(pair.train())
    assert_close(wanted, pair.eval()(x))


def test_results_wait_no_longer_than_their_input() -> None:
    """Columns that nobody asks for are dropped with the tensor they were computed from."""
    pair = make_pair(lambda pair, x: both(pair, x) if pair.training else pair.left(x))
    assert 1 == joined(pair)
    pair.eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        pair(x)
    assert isinstance(pair.left, JoinedLinear)
    waiting = len(pair.left._waiting)
    del x

    assert (1, 0) == (waiting, len(pair.left._waiting))


def test_a_layer_knows_its_own_weight_and_bias() -> None:
    """As programs look at them."""
    pair, again = make_pair(), make_pair()
    joined(pair)
    for mine, wanted in ((pair.left, again.left), (pair.right, again.right)):
        assert torch.equal(wanted.weight, mine.weight)  # type: ignore[arg-type]
        assert torch.equal(wanted.bias, mine.bias)  # type: ignore[arg-type]


class Quantised(torch.nn.Linear):
    """A class of somebody else's."""


def tied() -> Pair:
    """Two layers with one weight."""
    pair = make_pair(bias=False)
    pair.right.weight = pair.left.weight
    return pair


def looked_up() -> Pair:
    """A weight whose rows are looked up too."""
    pair = make_pair()
    pair.words = torch.nn.Embedding(16, 8, _weight=pair.right.weight)  # type: ignore[arg-type]
    return pair


def hooked() -> Pair:
    """A layer that somebody watches."""
    pair = make_pair()
    pair.left.register_forward_hook(lambda *_: None)
    return pair


def changed(pair: Any, x: torch.Tensor) -> torch.Tensor:
    """The input is another one when the second layer reads it."""
    left = pair.left(x)
    return left * pair.right(x.mul_(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        tied,
        looked_up,
        hooked,
        lambda: make_pair(changed),
        lambda: make_pair(lambda pair, x: both(pair, x) + both(pair, x)),
        lambda: make_pair(lambda pair, x: pair.left(x) * pair.right(x + 0)),
        lambda: make_pair(lambda pair, x: pair.left(x) * pair.right(x).view(-1).sum()),
        lambda: make_pair(lambda pair, x: pair.left(x).sum() + pair.right(x).sum(), (16, 3)),
        lambda: Pair(torch.nn.Linear(8, 16), torch.nn.Linear(8, 16, bias=False), both),
        lambda: Pair(torch.nn.Linear(8, 16), torch.nn.Linear(8, 16).double(), lambda pair, x: pair.left(x)),
        lambda: Pair(Quantised(8, 16), Quantised(8, 16), both),
    ],
    ids=["tied", "looked up", "hooked", "changed", "twice", "other input", "viewed", "not aligned", "bias",
         "type", "quantised"],
)  # fmt: skip
def test_what_cannot_be_joined_is_left_alone(make: Callable[[], Pair]) -> None:
    """Module for module."""
    pair = make()
    before = dict(pair.named_modules())

    assert 0 == joined(pair)
    assert before == dict(pair.named_modules())


class Experts(torch.nn.Module):
    """Two pairs, of which an input goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([make_pair(), make_pair()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """By the first of its numbers."""
        made: torch.Tensor = self.experts[int(x.flatten()[0] > 0)](x)
        return made


def test_experts_that_nobody_was_sent_to_are_joined_like_the_others() -> None:
    """The same class with the same names."""
    model, x = Experts(), torch.ones(2, 3, 8)
    wanted = [model(x), model(-x)]

    assert 2 == joined(model, x)
    assert_close(wanted, [model(x), model(-x)])


def test_a_model_that_the_example_does_not_fit_is_left_alone() -> None:
    """Its own errors come when it is run."""
    pair = make_pair()

    assert 0 == joined(pair, torch.randn(2, 3, 9))
    assert isinstance(pair.left, torch.nn.Linear)


def test_weights_of_a_saved_step_are_those_of_its_trace() -> None:
    """A step says that its products are joined, so that it can be built again elsewhere."""
    step = workload("tiny-llama", True).step
    names = {b.name for b in record(workload("tiny-llama", True)).buffers}

    assert set(build(replace(step)).weights()) - names == set()
