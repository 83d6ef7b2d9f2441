"""Models that mix layers with and without a window: pages behind a window go back, answers stay the same."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.coverage_models import MODELS

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from own_code import reference as own_code
from paged_mixer import plain_model
from sampling import examples, some_of
from serving_factory import GREEDY, generated, policies_of, read_all, wait_for
from tessera.ir import Load
from tessera.kernels import PAGE, max_pages
from tessera.profile import parse_devices, wire
from tessera.serve.pages import pages_for
from tessera.serve.planning import prepare
from tessera.serve.records import Ask, ServeSpec, Shape
from tessera.serve.service import Service
from tessera.serve.steps import served, state_bytes
from tessera.serve.text import ByteText

WINDOW, WORDS = 20, 96
SIZES: dict[str, Any] = {"capacity": 160, "max_batch_tokens": 8, "random_weights": True}
BY_MODEL = [("gpt_oss", (0, WINDOW)), ("gemma3_text", (0, WINDOW, WINDOW, WINDOW))]


def write(name: str, folder: Path, window: int = WINDOW) -> None:
    """A model whose layers have a window, all but the last."""
    found, num = next(model for model in MODELS if model.name == name), 4 if name == "gemma3_text" else 2
    kinds = ["full_attention" if n == num - 1 else "sliding_attention" for n in range(num)]
    sizes = {**found.sizes, "num_hidden_layers": num, "layer_types": kinds, "sliding_window": window}
    sizes["max_position_embeddings"] = SIZES["capacity"]
    replace(found, sizes=sizes).write(folder)


def plain(folder: Path) -> Any:
    """The model as Hugging Face has it."""
    made = served(str(folder), ServeSpec(microbatches=1, rows=4, joined=False, **SIZES))
    return plain_model(made.workloads[-1].module)


def asks_of(*lengths: int, tokens: int = 90) -> list[Ask]:
    """Prompts that begin alike, up to a few tokens."""
    rng = random.Random(6)
    begin = tuple(rng.randrange(3, WORDS) for _ in range(max(lengths)))
    return [
        Ask(begin[:n] + tuple(rng.randrange(3, WORDS) for _ in range(5)), tokens, GREEDY, ignores_end=True)
        for n in lengths
    ]


@pytest.mark.parametrize(("name", "windows"), some_of(BY_MODEL, BY_MODEL[:1]))
def test_answers_with_few_pages_are_those_of_generate(
    name: str, windows: tuple[int, ...], tmp_path: Path
) -> None:
    """Prompts that share pages, answers that are preempted past their window and go on."""
    write(name, tmp_path)
    pool = PAGE * 2 * max_pages(107, windows, 8)
    made = served(str(tmp_path), ServeSpec(microbatches=1, rows=4, pool_tokens=pool, **SIZES))
    asks = asks_of(52, 40, 52, 17, tokens=examples(50, 27))
    with (
        own_code(made, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, made.shape), made.shape, ByteText()) as service,
    ):
        found = [told.numbers for _ in range(2) for told in wait_for(read_all(service, asks))]
        snapshot = service.snapshot()

    assert windows == made.shape.windows
    model = plain(tmp_path)
    assert [generated(model, ask) for ask in asks] * 2 == found
    assert snapshot.preemptions > 0
    assert snapshot.prefix_hits > 0
    assert snapshot.pages_used == 0


@pytest.mark.parametrize(("name", "windows"), some_of(BY_MODEL, BY_MODEL[:1]))
def test_pages_in_use_are_bounded_by_the_window(name: str, windows: tuple[int, ...], tmp_path: Path) -> None:
    """Pages of layers without one grow with the answer, those of the others do not."""
    write(name, tmp_path)
    made = served(str(tmp_path), ServeSpec(microbatches=1, rows=4, **SIZES))
    (ask,) = asks_of(60)
    used: list[int] = []

    async def watch(service: Service) -> None:
        used.extend([service.snapshot().pages_used async for _ in service.answer(ask)])

    with (
        own_code(made, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, made.shape), made.shape, ByteText()) as service,
    ):
        wait_for(watch(service))

    most = pages_for(155) + (len(windows) - 1) * (pages_for(WINDOW + 8) + 1)
    assert pages_for(150) < max(used) <= most < len(windows) * pages_for(150)


DIVIDED = some_of(
    [(*model, policy) for model in BY_MODEL for policy in ("prefill-decode", "layer-pipeline")],
    [(*BY_MODEL[0], policy) for policy in ("prefill-decode", "layer-pipeline")],
)


@pytest.mark.parametrize(("name", "windows", "policy"), DIVIDED)
def test_answers_of_two_workers_are_those_of_generate(
    policy: str, name: str, windows: tuple[int, ...], tmp_path: Path
) -> None:
    """Pages move from one to the other, or layers are divided among them."""
    write(name, tmp_path)
    spec = ServeSpec(
        2, 4, 160, 16, load=Load(48, 30), policies=(policy,), effort="quick", random_weights=True
    )
    made = prepare(str(tmp_path), wire(parse_devices("emu:a100,emu:l40s"), ["pcie4"]), spec)
    asks = asks_of(52, 40, 52, 17, 9, 60, tokens=examples(30, 12))
    with (
        made.workers() as stepper,
        Service(stepper, made.policies, made.model.shape, ByteText(), log=lambda line: None) as service,
    ):
        found = [told.numbers for told in wait_for(read_all(service, asks))]
        snapshot = service.snapshot()

    assert windows == made.model.shape.windows
    model = plain(tmp_path)
    assert [generated(model, ask) for ask in asks] == found
    assert (snapshot.pages_moved > 0) == (policy == "prefill-decode")
    assert policy == snapshot.policy


def test_more_sequences_fit_in_the_same_memory(tmp_path: Path) -> None:
    """A service whose sequences are chosen by memory has twice as many as with windows that never end."""
    rows = []
    for window in (WINDOW, 1000):
        write("gpt_oss", tmp_path, window)
        spec = ServeSpec(1, None, load=Load(100, 50), **SIZES)
        weights = sum(tensor.nbytes for tensor in served(str(tmp_path), spec).weights().values())
        each = 2 * PAGE * 2 * 8 * 4  # keys and values of a page: two heads of 8
        made = served(str(tmp_path), spec, room_bytes=[weights + 52 * 20 * each], pool_bytes=1 << 30)
        rows.append(made.shape.rows)
        assert state_bytes(made.workloads[-1]) <= 52 * 20 * each

    assert [64, 32] == rows


def test_a_request_may_be_as_long_as_the_pages_allow() -> None:
    """Layers with a window leave all of 64 pages but theirs to the others."""
    shape = Shape(1, 4, 10**6, (4, 8), PAGE * 65, 96, windows=(0, WINDOW))

    assert shape.max_tokens == PAGE * (64 - 3)
    assert replace(shape, windows=(0, 0)).max_tokens == PAGE * 32
    assert replace(shape, windows=(WINDOW,)).max_tokens == 10**6
