"""tessera::paged_attention on a CPU, held against the textbook."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from paged_factory import PagedCall, make_call
from tessera.capture import Workload, record
from tessera.execute.reference import Replay
from tessera.ir import Step
from tessera.kernels.paged import MAX_QUERIES

# (length, new tokens): a whole prompt, part of one, single tokens at and around the edges of pages.
MIXED = [(20, 20), (33, 5), (1, 1), (16, 1), (17, 1), (50, 1), (48, 16)]


def check(call: PagedCall) -> None:
    """The operator gives what the textbook gives."""
    assert_close(call.run().double(), call.textbook(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
def test_query_heads_share_key_heads_in_groups(heads: tuple[int, int]) -> None:
    """Each group of query heads reads its key head."""
    check(make_call(MIXED, heads))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 100])
def test_a_window_is_a_token_and_those_just_before_it(window: int) -> None:
    """A token sees `window` positions, itself the last."""
    check(replace(make_call(MIXED), window=window))


def test_scores_are_bounded_by_the_soft_cap() -> None:
    """Scores go through the tangent of the cap."""
    call = make_call(MIXED)
    check(replace(call, scale=2.0, soft_cap=3.0))


@pytest.mark.parametrize("window", [0, 8])
def test_a_sink_takes_part_in_the_softmax_and_has_no_value(window: int) -> None:
    """A head's sink is one more score."""
    check(replace(make_call(MIXED, has_sinks=True), window=window))


def test_values_may_be_of_another_width_than_keys() -> None:
    """The result is as wide as the values."""
    call = make_call(MIXED, widths=(24, 8))

    assert call.run().shape == (call.query.shape[0], 4, 8)
    check(call)


def test_a_prompt_longer_than_a_product_is_read_in_parts() -> None:
    """More new tokens than go into one product."""
    check(make_call([(MAX_QUERIES + 40, MAX_QUERIES + 20), (30, 1)], heads=(2, 1), widths=(8, 8)))


def test_padding_and_unused_sequences_give_zeros_and_read_nothing() -> None:
    """What lies in unused pages and behind the last token changes no bit; padding's rows are zeros."""
    call = make_call([(20, 4), (0, 0), (31, 1), (0, 0)], padding=3)
    out = call.filled(float("nan")).run()

    assert torch.equal(out, call.filled(0.0).run())
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))


def test_keys_before_every_window_are_not_looked_at() -> None:
    """Pages that all new tokens have left behind may hold anything, or be somebody else's."""
    call = replace(make_call([(100, 4)]), window=10)
    others = call.pages.clone()
    others[:5] = 10**6

    assert torch.equal(call.run(), replace(call, pages=others).run())


def test_pages_before_every_window_need_not_be_listed() -> None:
    """The list begins with the first page that is looked at."""
    call = replace(make_call([(100, 4), (70, 1), (9, 1)]), window=10)
    short = call.shortened()

    assert int(short.page_starts[0]) < 0
    assert torch.equal(call.run(), short.run())


def test_a_sequence_has_the_same_bits_alone_and_among_others() -> None:
    """Sequences of other sizes do not change the result of one."""
    call = make_call(MIXED)
    alone = replace(
        call,
        query=call.query[20:25],
        page_starts=call.page_starts[1:2],
        lengths=call.lengths[1:2],
        query_starts=torch.tensor([0, 5], dtype=torch.int32),
    )

    assert torch.equal(alone.run(), call.run()[20:25])


def test_softmax_is_taken_in_32_bits() -> None:
    """Half precision loses no more than its own rounding."""
    call = make_call(MIXED, dtype=torch.bfloat16)
    out = call.run()

    assert out.dtype is torch.bfloat16
    assert_close(out.double(), call.textbook(), rtol=2**-8, atol=2**-8)


def test_a_fake_call_has_the_shape_of_a_real_one() -> None:
    """Shapes, strides and type are known without values."""
    call = make_call(MIXED, widths=(24, 8))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made = replace(call, query=mode.from_tensor(call.query)).run()
    real = call.run()

    assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)


class Attention(torch.nn.Module):
    """A program of one call."""

    def forward(self, call: list[torch.Tensor]) -> torch.Tensor:
        """The operator on given tensors."""
        return torch.ops.tessera.paged_attention(*call, 0.25, 0, 0.0, None, 64, False)  # type: ignore[no-any-return]


def test_a_recorded_call_is_one_launch_that_reads_its_arguments() -> None:
    """What the operator reads on the host is its own affair; replayed elsewhere it gives the same bits."""
    call = make_call(MIXED)
    names = ("query", "keys", "values", "pages", "page_starts", "lengths", "query_starts")
    inputs = {name: getattr(call, name) for name in names}
    workload = Workload(
        Step("test", "call", 1, 1),
        Attention(),
        lambda given, state: {"out": Attention()(list(given.values()))},
        lambda seed: inputs,
        lambda seed: {},
        lambda first, run, last: dict(first),
    )
    trace = record(workload)
    (launch,) = trace.launches

    assert "tessera.paged_attention.default" == trace.kernel_of(0).name
    assert 7 == sum(access.read and not access.write for access in launch.accesses)
    assert torch.equal(call.run(), Replay(trace, {}, inputs, {}).run([0]).outputs["out"])
