"""What a microbatch reads next: answers first, parts of prompts in well filled steps, pages for all of it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from serving_factory import GREEDY, SHAPE, toy_plan
from tessera.execute.stepper import StepCall, StepDone
from tessera.kernels import PAGE
from tessera.serve.answer import ActiveRequest
from tessera.serve.pages import PagePool
from tessera.serve.records import Ask, Counts, Shape
from tessera.serve.sequences import MAX_READ_AGAIN, BatchConfig, SequenceBatch
from tessera.serve.step_inputs import OutputRows, Steps
from tessera.serve.text import ByteText

WIDE = replace(SHAPE, rows=4, capacity=512, sizes=(4, 16, 64), pool_tokens=PAGE * 200)


def batch_of(shape: Shape = WIDE, is_caching: bool = True) -> SequenceBatch:
    """An open microbatch, in which every due token is 5."""

    def settle(batch: SequenceBatch, done: StepDone, due: OutputRows) -> Sequence[ActiveRequest]:
        for _, request in due:
            request.add(5)
        return ()

    steps = Steps.of(toy_plan("only", [0] * len(shape.sizes), shape))
    pool = PagePool(shape.pool_tokens // PAGE, is_caching, shape.windows)
    return SequenceBatch(0, shape, steps, BatchConfig(settle, Counts()), pool)


def request_of(*prompt: int, max_tokens: int = 99) -> ActiveRequest:
    """Who asks for that."""
    return ActiveRequest(Ask(prompt, max_tokens, GREEDY, ignores_end=True), ByteText().reader(), ())


def added(batch: SequenceBatch, *prompts: Sequence[int]) -> list[ActiveRequest]:
    """Requests that begin."""
    requests = [request_of(*prompt) for prompt in prompts]
    for request in requests:
        batch.add(request)
    return requests


def stepped(batch: SequenceBatch, num: int = 1) -> list[tuple[int, list[int]]]:
    """(size, tokens of each sequence) of the next steps."""
    found = []
    for _ in range(num):
        call = batch.next_step()
        assert call is not None
        starts = call.inputs["query_starts"].tolist()
        counts = [after - before for before, after in pairwise(starts)]
        found.append((WIDE.sizes[call.step], [count for count in counts if count]))
        batch.end(StepDone(0, call.step, {}, 0.0))
    return found


def counts_of(batch: SequenceBatch) -> Counts:
    """What it counted."""
    return batch._counts


def test_nobody_leaves_nothing_to_do() -> None:
    """An empty microbatch has no next step."""
    assert batch_of().next_step() is None


def test_an_answer_goes_on_in_every_step_beside_a_prompt() -> None:
    """One token of the answer, and the rest of the step for the prompt."""
    batch = batch_of()
    added(batch, [1])
    stepped(batch)
    added(batch, range(100))

    assert [(64, [1, 63]), (16, [1, 15]), (16, [1, 15]), (16, [1, 7]), (4, [1, 1])] == stepped(batch, 5)


def test_a_step_of_answers_alone_is_as_small_as_they_are_few() -> None:
    """Nobody has more than one token in a step that holds one of everybody."""
    batch = batch_of()
    added(batch, [1], [2], [3])
    stepped(batch)

    assert [(4, [1, 1, 1])] == stepped(batch)


def test_a_size_that_would_be_half_empty_is_not_taken() -> None:
    """Thirty tokens fill the smaller size twice, and do not leave the larger one half empty."""
    batch = batch_of()
    added(batch, range(30))

    assert [(16, [16]), (16, [14])] == stepped(batch, 2)


def test_prompts_are_read_in_the_order_of_arrival() -> None:
    """The first is whole before the second has more than what is left of a step."""
    batch = batch_of()
    added(batch, range(60), range(200, 260))

    assert [(64, [60, 4]), (64, [1, 56])] == stepped(batch, 2)


def test_whoever_begins_like_another_shares_its_pages() -> None:
    """Also in the step that fills them: what both have in common is read once."""
    batch = batch_of()
    added(batch, range(48), range(48))

    assert [(64, [48, 16])] == stepped(batch)
    assert (96, 32) == (counts_of(batch).prefix_queries, counts_of(batch).prefix_hits)


def test_what_has_ended_is_found_again() -> None:
    """The pages of a request that is gone, but for the last token, which gives the next one."""
    batch = batch_of()
    (request,) = added(batch, range(32))
    stepped(batch)
    batch.leave(request)
    added(batch, range(32))

    assert 0 == batch.pool.num_used
    assert [(16, [16])] == stepped(batch)


def test_switched_off_everything_is_read_anew() -> None:
    batch = batch_of(is_caching=False)
    added(batch, range(48), range(48))

    assert [(64, [48, 16]), (16, [1, 15]), (16, [1, 15]), (4, [1, 1, 1])] == stepped(batch, 4)


def test_the_last_tokens_of_a_prompt_have_rows_of_their_own_in_a_small_step() -> None:
    """Each sees what comes before it, over the same pages; the last one's output is the answer's token."""
    batch = batch_of()
    added(batch, [1], range(PAGE + 2))
    stepped(batch)
    added(batch, [9, 8, 7])
    call = batch.next_step()

    assert call is not None
    assert 16 == WIDE.sizes[call.step]  # five tokens
    batch.end(StepDone(0, call.step, {}, 0.0))
    batch.leave(batch.requests()[0])
    added(batch, [4, 5])
    call = batch.next_step()

    assert call is not None
    assert 4 == WIDE.sizes[call.step]
    starts = call.inputs["page_starts"].tolist()
    assert [0, 1, 2, 3, 4] == call.inputs["query_starts"].tolist()
    assert [PAGE + 3, 4, 1, 2] == call.inputs["lengths"].tolist()
    assert starts[2] == starts[3]
    assert [0, 1, 3] == [part.sequence.ahead for part in batch._started[0].parts]


def test_a_prompt_that_is_far_along_is_read_in_a_larger_step() -> None:
    """Rows of one sequence would read its keys again and again."""
    num_full = MAX_READ_AGAIN // 3 // 64 + 1
    batch = batch_of(replace(WIDE, capacity=1 << 14, pool_tokens=PAGE << 10))
    added(batch, range(64 * num_full + 4))

    assert (16, [4]) == stepped(batch, num_full + 1)[-1]


def test_a_shared_beginning_is_read_once() -> None:
    """A light form of the benchmark: 512 tokens in common and 8 of their own, 32 times."""
    asks = [[*range(256), *range(256), *[number] * 8] for number in range(32)]
    read = []
    for is_caching in (True, False):
        batch, total = batch_of(replace(WIDE, capacity=1024), is_caching), 0
        for ask in asks:
            (request,) = added(batch, ask)
            while not request.num_out:
                total += sum(sum(counts) for _, counts in stepped(batch))
            batch.leave(request)
        read.append(total)

    assert 512 + 32 * 8 == read[0]
    assert 32 * 520 == read[1]


def test_who_came_last_is_put_aside_when_pages_run_out() -> None:
    """It gives its pages to the first, and goes on from what it has when there is room."""
    batch = batch_of(replace(WIDE, pool_tokens=PAGE * 6))
    first, last = added(batch, range(20), range(100, 120))
    stepped(batch, 13)  # both are near the end of their second page; there is one more
    tokens = list(last.sequence)
    stepped(batch, 30)

    assert 1 == counts_of(batch).preemptions
    assert tokens == last.sequence[: len(tokens)]
    assert len(last.sequence) < len(first.sequence)
    batch.leave(first)
    stepped(batch, 3)
    assert len(last.sequence) >= len(tokens) + 2


def test_a_request_begins_when_there_are_pages_for_it() -> None:
    """Until then it waits in the microbatch, which takes nobody else."""
    batch = batch_of(replace(WIDE, pool_tokens=PAGE * 5))
    added(batch, range(50))
    stepped(batch)
    added(batch, range(100, 140))

    assert [(4, [1])] == stepped(batch)
    assert not batch.takes


def test_all_pages_are_free_when_everybody_has_left() -> None:
    """Also those of who waits, and of who was put aside."""
    batch = batch_of(replace(WIDE, pool_tokens=PAGE * 6))
    requests = added(batch, range(20), range(100, 130), range(40))
    stepped(batch, 20)
    for request in requests:
        batch.leave(request)

    assert (0, 0, 4) == (batch.pool.num_used, batch.num_used, batch.num_free)
    assert batch.takes


def test_page_tables_may_be_longer_together_than_there_are_pages() -> None:
    """Up to a limit: who shares everything waits too when the list of tables is full."""
    batch = batch_of(replace(WIDE, pool_tokens=PAGE * 28))
    prompt = list(range(16 * PAGE))
    added(batch, prompt, prompt, prompt, prompt)
    stepped(batch, 8)

    assert (3, 21) == (len(batch._begun), batch.pool.num_used)


def test_a_row_is_kept_for_life() -> None:
    """Where state is kept by row, who leaves makes room for the next one, and nobody moves."""
    batch = batch_of(replace(WIDE, sizes=(2, 4), is_flat=False))
    first, _, _ = added(batch, [1, 2], [3, 4], [5, 6])
    call = batch.next_step()
    assert call is not None
    assert (1, [True] * 4) == (call.step, call.inputs["fresh"].tolist())
    batch.end(StepDone(0, call.step, {}, 0.0))
    batch.leave(first)
    added(batch, [7, 8])
    call = batch.next_step()

    assert isinstance(call, StepCall)
    assert [7, 4, 6, 0] == call.inputs["tokens"].tolist()
    assert [0, 1, 1, 0] == call.inputs["positions"].tolist()
    assert [1, 2, 2, 0] == call.inputs["lengths"].tolist()
    assert [True, False, False, True] == call.inputs["fresh"].tolist()


def test_pages_that_no_token_sees_any_more_go_back() -> None:
    """Where every layer has a window: those wholly behind it, as soon as the next token is planned."""
    batch = batch_of(replace(WIDE, windows=(20,)), is_caching=False)
    added(batch, range(4 * PAGE + 3))
    used = []
    for _ in range(16):
        stepped(batch)
        used.append(batch.pool.num_used)
    sequence = batch._begun[0]

    assert (5, 3) == (used[0], used[-1])
    assert [0, 0, 0] == sequence.pages[0][:3]
    assert all(sequence.pages[0][3:])
    batch.leave(sequence.request)
    assert batch.pool.num_used == 0


def test_prompts_are_packed_where_recurrent_layers_keep_rows() -> None:
    """A step has the row of each of its sequences, negative where one begins; a row is kept for life."""
    batch, found = batch_of(replace(WIDE, has_rows=True)), []
    first, _ = added(batch, range(6), range(7))
    for number in range(3):
        call = batch.next_step()
        assert call is not None
        num = int((call.inputs["lengths"] > 0).sum())
        found.append((call.inputs["rows"][:num].tolist(), call.inputs["lengths"][:num].tolist()))
        batch.end(StepDone(0, call.step, {}, 0.0))
        if number == 0:
            batch.leave(first)
            added(batch, range(3))

    assert [([-1, -2], [6, 7]), ([1, -1], [8, 3]), ([1, 0], [9, 4])] == found


def test_a_prompt_whose_logprobs_are_wanted_is_read_token_by_token() -> None:
    """Nothing of it is taken from pages, since each token's logits are looked at."""
    batch = batch_of()
    added(batch, range(16))
    stepped(batch)
    asked = ActiveRequest(replace(request_of(*range(16)).ask, prompt_logprobs=0), ByteText().reader(), ())
    batch.add(asked)

    assert [(4, [1, 1])] == stepped(batch)


@pytest.mark.parametrize("num", [1, 3, 4])
def test_a_crowd_takes_as_many_as_there_are_rows(num: int) -> None:
    """Who comes while there are pages and rows is taken."""
    batch = batch_of()
    added(batch, *([[1, 2]] * num))

    assert (num, 4 - num, num < 4) == (batch.num_used, batch.num_free, batch.takes)
