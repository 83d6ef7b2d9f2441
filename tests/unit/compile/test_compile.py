"""The torch.compile backend, with real worker processes: the bits of eager, and nothing left behind."""

import copy
import gc
import importlib.metadata
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tessera.capture.record import capture
from tessera.compile import Session, backend
from tessera.errors import TesseraError, UnknownName, WorkerError
from tessera.execute.offline import RunResult

ONE = {"devices": "emu:a100"}
TWO = {"devices": ["emu:a100", "emu:l40s"]}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """One thread, as in a worker; whatever a test leaves to Dynamo is let go."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


def compiled(model: Callable[..., Any], options: dict[str, Any], **more: Any) -> Callable[..., Any]:
    """The model through the backend."""
    found: Callable[..., Any] = torch.compile(
        model, backend=backend, options={"effort": "quick", **options}, **more
    )
    return found


def workers() -> list[str]:
    """Names of the worker processes that are alive."""
    return sorted(p.name for p in multiprocessing.active_children())


def only_session() -> Session:
    """The one session with workers."""
    (found,) = Session.live.values()
    assert found is not None
    return found


def tessera_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    """What the backend warned of."""
    return [str(w.message) for w in caught if str(w.message).startswith("tessera")]


class Attention(torch.nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        result: torch.Tensor = x + self.mlp(x)
        return result


class Transformer(torch.nn.Module):
    """A few blocks."""

    def __init__(self, width: int = 32, num: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(num))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"hidden": x, "last": x[:, -1]}


class Decoder(torch.nn.Module):
    """Writes a cache that it is given and a buffer of its own."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor, keys: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        keys.index_copy_(1, position, self.fc(x)[:, None])
        self.steps += 1
        return (keys * x[:, None]).sum(-1)


def make_mlp() -> torch.nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def test_a_transformer_is_divided_and_leaves_nothing_behind() -> None:
    """Layers on two devices give the bits of eager, call after call; workers end with the model."""
    model = Transformer()
    fn = compiled(model, {**TWO, "policy": "layer-pipeline", "verify": True})
    for _ in range(3):
        x = torch.randn(2, 6, 32)
        got, expected = fn(x), model(x)
        for name, tensor in expected.items():
            assert torch.equal(tensor, got[name])
            assert tensor.stride() == got[name].stride()
    (lane,) = only_session().plan.lanes
    assert {0, 1} == set(lane.placement.devices[0])
    assert ["tessera-emu:a100", "tessera-emu:l40s"] == workers()

    del model, fn
    gc.collect()

    assert [] == workers()


def test_caches_and_buffers_are_changed_for_the_caller() -> None:
    """In-place updates of an argument (a part of a larger tensor) and of a buffer are written back."""
    model = Decoder()
    reference = copy.deepcopy(model)
    fn = compiled(model, {**ONE, "verify": True})
    store, expected = torch.zeros(3, 6, 8), torch.zeros(3, 6, 8)
    for step in range(3):
        x, position = torch.randn(3, 8), torch.tensor([step])

        assert torch.equal(fn(x, store[:, 1:5], position), reference(x, expected[:, 1:5], position))
    assert torch.equal(expected, store)
    assert 3 == int(model.steps)
    assert 1 == len(workers())


def test_weights_may_change_between_calls() -> None:
    """Weights changed in place, and weights put in the place of others, are what the next call uses."""
    model = torch.nn.Linear(8, 8)
    fn, x = compiled(model, ONE), torch.randn(2, 8)
    assert torch.equal(model(x), fn(x))
    model.weight.mul_(2)
    assert torch.equal(model(x), fn(x))
    assert 1 == len(workers())
    model.weight.data = torch.randn(8, 8)

    assert torch.equal(model(x), fn(x))


def test_a_lost_worker_is_started_again() -> None:
    """The call that finds it gone waits for it."""
    model = make_mlp()
    fn, x = compiled(model, ONE), torch.randn(2, 8)
    fn(x)
    (victim,) = multiprocessing.active_children()
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)

    assert torch.equal(model(x), fn(x))
    assert 1 == len(workers())


def test_a_device_that_is_given_up_is_reported_and_the_next_call_starts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that fails too often raises with its device's name; nothing is wrong after that."""
    monkeypatch.setattr("tessera.compile.MAX_FAILURES", 1)
    model = make_mlp()
    fn, x = compiled(model, ONE), torch.randn(2, 8)
    fn(x)
    (victim,) = multiprocessing.active_children()
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="device emu:a100: the worker process ended"):
        fn(x)
    assert [] == workers()

    assert torch.equal(model(x), fn(x))


def test_threads_share_the_workers() -> None:
    """Calls of many threads, some of them in flight together, each get their own result."""
    model = make_mlp()
    fn = compiled(model, {**ONE, "objective": "throughput", "microbatches": 4})
    inputs = [torch.randn(2, 8) for _ in range(12)]
    results: list[torch.Tensor | None] = [None] * len(inputs)

    def call(number: int) -> None:
        with torch.no_grad():
            results[number] = fn(inputs[number])

    call(0)
    threads = [threading.Thread(target=call, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(r is not None and torch.equal(model(x), r) for x, r in zip(inputs, results, strict=True))


def test_a_call_beside_a_capture_has_the_models_own_state() -> None:
    """While one thread captures a module, another's call reads and writes what the module really holds."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.get_buffer("count").add_(1)

    model = Counting()
    fn, own = compiled(model, ONE), id(model.get_buffer("count"))
    results = [fn(torch.ones(2)).tolist()]
    threads: list[threading.Thread] = []

    def beside() -> None:
        with torch.no_grad():
            results.append(fn(torch.ones(2)).tolist())

    def slow(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        if not threads and id(model.get_buffer("count")) != own:
            threads.append(threading.Thread(target=beside))
            threads[0].start()
            threads[0].join(0.3)
        return y

    capture(slow, torch.ones(2))
    threads[0].join()

    assert [[1, 1], [2, 2], [2, 2]] == [*results, model.get_buffer("count").tolist()]


def test_products_are_folded_as_in_eager() -> None:
    """Torch folds rows that meet a weight which may be differentiated, with other last bits."""
    torch.manual_seed(0)
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    y = torch.randn(2, 3, 8)

    assert torch.equal(attention(x, y, y)[0], compiled(attention, ONE)(x, y, y)[0])


def test_a_graph_that_computes_nothing_runs_as_it_is() -> None:
    """There is nothing to plan."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(0)
        y.set_(x.untyped_storage(), 1, (2,), (1,))
        return y * 2

    assert [2, 2] == compiled(fn, TWO)(torch.ones(4)).tolist()


def test_a_graph_break_and_a_branch_on_data_are_right() -> None:
    """Dynamo splits what cannot be one graph; each part is divided, and the whole is eager's."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + 1 if y.sum() > 0 else y - 1

    assert torch.equal(fn(-torch.ones(4)), compiled(fn, ONE)(-torch.ones(4)))
    assert 2 == len(workers())


def test_another_shape_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new shape is captured anew (Dynamo's second graph is dynamic); only the last keeps its workers."""
    monkeypatch.setattr("tessera.compile.MAX_ENGINES", 1)
    model = torch.nn.Linear(8, 8)
    fn = compiled(model, ONE)
    for rows in (3, 5):
        x = torch.randn(rows, 8)

        assert torch.equal(model(x), fn(x))
    assert 1 == len(workers())


@pytest.mark.parametrize("value", [2.0, 3.0])
def test_verify_compares_every_call(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that differs from the reference run is an error, and one that does not is returned."""
    result = RunResult(lane=0, outputs=[{"output.0": torch.full((4,), value)}])
    monkeypatch.setattr(Session, "run", lambda self, request: result)
    fn = compiled(lambda x: x + 1, {**ONE, "verify": True})
    if value == 2.0:
        assert torch.equal(torch.full((4,), 2.0), fn(torch.ones(4)))
        return

    with pytest.raises(TesseraError, match=r"differs from the reference run in 'output\.0'"):
        fn(torch.ones(4))


def test_memory_that_nobody_has_written_is_not_compared() -> None:
    """A graph may end between an allocation and whoever fills it; verify looks at what is defined."""
    x = torch.ones(1 << 12)
    doubled, empty = compiled(lambda x: (x * 2, torch.empty_like(x)), {**ONE, "verify": True})(x)

    assert torch.equal(x * 2, doubled)
    assert empty.shape == x.shape


def test_random_numbers_are_those_of_the_programs_generator() -> None:
    """Same seed, same numbers as eager, call after call; the generator ends where eager leaves it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept = torch.nn.functional.dropout(x, 0.5, True)
        return torch.multinomial(kept + torch.rand_like(x), 8) + kept.argmax()

    run, x = compiled(fn, {**TWO, "verify": True}), torch.ones(64)
    torch.manual_seed(3)
    got, after = [run(x), run(x)], torch.get_rng_state()
    names = workers()
    torch.manual_seed(3)

    assert all(torch.equal(fn(x), y) for y in got)
    assert torch.equal(torch.get_rng_state(), after)
    assert names


def test_what_cannot_be_captured_runs_eagerly_with_one_warning() -> None:
    """As if not compiled: same seed, same numbers, and the line is named."""

    norm = torch.nn.BatchNorm1d(4)  # which in training changes more than it says

    def fn(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = norm(torch.nn.functional.dropout(x, 0.5))
        return made

    run, x = compiled(fn, ONE), torch.ones(16, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(3)
        got = [run(x), run(x)]
    torch.manual_seed(3)

    assert all(torch.equal(fn(x), y) for y in got)
    (message,) = tessera_warnings(caught)
    assert "test_compile.py:" in message
    assert "running statistics" in message
    assert [] == workers()


def test_gradients_run_eagerly_with_one_warning() -> None:
    """A result that is to be differentiable is not silently cut off from its weights."""
    model = make_mlp()
    fn = compiled(model, ONE)
    with torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn(torch.ones(2, 8)).sum().backward()
        fn(torch.ones(2, 8))

    assert model[0].weight.grad is not None
    assert 1 == len(tessera_warnings(caught))
    assert "torch.no_grad()" in tessera_warnings(caught)[0]


def test_training_batch_norm_updates_its_statistics_once() -> None:
    """The first call of a graph that falls back has run more than once inside, and must not show it."""
    model = torch.nn.BatchNorm1d(4)
    reference = copy.deepcopy(model)
    x = torch.randn(5, 4)
    with pytest.warns(UserWarning, match="running statistics"):
        got = compiled(model, ONE)(x)

    assert torch.equal(reference(x), got)
    assert all(torch.equal(a, b) for a, b in zip(reference.buffers(), model.buffers(), strict=True))


def test_a_refusal_inside_autocast_leaves_it() -> None:
    """The graph runs eagerly afterwards, its first product in float32."""
    first, norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = first(x)
        with torch.autocast("cpu", torch.bfloat16):
            return y, norm(x @ x.mT @ x)

    with pytest.warns(UserWarning, match="running statistics"):
        result = compiled(fn, TWO)(torch.randn(4, 4))

    assert [torch.float32, torch.bfloat16] == [y.dtype for y in result]


def test_a_refusal_inside_torch_func_leaves_its_levels() -> None:
    """The graph runs eagerly afterwards; levels that its nodes had entered would break it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.hessian(lambda row: (row**3).sum())(x)
        return result

    x = torch.randn(3)
    with pytest.warns(UserWarning, match="zero without memory"):
        result = compiled(fn, TWO)(x)

    assert torch.equal(fn(x), result)


def test_a_parameter_that_an_operator_gives_back_is_no_gradient() -> None:
    """Spectral norm flattens its weight, which is a matrix, and changes a buffer; no warning."""
    norm = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
    model, expected, x = norm, copy.deepcopy(norm), torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = compiled(model, TWO)(x)

    assert torch.equal(expected(x), result)


def test_a_graph_of_views_needs_no_worker() -> None:
    """Nothing is launched, and the result is the caller's own memory."""
    x = torch.randn(2, 3)

    assert compiled(lambda t: t.t(), ONE)(x).data_ptr() == x.data_ptr()
    assert [] == workers()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {**ONE, "device": "x"},
            "unknown option 'device'; known: devices, effort, link, microbatches, objective, policy, verify",
        ),
        ({**ONE, "link": "string"}, "--link: unknown link 'string'; known: ib100"),
        ({**ONE, "objective": "fast"}, "unknown objective 'fast'; known: cost, energy, latency, throughput"),
        ({**ONE, "policy": "best"}, "unknown policy 'best'; known: attention-ffn"),
        ({"devices": "emu:z900"}, "--devices: unknown GPU 'z900'; known: a100"),
    ],
)
def test_an_unknown_name_answers_with_the_known_ones(options: dict[str, Any], message: str) -> None:
    """A typo is an error of ours, not one wrapped by Dynamo."""
    with pytest.raises(UnknownName) as caught:
        compiled(lambda x: x + 1, options)(torch.ones(2))

    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, "options['devices']"),
        ({"devices": "cuda:0"}, "options['devices']"),
        ({**ONE, "microbatches": 0}, "options['microbatches']"),
    ],
)
def test_a_wrong_value_names_its_option(options: dict[str, Any], place: str) -> None:
    """What is missing or impossible is said with the option's name."""
    with pytest.raises(TesseraError) as caught:
        compiled(lambda x: x + 1, options)(torch.ones(2))

    assert caught.value.place == place


def test_the_entry_point_names_the_backend() -> None:
    """torch.compile finds "tessera" through the installed package."""
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="tessera")
    if not found:
        pytest.skip("the package was installed before it had this entry point")

    assert next(iter(found)).load() is backend


def test_a_result_of_no_bytes_is_given_back() -> None:
    """No launch writes it, and no device has to hold it."""
    x = torch.ones(0, 3)
    doubled, total = compiled(lambda x: (x * 2, x.sum()), ONE)(x)

    assert ((0, 3), 0.0) == (tuple(doubled.shape), float(total))
