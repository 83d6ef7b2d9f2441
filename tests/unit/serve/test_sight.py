"""A vision-language model served by steps: equal to Hugging Face's own, alone and in a crowd."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from own_code import reference
from reference_stepper import ReferenceStepper
from seeing import running, tokens_of
from serving_factory import policies_of
from tessera.capture.models.vision import grid_of, grid_places, rotary
from tessera.execute.stepper import DeviceLost, Event, StepCall, StepDone
from tessera.serve.records import Ask, PromptPicture, Sampling, ServeSpec, Shape
from tessera.serve.service import Service
from tessera.serve.steps import ServedModel, served
from tessera.serve.text import ByteText

GREEDY = Sampling(temperature=0.0)
NUM = 6
PICTURE_TOKENS = 64
GRID = grid_of(PICTURE_TOKENS)


@cache
def model() -> ServedModel:
    """Steps shorter than a picture, so that one spans several."""
    return served("tiny-qwen2.5-vl", ServeSpec(microbatches=2, rows=2, capacity=240, max_batch_tokens=24))


def make_ask(seed: int, *places: int) -> Ask:
    """A question with pictures behind some of its words, or none; its length follows from the seed."""
    words = [256, *b"user:\nwhat about this picture and that?"[: 12 + 3 * seed]]
    encode = model().encode
    assert encode is not None
    prompt, pictures = list[int](), list[PromptPicture]()
    for number, word in enumerate(words):
        for place in (place for place in places if place == number):
            pixels = encode.make_inputs(seed + place)["pixel_values"]
            pictures.append(PromptPicture(len(prompt), pixels))
            prompt += [0] * PICTURE_TOKENS
        prompt.append(word)
    return Ask(tuple(prompt), NUM, GREEDY, ignores_end=True, pictures=tuple(pictures))


# Seeds of questions, and places of their pictures.
QUESTIONS = ((1, 1), (2,), (3, 5), (4, 12), (5,), (6, 1, 9))


@cache
def asks() -> list[Ask]:
    return [make_ask(*question) for question in QUESTIONS]


@cache
def expected(number: int) -> list[int]:
    """Answer to one of the questions."""
    return own_answer(asks()[number])


@torch.inference_mode()
def own_answer(ask: Ask) -> list[int]:
    """Greedy tokens of the library's own tower, positions and language model; all is read anew every time."""
    whole: Any = model().workloads[-1].module
    ids, grid = list(ask.prompt), torch.tensor([[1, 2 * GRID[0], 2 * GRID[1]]])
    starts = [picture.start for picture in ask.pictures]
    for _ in range(NUM):
        hidden = whole.model.language_model.embed_tokens(torch.tensor([ids])).clone()
        positions = torch.arange(len(ids)).repeat(3, 1, 1)
        for picture in ask.pictures:
            seen = whole.model.get_image_features(picture.pixels, grid).pooler_output
            hidden[0, picture.start : picture.start + PICTURE_TOKENS] = torch.cat(list(seen))
        if starts:
            positions = own_positions(whole, ids, starts)
        out = whole.model.language_model(inputs_embeds=hidden, position_ids=positions, use_cache=False)
        ids.append(int(whole.lm_head(out.last_hidden_state[:, -1]).argmax()))
    return ids[len(ask.prompt) :]


def own_positions(whole: Any, ids: list[int], starts: Sequence[int]) -> torch.Tensor:
    """The library's rotary positions, with an image token that the tiny vocabulary lacks."""
    token = whole.config.image_token_id
    grid = torch.tensor([[1, 2 * GRID[0], 2 * GRID[1]]] * len(starts))
    is_seen = [any(start <= i < start + PICTURE_TOKENS for start in starts) for i in range(len(ids))]
    marked = torch.tensor([[token if seen else i for i, seen in zip(ids, is_seen, strict=True)]])
    kinds = torch.tensor([is_seen]).int()
    found: torch.Tensor = whole.model.get_rope_index(marked, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
    return found


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model()) as service:
        yield service


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_answers_equal_the_librarys(service: Service, number: int) -> None:
    """Pictures anywhere in the prompt, across steps, or none: the tokens are Hugging Face's."""
    assert expected(number) == asyncio.run(tokens_of(service, asks()[number]))


def test_answers_in_a_crowd_are_those_given_alone(service: Service) -> None:
    """Sequences with and without pictures share steps, and each keeps its own."""

    async def together() -> list[list[int]]:
        return list(await asyncio.gather(*(tokens_of(service, ask) for ask in asks() * 2)))

    assert [expected(i) for i in range(len(QUESTIONS))] * 2 == asyncio.run(together())


def test_the_picture_matters() -> None:
    """The same words about another picture are another question."""
    first = make_ask(3, 5)
    other = replace(first, pictures=make_ask(4, 5).pictures)

    assert own_answer(first) != own_answer(other)


@pytest.mark.parametrize("starts", [(), (1,), (7,), (1, 70), (3, 80)])
def test_positions_are_the_librarys(starts: tuple[int, ...]) -> None:
    """Time, height and width of every token, before, in, between and behind pictures."""
    whole: Any = model().workloads[-1].module
    num = 200
    plain = torch.arange(num).repeat(3, 1, 1)

    wanted = own_positions(whole, [5] * num, starts) if starts else plain

    assert torch.equal(
        wanted[:, 0], torch.from_numpy(rotary(np.arange(num), starts, grid_places(PICTURE_TOKENS)))
    )


def test_pictures_are_part_of_what_is_found_again(service: Service) -> None:
    """The same words about another picture begin otherwise; about the same one, its tokens are there."""
    ask, before = make_ask(3, 5), service.snapshot().prefix_hits
    asyncio.run(tokens_of(service, replace(ask, pictures=make_ask(4, 6).pictures)))
    other = service.snapshot().prefix_hits - before
    found = asyncio.run(tokens_of(service, ask))
    again = asyncio.run(tokens_of(service, ask))

    assert 0 == other
    assert own_answer(ask) == found == again
    assert service.snapshot().prefix_hits >= before + PICTURE_TOKENS


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
        stepper: Any = Forgetful(inner, 0)
        with Service(
            stepper,
            policies_of(stepper, made.shape),
            made.shape,
            ByteText(),
            picture_inputs=made.picture_inputs,
        ) as running:
            found = asyncio.run(tokens_of(running, asks()[2]))

    assert expected(2) == found
    assert 2 == stepper.encodes


def test_a_model_without_eyes_sees_nothing() -> None:
    """There is nothing to encode for a model that reads text."""
    assert ServedModel("x", Shape(1, 1, 8, (1, 2), 32, 258), ()).picture_inputs is None
