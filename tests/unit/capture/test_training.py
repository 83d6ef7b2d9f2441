"""Training steps: parameters and what an optimiser keeps are state, and a divided step trains alike."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

import tessera
from tessera.analyze import build_graph
from tessera.capture import record
from tessera.capture.function import workload
from tessera.errors import CaptureError
from tessera.execute.reference import InOrder, Replay
from tessera.ir import BufferKind, Trace

Step = Callable[[Tensor, Tensor], Tensor]
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "momentum over lists": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "fused adamw, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
}


def a_model() -> torch.nn.Sequential:
    """Two layers with a dropout between them."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))


def a_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Forward, backward, update."""

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def some_data(num: int) -> list[tuple[Tensor, Tensor]]:
    """A batch a step."""
    return [(torch.randn(5, 6), torch.randn(5, 4)) for _ in range(num)]


def names(trace: Trace, kind: BufferKind) -> list[str]:
    """Buffers of a kind."""
    return [trace.buffers[b].name for b in trace.buffers_of(kind)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replayed_step_trains_as_pytorch_does(name: str) -> None:
    """Three steps of a trace, every version of every buffer in its own memory, leave PyTorch's parameters."""
    model = a_model()
    train = a_step(model, OPTIMIZERS[name](model.parameters()))
    first, *data = some_data(4)
    train(*first)

    step = workload(train, *first)
    trace, state = record(step), step.make_state(0)
    values = build_graph(trace).values
    for x, y in data:
        replay = Replay(trace, step.weights(), {"x": x, "y": y}, state)
        after = replay.run_renamed(range(len(trace.launches)), values).state
        state = {k: after[k].view(state[k].dtype).reshape(state[k].shape) for k in state}
    for x, y in data:
        train(x, y)

    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, state[f"model.{key}"])


def test_a_capture_leaves_training_as_it_was() -> None:
    """Parameters, gradients and moments are the same objects with the same values after a capture."""
    model = a_model()
    optimizer = OPTIMIZERS["fused adam"](model.parameters())
    train, (x, y) = a_step(model, optimizer), some_data(1)[0]
    train(x, y)
    kept = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    kept += [t for held in optimizer.state.values() for t in held.values()]
    before = [(id(t), t.data_ptr(), t.detach().clone()) for t in kept]

    tessera.capture(train, x, y)

    now = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    now += [t for held in optimizer.state.values() for t in held.values()]
    assert [(i, at) for i, at, _ in before] == [(id(t), t.data_ptr()) for t in now]
    assert all(torch.equal(value, t) for (_, _, value), t in zip(before, now, strict=True))


def test_what_runs_backward_belongs_to_its_module() -> None:
    """A launch of the backward pass has the scope of the module it differentiates."""
    model = a_model()
    train, (x, y) = a_step(model, OPTIMIZERS["sgd"](model.parameters())), some_data(1)[0]
    train(x, y)

    trace = tessera.capture(train, x, y)

    matmuls = [t for i, t in enumerate(trace.launches) if trace.kernel_of(i).name == "aten.mm.default"]
    assert {"model.0", "model.2"} == {launch.scope for launch in matmuls}


def test_gradients_that_add_up_are_state() -> None:
    """A call that does not clear its gradients carries them from call to call."""
    model = a_model()

    def accumulate(x: Tensor) -> None:
        model(x).sum().backward()

    accumulate(torch.ones(5, 6))
    trace = tessera.capture(accumulate, torch.ones(5, 6))

    assert "model.2.weight.grad" in names(trace, BufferKind.STATE)
    assert "model.2.weight" not in names(trace, BufferKind.STATE)


def test_an_optimizer_is_not_needed() -> None:
    """Parameters that a call updates by hand are state."""
    weight = torch.ones(3, requires_grad=True)

    def train(x: Tensor) -> None:
        (grad,) = torch.autograd.grad((weight * x).sum(), weight)
        with torch.no_grad():
            weight.sub_(grad, alpha=0.5)

    step = workload(train, torch.arange(3.0))
    state = step.make_state(0)
    step.run({"x": torch.arange(3.0)}, state)

    assert torch.equal(1 - torch.arange(3.0) / 2, state["weight"])
    assert torch.equal(torch.ones(3), weight)


def test_a_step_count_on_the_host_is_refused() -> None:
    """Adam reads its step count unless it is fused; the message says what to do."""
    model = a_model()
    train, (x, y) = a_step(model, torch.optim.Adam(model.parameters())), some_data(1)[0]
    train(x, y)

    with pytest.raises(CaptureError, match=r"reads its step count.*fused=True"):
        tessera.capture(train, x, y)


def test_the_first_step_is_refused() -> None:
    """Momenta are made in the first step, so that the second is another step."""
    model = a_model()
    train = a_step(model, OPTIMIZERS["momentum"](model.parameters()))

    with pytest.raises(CaptureError, match=r"the call creates .*Run one training step before"):
        tessera.capture(train, *some_data(1)[0])


def test_a_schedule_inside_the_step_is_refused() -> None:
    """A rate that the call changes on the host would be a constant of the trace."""
    model = a_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train, (x, y) = a_step(model, optimizer), some_data(1)[0]

    def scheduled(x: Tensor, y: Tensor) -> Tensor:
        loss = train(x, y)
        schedule.step()
        return loss

    scheduled(x, y)

    with pytest.raises(CaptureError, match=r"test_training\.py:\d+: .*optimizer\.lr' from 0\.\d+ to"):
        tessera.capture(scheduled, x, y)


def test_a_recurrent_layer_keeps_what_its_backward_reads() -> None:
    """oneDNN keeps it only while gradients are on, as they are not where launches run."""
    torch.manual_seed(0)
    layer = torch.nn.LSTM(6, 5, batch_first=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = layer(x)[0].pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(2, 4, 6)
    train(x)
    step = workload(train, x)
    given = step.function.bind((x,), {})
    states = [{name: tensor.clone() for name, tensor in given.state.items()} for _ in range(2)]
    step.run(dict(given.inputs), states[0])
    InOrder([record(step)], step.weights(), torch.device("cpu"))(0, given.inputs, states[1])

    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
