"""The next token: distributions, limits, biases, penalties, seeds and logprobs."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from sampling import examples, some_of
from serving_factory import choose_rows
from tessera.kernels.choose import _edited, _limit, philox
from tessera.serve.records import Ask, Sampling, Token
from tessera.serve.sampling import Choice, ChoiceInputs, Edits, Pick

LOGITS = torch.tensor([0.0, math.log(4.0), math.log(3.0), math.log(2.0)])


def pick(
    prompt: tuple[int, ...] = (),
    answer: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **options: Any,
) -> Pick:
    """The pick of a request that has a prompt and a part of its answer."""
    ask = Ask(prompt, 99, Sampling(**{"seed": 0, **options}), min_tokens=9 if banned else 0)
    found = Pick.of(ask, banned)
    for number in answer:
        found.add(number)
    return found


def numbers(logits: torch.Tensor, one: Pick, times: int) -> Counter[int]:
    """How often each token was chosen, at so many positions."""
    found: Counter[int] = Counter()
    rows = min(times, 500)
    for start in range(0, times, rows):
        chosen = choose_rows(logits.expand(rows, -1), [one] * rows, range(start, start + rows))
        found.update(token.number for token in chosen if token is not None)
    return found


def test_philox_is_the_published_generator() -> None:
    """Known answers of Random123: counters and keys of zeros and ones."""
    zeros = torch.zeros(1, dtype=torch.int64)
    words = philox(zeros, zeros, zeros)[:, 0].tolist()

    assert [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8] == words


LIMITS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_k": 10, "temperature": 1.5},
    {"top_p": 0.8},
    {"top_p": 0.5, "temperature": 1.5},
    {"min_p": 0.2},
    {"min_p": 0.05, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.5, "presence_penalty": 0.4, "prompt": (29, 28), "answer": (27, 27)},
    {"logit_bias": ((3, 2.0), (29, -100.0))},
]


@pytest.mark.parametrize("options", some_of(LIMITS, LIMITS[-3:-1]), ids=str)
def test_tokens_come_as_often_as_their_probability(options: dict[str, Any]) -> None:
    """Chi-square of 10,000 draws (2,000 in a sample) from 30 tokens, under each limit."""
    logits, num, one = torch.linspace(-2.0, 2.0, 30), examples(10_000, 2_000), pick(**options)
    choices = ChoiceInputs(1, 30).fill(1, [Choice(0, one, 0)])
    settings, row = choices["settings"][0].tolist(), choices["numbers"][0].tolist()
    tables = choices["edits"].numpy(), choices["masks"].numpy()
    edited = _edited(logits.numpy(), 0, settings, row, *tables)
    scaled = (edited - edited.max()) * settings[0]
    kept = torch.from_numpy(np.where(scaled < _limit(scaled, settings, row), -np.inf, scaled))
    wanted = num * kept.double().softmax(-1)
    found = numbers(logits, one, num)

    assert set(found) <= set(kept.isfinite().nonzero()[:, 0].tolist())
    # Tokens that are rare count together.
    rare = wanted < 10
    cells = [(found[i], float(wanted[i])) for i in range(30) if not rare[i]]
    cells.append((sum(found[i] for i in range(30) if rare[i]), float(wanted[rare].sum())))
    square = sum((seen - w) ** 2 / w for seen, w in cells if w > 1)
    freedom = max(1, sum(w > 1 for _, w in cells) - 1)
    # A bound that holds for any degrees of freedom (Wilson and Hilferty).
    assert square < freedom * (1 - 2 / (9 * freedom) + 3.1 * math.sqrt(2 / (9 * freedom))) ** 3


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
        ({"top_p": 0.0}, {1}),
        # The two that are left have 4/7 and 3/7.
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1, 2}),
        ({"temperature": 1e-4}, {1}),
        ({"temperature": 1e-44}, {1}),
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
    one = pick(seed=7, temperature=0.9, top_p=0.95, top_k=50)
    others = [pick(seed=1), pick(top_p=0.99), pick(temperature=0.0), pick(seed=4, top_k=7, logprobs=2)]
    for at, step in enumerate(logits):
        alone = choose_rows(step[2:3], [one], [at])
        crowd = choose_rows(step, [*others[:2], one, *others[2:]], [0, 1, at, 3, 4])
        assert alone == crowd[2:3]


def test_seeds_and_positions_differ() -> None:
    """Each gives draws of its own."""
    logits = torch.zeros(100_000)
    drawn = [choose_rows(logits[None], [pick(seed=seed)], [at])[0] for seed in range(5) for at in range(5)]

    assert 25 == len(set(drawn))


def test_top_p_of_a_flat_distribution_looks_at_all_tokens() -> None:
    """However many tokens are needed."""
    logits = torch.linspace(0.0, 0.1, 2048)
    found = numbers(logits, pick(top_p=0.9), 200)

    assert min(found) > 0.05 * len(logits)
    assert min(found) < 0.2 * len(logits)


def test_banned_tokens_are_not_chosen() -> None:
    """Greedy takes the next best, and a draw never takes them, until the answer is long enough."""
    assert {2: 1} == numbers(LOGITS, pick(temperature=0.0, banned=(1,)), 1)
    assert {0, 3} == set(numbers(LOGITS, pick(banned=(1, 2)), 100))
    assert [Token(1)] == choose_rows(LOGITS[None], [pick(temperature=0.0, banned=(1,), answer=(0,) * 9)])
    eight = pick(temperature=0.0, banned=(1,), answer=(0,) * 8)
    assert [Token(1)] == choose_rows(LOGITS[None], [eight], num_due=1)


def test_logprobs_are_the_models_own() -> None:
    """Before temperature and limits; the likeliest first, and as many as were asked for."""
    one, two, three, four = choose_rows(
        torch.stack([LOGITS] * 4),
        [
            pick(temperature=0.0, logprobs=2),
            pick(temperature=0.0, logprobs=0),
            pick(top_k=1, logprobs=9),
            pick(temperature=0.0),
        ],
    )
    assert isinstance(one, Token)
    assert isinstance(two, Token)
    assert isinstance(three, Token)

    assert 1 == one.number
    assert 0.4 == pytest.approx(math.exp(one.logprob or 0.0))
    assert [1, 2] == [number for number, _ in one.top]
    assert [0.4, 0.3] == pytest.approx([math.exp(p) for _, p in one.top])
    assert () == two.top
    assert two.logprob == one.logprob
    assert [1, 2, 3, 0] == [number for number, _ in three.top[:4]]
    assert Token(1) == four


def test_logprobs_do_not_depend_on_what_was_changed() -> None:
    """Bans, biases and penalties choose another token; its logprob is the model's own."""
    options: dict[str, Any] = {"frequency_penalty": 2.0, "logit_bias": ((3, 1.0),)}
    (token,) = choose_rows(LOGITS[None], [pick(answer=(1,), temperature=0.0, logprobs=1, **options)])

    assert isinstance(token, Token)
    assert 3 == token.number
    assert 0.2 == pytest.approx(math.exp(token.logprob or 0.0))
    assert [1] == [number for number, _ in token.top]


def test_a_bias_is_added_to_its_logit() -> None:
    """So much more likely becomes a token, and -100 keeps it out."""
    assert {0: 1} == numbers(LOGITS, pick(temperature=0.0, logit_bias=((0, 2.0),)), 1)
    assert {0, 3} == set(numbers(LOGITS, pick(logit_bias=((1, -100.0), (2, -100.0))), 200))


def edited(logits: torch.Tensor, one: Pick, num_due: int = 0, last: int = 0) -> torch.Tensor:
    """Logits of a row after biases and penalties."""
    tables = ChoiceInputs(1, len(logits)).fill(1, [Choice(0, one, 0, num_due)])
    row = tables["settings"][0].tolist(), tables["numbers"][0].tolist()
    arrays = tables["edits"].numpy(), tables["masks"].numpy()
    return torch.from_numpy(_edited(logits.numpy(), last, *row, *arrays))


def test_tokens_of_the_answer_are_penalised_and_those_of_the_prompt_are_not() -> None:
    """Presence counts once, frequency every time; a penalty below 0 favours."""
    picks = [
        pick((3,), (0, 0, 1), presence_penalty=0.5),
        pick((3,), (0, 0, 1), frequency_penalty=0.5),
        pick((3,), (2,), presence_penalty=-1.0, frequency_penalty=-0.5),
        pick((3,), (), presence_penalty=1.0),
    ]

    expected = [[-0.5, -0.5, 0, 0], [-1.0, -0.5, 0, 0], [0, 0, 1.5, 0], [0, 0, 0, 0]]
    assert expected == [edited(torch.zeros(4), one).tolist() for one in picks]


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_a_token_that_is_not_known_yet_is_counted_when_it_is_read(last: int) -> None:
    """A step planned ahead penalises like one planned after the token was chosen."""
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5])
    options: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": ((3, 1.0),),
    }
    ahead = edited(logits, pick((0,), (1, 1), **options), num_due=1, last=last)

    assert torch.equal(edited(logits, pick((0,), (1, 1, last), **options)), ahead)


def test_repetition_penalty_is_hugging_faces() -> None:
    """For tokens of the prompt and the answer, each once, whatever the sign of its logit."""
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    given = [[1, 2, 2, 3, 40, 41], [5, 5, 6, 7, 8, 9]]
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(given), logits.clone())
    picks = [pick(tuple(x[:3]), tuple(x[3:]), repetition_penalty=1.7) for x in given]
    ours = torch.stack([edited(row, one) for row, one in zip(logits, picks, strict=True)])

    torch.testing.assert_close(theirs, ours)


def kept_of(logits: torch.Tensor, one: Pick) -> torch.Tensor:
    """Scaled logits of a row; minus infinity for those that limits exclude."""
    tables = ChoiceInputs(1, len(logits)).fill(1, [Choice(0, one, 0)])
    settings, row = tables["settings"][0].tolist(), tables["numbers"][0].tolist()
    scaled: torch.Tensor = (logits - logits.max()) * settings[0]
    return scaled.masked_fill(scaled < _limit(scaled.numpy(), settings, row), -torch.inf)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_min_p_is_hugging_faces(share: float) -> None:
    """What is left is what its warper leaves."""
    transformers = pytest.importorskip("transformers")
    logits = 3.0 * torch.randn(20, 400, generator=torch.Generator().manual_seed(4))
    theirs = transformers.MinPLogitsWarper(share)(None, logits.clone())
    ours = torch.stack([kept_of(row, pick(min_p=share)) for row in logits])

    assert torch.equal(theirs.isfinite(), ours.isfinite())


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
    options: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "temperature": temperature}
    ours = torch.stack([kept_of(row, pick(**options)) for row in logits])

    assert torch.equal(theirs.isfinite(), ours.isfinite())
    torch.testing.assert_close(theirs.softmax(-1), ours.softmax(-1))


def test_a_row_is_penalised_alike_in_any_crowd() -> None:
    """Whoever is beside it, and whatever they ask for."""
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(5))
    options: dict[str, Any] = {"presence_penalty": 0.7, "repetition_penalty": 1.3, "min_p": 0.02, "seed": 3}
    alone = choose_rows(logits[1:2], [pick((1, 2), (3, 3), **options)])
    others = [pick((), (5,), frequency_penalty=1.0), pick(logit_bias=((3, 9.0),))]
    crowd = choose_rows(logits, [others[0], pick((1, 2), (3, 3), **options), others[1]])

    assert alone == crowd[1:2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told(bad: float, temperature: float) -> None:
    """That row gets nothing; the others get theirs."""
    broken = LOGITS.clone()
    broken[2] = bad

    assert [None, Token(1)] == choose_rows(
        torch.stack([broken, LOGITS]), [pick(temperature=temperature), pick(top_k=1)]
    )


def test_edits_beyond_the_vocabulary_are_ignored() -> None:
    """An end token that the model has no logit for."""
    assert [Token(2)] == choose_rows(LOGITS[None], [pick(temperature=0.0, banned=(1, 4, 900))])


def test_every_token_of_a_long_prompt_is_penalised() -> None:
    """Biases, bans and counts stay with their tokens as the table grows."""
    edits = Edits({n: float(n) for n in range(40)}, prompt=range(100))
    edits.ban(tuple(range(90, 140)))
    for number in range(200):
        edits.add(number)

    entries = {int(number): (int(count), int(bias)) for number, count, bias in edits.entries}
    banned = int(np.float32(-np.inf).view(np.int32))
    assert list(range(200)) == sorted(entries)
    assert {1} == {count for count, _ in entries.values()}
    assert set(range(90, 140)) == {number for number, (_, bias) in entries.items() if bias == banned}
    assert all(entries[n][1] == int(np.float32(n).view(np.int32)) for n in range(40))
