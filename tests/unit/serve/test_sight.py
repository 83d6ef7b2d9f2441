"""A vision-language model served by steps: equal to Hugging Face's own, alone and in a crowd."""

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tessera.capture.models.seeing import PICTURE_TOKENS
from tessera.execute.reference import ReferenceStepper
from tessera.execute.stepper import DeviceLost, Event, StepCall, StepDone
from tessera.serve.records import Ask, Finish, PromptPicture, Sampling, Shape
from tessera.serve.service import Service
from tessera.serve.sight import GRID, rotary, sight_of
from tessera.serve.steps import ServedModel, reference, served
from tessera.serve.text import ByteText

GREEDY = Sampling(temperature=0.0)
NUM = 6


@cache
def model() -> ServedModel:
    """Chunks shorter than a picture, so that one spans several."""
    return served("tiny-qwen2.5-vl", slots=2, rows=2, capacity=160, chunk=24)


def make_ask(seed: int, start: int | None) -> Ask:
    """A question with a picture somewhere, or none; its length follows from the seed."""
    words = list(b"user:\nwhat about this picture and that?"[: 12 + 3 * seed])
    if start is None:
        return Ask((256, *words), NUM, GREEDY, ignores_end=True)
    patches = model().workloads["encode"].make_inputs(seed)["patches"]
    prompt = (256, *words[: start - 1], *[0] * PICTURE_TOKENS, *words[start - 1 :])
    return Ask(prompt, NUM, GREEDY, ignores_end=True, picture=PromptPicture(start, patches))


ASKS = [make_ask(1, 1), make_ask(2, None), make_ask(3, 5), make_ask(4, 12), make_ask(5, None), make_ask(6, 1)]


@cache
def expected(number: int) -> list[int]:
    """Of one of the questions."""
    return own_answer(ASKS[number])


@torch.inference_mode()
def own_answer(ask: Ask) -> list[int]:
    """Greedy tokens of the library's own tower, positions and language model; all is read anew every time."""
    whole: Any = model().workloads["decode"].module
    ids, grid = list(ask.prompt), torch.tensor([[1, 2 * GRID[0], 2 * GRID[1]]])
    for _ in range(NUM):
        hidden = whole.model.language_model.embed_tokens(torch.tensor([ids])).clone()
        positions = torch.arange(len(ids)).repeat(3, 1, 1)
        if ask.picture is not None:
            seen = whole.model.get_image_features(ask.picture.patches, grid).pooler_output
            start, stop = ask.picture.start, ask.picture.start + PICTURE_TOKENS
            hidden[0, start:stop] = torch.cat(list(seen))
            positions = own_positions(whole, ids, start, grid)
        out = whole.model.language_model(inputs_embeds=hidden, position_ids=positions, use_cache=False)
        ids.append(int(whole.lm_head(out.last_hidden_state[:, -1]).argmax()))
    return ids[len(ask.prompt) :]


def own_positions(whole: Any, ids: list[int], start: int, grid: torch.Tensor) -> torch.Tensor:
    """The library's rotary positions, with an image token that the tiny vocabulary lacks."""
    token = whole.config.image_token_id
    is_seen = [start <= i < start + PICTURE_TOKENS for i in range(len(ids))]
    marked = torch.tensor([[token if seen else i for i, seen in zip(ids, is_seen, strict=True)]])
    kinds = torch.tensor([is_seen]).int()
    found: torch.Tensor = whole.model.get_rope_index(marked, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
    return found


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = model()
    with (
        reference(made, num_threads=1) as stepper,
        Service(stepper, made.shape, ByteText(), model="tiny-qwen2.5-vl", sight=sight_of(made)) as running,
    ):
        yield running


async def tokens_of(service: Service, ask: Ask) -> list[int]:
    """The answer's tokens."""
    found: list[int] = []
    async for event in service.answer(ask):
        if isinstance(event, Finish):
            assert event.reason == "length"
        else:
            found += [token.number for token in event.tokens]
    return found


@pytest.mark.parametrize("number", range(len(ASKS)))
def test_answers_equal_the_librarys(service: Service, number: int) -> None:
    """A picture anywhere in the prompt, across chunks, or none: the tokens are Hugging Face's."""
    assert expected(number) == asyncio.run(tokens_of(service, ASKS[number]))


def test_answers_in_a_crowd_are_those_given_alone(service: Service) -> None:
    """Rows with and without pictures share batches, and each keeps its own."""

    async def together() -> list[list[int]]:
        return list(await asyncio.gather(*(tokens_of(service, ask) for ask in ASKS * 2)))

    assert [expected(i) for i in range(len(ASKS))] * 2 == asyncio.run(together())


def test_the_picture_matters() -> None:
    """The same words about another picture are another question."""
    first = make_ask(3, 5)
    other = Ask(first.prompt, NUM, GREEDY, picture=make_ask(4, 5).picture)

    assert own_answer(first) != own_answer(other)


@pytest.mark.parametrize("start", [None, 1, 7])
def test_positions_are_the_librarys(start: int | None) -> None:
    """Time, height and width of every token, before, in and behind a picture."""
    whole: Any = model().workloads["decode"].module
    num = 100
    grid = torch.tensor([[1, 2 * GRID[0], 2 * GRID[1]]])
    plain = torch.arange(num).repeat(3, 1, 1)

    wanted = plain if start is None else own_positions(whole, [5] * num, start, grid)

    assert torch.equal(wanted, rotary(torch.arange(num)[None], start))


class Forgetful:
    """Around a stepper: its first encode never ends, for its device is lost and back at once."""

    def __init__(self, inner: ReferenceStepper, encode: int) -> None:
        self._inner, self._encode = inner, encode
        self.encodes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, call: StepCall) -> None:
        self.encodes += call.step == self._encode
        self._inner.start(call)

    def take(self, timeout_s: float | None) -> Event | None:
        event = self._inner.take(timeout_s)
        if isinstance(event, StepDone) and event.step == self._encode and self.encodes == 1:
            self._inner.close(event.microbatch)
            return DeviceLost("cpu", (event.microbatch,), "it is gone")
        return event


def test_a_picture_is_encoded_again_after_a_loss() -> None:
    """A request whose device is lost while its picture is encoded starts anew and answers as always."""
    made = model()
    with reference(made, num_threads=1) as inner:
        stepper: Any = Forgetful(inner, list(made.workloads).index("encode"))
        with Service(stepper, made.shape, ByteText(), sight=sight_of(made)) as running:
            found = asyncio.run(tokens_of(running, ASKS[2]))

    assert expected(2) == found
    assert 2 == stepper.encodes


def test_a_model_without_eyes_sees_nothing() -> None:
    """There is nothing to encode for a model that reads text."""
    assert sight_of(ServedModel("x", Shape(1, 1, 8, 4, 258), {})) is None
