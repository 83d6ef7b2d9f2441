"""The next token: distributions, limits, biases, penalties, seeds and logprobs."""

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from tessera.serve.records import Ask, Sampling, Token
from tessera.serve.sampling import (
    TOP_P_GLANCE,
    Pick,
    _keep_min_p,
    _keep_top_k,
    _keep_top_p,
    _penalise,
    choose,
)

LOGITS = torch.tensor([0.0, math.log(4.0), math.log(3.0), math.log(2.0)])


def pick(seed: int = 0, banned: tuple[int, ...] = (), **options: Any) -> Pick:
    """A pick with a generator of its own."""
    return Pick(Sampling(**options), random.Random(seed), banned, min_tokens=len(banned))


def following(prompt: tuple[int, ...], answer: tuple[int, ...], **options: Any) -> Pick:
    """The pick of a request that has a prompt and a part of its answer."""
    found = Pick.of(Ask(prompt, 9, Sampling(**options)), ())
    for number in answer:
        found.add(number)
    return found


def numbers(logits: torch.Tensor, one: Pick, times: int) -> Counter[int]:
    """How often each token was chosen."""
    found: Counter[int] = Counter()
    for _ in range(times):
        (token,) = choose(logits[None].clone(), [0], [0], [one])
        assert token is not None
        found[token.number] += 1
    return found


def test_greedy_takes_the_models_own_choice() -> None:
    """Without a look at the logits."""
    assert [Token(7)] == choose(None, [3, 7], [1], [pick(temperature=0.0)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    """Within four standard errors, at any temperature."""
    num = 1500
    found = numbers(LOGITS, pick(temperature=temperature), num)
    share = (LOGITS / temperature).softmax(-1).tolist()

    for token, p in enumerate(share):
        assert abs(found[token] - num * p) < 4 * math.sqrt(num * p * (1 - p))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 2}),
        ({"top_p": 0.71}, {1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        # The two that are left have 4/7 and 3/7.
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1, 2}),
        ({"temperature": 1e-4}, {1}),
    ],
)
def test_limits_keep_the_most_probable(options: dict[str, Any], kept: set[int]) -> None:
    """Top-k, then top-p of what is left; nothing else is ever drawn, and all that is kept comes."""
    assert kept == set(numbers(LOGITS, pick(**options), 300))


def test_equal_logits_stay_together() -> None:
    """A limit between equals keeps all of them: no order of sorting decides."""
    assert {1, 2} == set(numbers(torch.tensor([0.0, 1.0, 1.0]), pick(top_k=1), 100))


def test_a_seed_gives_the_same_tokens_in_any_crowd() -> None:
    """The same row alone, and among others of other kinds, for many draws."""
    logits = torch.randn(40, 5, 600, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
    alone, crowd = pick(7, **options), pick(7, **options)
    others = [pick(1), pick(2, top_p=0.99), pick(3, temperature=0.0), pick(4, top_k=7, logprobs=2)]
    for step in logits:
        greedy = step.argmax(-1).tolist()
        (one,) = choose(step.clone(), greedy, [2], [alone])
        many = choose(step.clone(), greedy, [0, 1, 2, 3, 4], [*others[:2], crowd, *others[2:]])
        assert one == many[2]


def test_top_p_of_a_flat_distribution_looks_at_all_tokens() -> None:
    """Where the largest logits do not reach the share, the whole vocabulary is sorted."""
    logits = torch.linspace(0.0, 0.1, 4 * TOP_P_GLANCE)
    found = numbers(logits, pick(top_p=0.9), 200)

    assert min(found) > 0.05 * len(logits)
    assert min(found) < 0.2 * len(logits)


def test_banned_tokens_are_not_chosen() -> None:
    """Greedy takes the next best, and a draw never takes them."""
    assert {2: 1} == numbers(LOGITS, pick(temperature=0.0, banned=(1,)), 1)
    assert {0, 3} == set(numbers(LOGITS, pick(banned=(1, 2)), 100))


def test_logprobs_are_the_models_own() -> None:
    """Before temperature and limits; the likeliest first, and as many as were asked for."""
    one, two, three = choose(
        torch.stack([LOGITS, LOGITS, LOGITS]),
        [1, 1, 1],
        [0, 1, 2],
        [pick(temperature=0.0, logprobs=2), pick(temperature=0.0, logprobs=0), pick(top_k=1, logprobs=9)],
    )
    assert one is not None
    assert two is not None
    assert three is not None

    assert 1 == one.number
    assert 0.4 == pytest.approx(math.exp(one.logprob or 0.0))
    assert [1, 2] == [number for number, _ in one.top]
    assert [0.4, 0.3] == pytest.approx([math.exp(p) for _, p in one.top])
    assert () == two.top
    assert two.logprob == one.logprob
    assert [1, 2, 3, 0] == [number for number, _ in three.top]


def test_logprobs_do_not_depend_on_what_was_changed() -> None:
    """Bans, biases and penalties choose another token; its logprob is the model's own."""
    one = following((), (1,), temperature=0.0, logprobs=1, frequency_penalty=2.0, logit_bias=((3, 1.0),))
    (token,) = choose(LOGITS[None].clone(), [1], [0], [one])

    assert token is not None
    assert 3 == token.number
    assert 0.2 == pytest.approx(math.exp(token.logprob or 0.0))
    assert [1] == [number for number, _ in token.top]


def test_a_bias_is_added_to_its_logit() -> None:
    """So much more likely becomes a token, and -100 keeps it out."""
    assert {0: 1} == numbers(LOGITS, pick(temperature=0.0, logit_bias=((0, 2.0),)), 1)
    assert {0, 3} == set(numbers(LOGITS, pick(logit_bias=((1, -100.0), (2, -100.0))), 200))


def test_tokens_of_the_answer_are_penalised_and_those_of_the_prompt_are_not() -> None:
    """Presence counts once, frequency every time; a penalty below 0 favours."""
    rows = torch.zeros(4, 4)
    _penalise(
        rows,
        [
            following((3,), (0, 0, 1), presence_penalty=0.5),
            following((3,), (0, 0, 1), frequency_penalty=0.5),
            following((3,), (2,), presence_penalty=-1.0, frequency_penalty=-0.5),
            following((3,), (), presence_penalty=1.0),
        ],
    )

    expected = [[-0.5, -0.5, 0, 0], [-1.0, -0.5, 0, 0], [0, 0, 1.5, 0], [0, 0, 0, 0]]
    assert expected == rows.tolist()


def test_repetition_penalty_is_hugging_faces() -> None:
    """For tokens of the prompt and the answer, each once, whatever the sign of its logit."""
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    tokens = [[1, 2, 2, 3, 40, 41], [5, 5, 6, 7, 8, 9]]
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(tokens), logits.clone())
    picks = [following(tuple(x[:3]), tuple(x[3:]), repetition_penalty=1.7) for x in tokens]
    _penalise(logits, picks)

    torch.testing.assert_close(theirs, logits)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_min_p_is_hugging_faces(share: float) -> None:
    """What is left is what its warper leaves."""
    transformers = pytest.importorskip("transformers")
    logits = 3.0 * torch.randn(20, 400, generator=torch.Generator().manual_seed(4))
    theirs = transformers.MinPLogitsWarper(share)(None, logits.clone())
    ours = logits - logits.amax(-1, keepdim=True)
    _keep_min_p(ours, [share] * len(ours))

    assert torch.equal(theirs.isfinite(), ours.isfinite())


def test_a_row_is_penalised_alike_in_any_crowd() -> None:
    """Whoever is beside it, and whatever they ask for."""
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(5))
    options: dict[str, Any] = {"presence_penalty": 0.7, "repetition_penalty": 1.3, "min_p": 0.02, "seed": 3}
    (alone,) = choose(logits.clone(), [0] * 3, [1], [following((1, 2), (3, 3), **options)])
    others = [following((), (5,), frequency_penalty=1.0), following((), (), logit_bias=((3, 9.0),))]
    crowd = choose(
        logits.clone(), [0] * 3, [0, 1, 2], [others[0], following((1, 2), (3, 3), **options), others[1]]
    )

    assert alone == crowd[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_told(bad: float) -> None:
    """That row gets nothing; the others get theirs."""
    broken = LOGITS.clone()
    broken[2] = bad

    assert [None, Token(1)] == choose(torch.stack([broken, LOGITS]), [0, 1], [0, 1], [pick(), pick(top_k=1)])


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 0.7, 1.0), (20, 1.0, 0.7), (50, 0.9, 1.3), (5, 0.3, 0.5)]
)
def test_limits_are_hugging_faces(top_k: int, top_p: float, temperature: float) -> None:
    """The tokens that are left are those of its processors, in their order."""
    transformers = pytest.importorskip("transformers")
    logits = 3.0 * torch.randn(20, 400, generator=torch.Generator().manual_seed(2))
    theirs = transformers.TemperatureLogitsWarper(temperature)(None, logits)
    theirs = transformers.TopKLogitsWarper(top_k)(None, theirs) if top_k else theirs
    theirs = transformers.TopPLogitsWarper(top_p)(None, theirs) if top_p < 1.0 else theirs
    ours = (logits - logits.amax(-1, keepdim=True)) / temperature
    _keep_top_k(ours, [top_k] * len(ours))
    _keep_top_p(ours, [top_p] * len(ours))

    assert torch.equal(theirs.isfinite(), ours.isfinite())
    torch.testing.assert_close(theirs.softmax(-1), ours.softmax(-1))
