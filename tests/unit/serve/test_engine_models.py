"""The engine on real models: greedy answers are Hugging Face's own, sampled ones depend on their seed."""

import asyncio
import copy
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.coverage_models import MODELS

from own_code import reference as own_code
from paged_mixer import plain_model
from sampling import examples, some_of
from serving_factory import GREEDY, generated, policies_of, random_ask, read, read_all, read_some, wait_for
from tessera.serve.records import Ask, Sampling, ServeSpec
from tessera.serve.service import Service
from tessera.serve.steps import ServedModel, served
from tessera.serve.text import ByteText

CAPACITY = 32
transformers = pytest.importorskip("transformers")


NAMES = ("tiny-llama", "tiny-gpt-oss", "tiny-mamba")


@pytest.fixture(scope="module", params=some_of(NAMES, NAMES[1:]))
def model(request: pytest.FixtureRequest) -> ServedModel:
    """Steps of 8 tokens, so that most prompts need several."""
    return served(request.param, ServeSpec(microbatches=2, rows=4, capacity=CAPACITY, max_batch_tokens=8))


@pytest.fixture
def service(model: ServedModel) -> Iterator[Service]:
    """The model itself behind the engine."""
    with (
        own_code(model, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, model.shape), model.shape, ByteText()) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def reference(model: ServedModel) -> Any:
    """The same weights as Hugging Face runs them, product by product, with its own masks and attention."""
    module: Any = served(model.model, ServeSpec(rows=4, capacity=CAPACITY, joined=False)).workloads[-1].module
    if model.model == "tiny-mamba":
        return module
    made = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(module.config), attn_implementation="eager", dtype=torch.float32
    )
    made.load_state_dict(module.state_dict())
    return made.eval()


def test_greedy_is_hugging_faces_generate(reference: Any, service: Service) -> None:
    """Token for token, in a crowd of prompts of all lengths, of late comers and of some that go away."""
    rng = random.Random(3)
    asks = [random_ask(rng, CAPACITY, sampling=GREEDY, stop=()) for _ in range(examples(8, 5))]

    async def late(ask: Ask) -> list[int]:
        await asyncio.sleep(rng.random() * 0.3)
        return (await read(service, ask)).numbers

    async def crowd() -> list[list[int]]:
        gone = [read_some(service, random_ask(rng, CAPACITY), rng.randrange(4)) for _ in range(4)]
        going = asyncio.gather(*gone)
        found = await asyncio.gather(*map(late, asks))
        await going
        return list(found)

    assert [generated(reference, ask) for ask in asks] == wait_for(crowd())


def test_greedy_is_the_same_with_few_pages_and_shared_beginnings(model: ServedModel, reference: Any) -> None:
    """Answers that are put aside and go on, from prompts that begin alike: Hugging Face's tokens."""
    rng = random.Random(4)
    begin = tuple(rng.randrange(256) for _ in range(20))
    lengths = (0, 1, 7, 2)
    prompts = [begin + tuple(rng.randrange(256) for _ in range(length)) for length in lengths]
    asks = [Ask(prompt, 16, GREEDY, ignores_end=True) for prompt in prompts]
    pool = 16 * (1 + sum(3 if window else 5 for window in model.shape.windows))
    few = served(
        model.model, ServeSpec(microbatches=1, rows=4, capacity=80, max_batch_tokens=8, pool_tokens=pool)
    )
    with (
        own_code(few, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, few.shape), few.shape, ByteText()) as service,
    ):
        found = [told.numbers for _ in range(2) for told in wait_for(read_all(service, asks))]
        snapshot = service.snapshot()

    assert [generated(reference, ask) for ask in asks] * 2 == found
    assert snapshot.preemptions > 0
    assert (snapshot.prefix_hits > 0) == few.shape.is_paged


@pytest.mark.parametrize("model", some_of(NAMES[:2], ["tiny-gpt-oss"]), indirect=True)
def test_short_prompts_in_steps_of_answers_are_continued_as_by_generate(
    model: ServedModel, reference: Any
) -> None:
    """Some of 16 rows are tokens of one prompt, behind a window too."""
    wide = served(model.model, ServeSpec(microbatches=1, rows=16, capacity=64, max_batch_tokens=32))
    rng = random.Random(6)
    prompts = [tuple(rng.randrange(256) for _ in range(length)) for length in (3, 5, 14, 34, 37)]
    asks = [Ask(prompt, 12, GREEDY, ignores_end=True) for prompt in prompts]
    with (
        own_code(wide, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, wide.shape), wide.shape, ByteText()) as service,
    ):
        alone = [wait_for(read(service, ask)).numbers for ask in asks]
        together = [told.numbers for told in wait_for(read_all(service, asks))]

    assert [generated(reference, ask) for ask in asks] == alone == together


@pytest.mark.parametrize("model", some_of(NAMES, ["tiny-mamba"]), indirect=True)
def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(service: Service) -> None:
    """With temperature, top-p and logprobs."""
    ask = Ask((5, 6, 7), 20, Sampling(0.8, 0.95, 0, seed=11, logprobs=2), ignores_end=True)
    rng = random.Random(5)
    alone = wait_for(read(service, ask))
    crowd = wait_for(read_all(service, [*(random_ask(rng, CAPACITY) for _ in range(7)), ask, ask]))

    assert alone.numbers == crowd[-1].numbers == crowd[-2].numbers
    assert alone.text == crowd[-1].text
    for one, other in zip(alone.tokens, crowd[-1].tokens, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("model", some_of(NAMES, ["tiny-gpt-oss"]), indirect=True)
def test_a_seed_gives_the_same_answer_after_preemption(model: ServedModel) -> None:
    """With temperature and penalties, alone with all pages and beside others with few."""
    sampling = Sampling(0.9, 0.95, 40, seed=12, repetition_penalty=1.2, frequency_penalty=0.3)
    asks = [Ask((5, 6, 7 + n), 18, sampling, ignores_end=True) for n in range(4)]
    sizes: dict[str, Any] = {"capacity": 80, "max_batch_tokens": 8}
    found = []
    few = 16 * (1 + sum(2 if window else 5 for window in model.shape.windows))
    for pool, groups in ((16 * 40, [[ask] for ask in asks]), (few, [asks])):
        some = served(model.model, ServeSpec(microbatches=1, rows=4, pool_tokens=pool, **sizes))
        with (
            own_code(some, num_threads=1) as stepper,
            Service(stepper, policies_of(stepper, some.shape), some.shape, ByteText()) as service,
        ):
            told = [one for group in groups for one in wait_for(read_all(service, group))]
            found.append([one.numbers for one in told])
            preemptions = service.snapshot().preemptions

    assert found[0] == found[1]
    assert preemptions > 0


def test_pages_behind_the_window_are_given_to_others(tmp_path: Path) -> None:
    """Answers that would not fit side by side go on side by side, and are Hugging Face's own."""
    mistral = next(model for model in MODELS if model.name == "mistral")
    dataclasses.replace(mistral, sizes={**mistral.sizes, "sliding_window": 20}).write(tmp_path)
    sizes: dict[str, Any] = {"capacity": 128, "max_batch_tokens": 8, "random_weights": True}
    made = served(str(tmp_path), ServeSpec(microbatches=1, rows=4, pool_tokens=16 * 14, **sizes))
    plain = plain_model(
        served(str(tmp_path), ServeSpec(microbatches=1, rows=4, joined=False, **sizes)).workloads[-1].module
    )
    rng = random.Random(5)
    asks = [
        Ask(tuple(rng.randrange(3, 90) for _ in range(n)), 90, GREEDY, ignores_end=True) for n in (3, 9, 17)
    ]
    with (
        own_code(made, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, made.shape), made.shape, ByteText()) as service,
    ):
        found = [told.numbers for told in wait_for(read_all(service, asks))]
        snapshot = service.snapshot()

    assert made.shape.windows == (20,)
    assert [generated(plain, ask) for ask in asks] == found
    assert snapshot.preemptions == 0
