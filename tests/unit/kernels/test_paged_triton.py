"""The Triton kernels of paged attention without a GPU: run in the PTX interpreter, proved by the analyzer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="needs triton")

from paged_factory import PagedCall, make_call, make_latent_call
from sampling import one_of_each, some_of
from tessera import flow  # hands the interpreter to capture
from tessera.capture import own
from tessera.capture.own import own_launches
from tessera.kernels import paged  # registers the operator
from tessera.kernels.paged_triton import Tile, Tiles, attend, tiles_for
from tessera_ptx import analyze
from triton_ptx import compiled_for, launches_anywhere

assert flow
assert paged
# One split, and tiles of few tokens and keys, so that short sequences have several.
SMALL = Tiles(Tile(16, 16, 4, 3), Tile(16, 16, 4, 3), 1)
# The same in one stage, compiled in two thirds of the time.
PLAIN = Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), 1)
# (length, new tokens)
ONE_EACH = [(37, 1), (5, 1), (0, 0), (100, 1), (16, 1)]
MIXED = [(37, 1), (9, 9), (1, 1), (0, 0), (40, 20)]
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True, scope="module")
def anywhere() -> Iterator[None]:
    with launches_anywhere():
        yield


def run(call: PagedCall, tiles: Tiles | None = None) -> torch.Tensor:
    """What the kernels give."""
    step = (call.query, call.keys, call.values, call.pages, call.page_starts, call.lengths, call.query_starts)
    rest = (call.scale, call.window, call.soft_cap, call.sinks, call.one_each)
    return attend(step, *rest, tiles, call.tails)


def check(call: PagedCall, tiles: Tiles | None = None) -> None:
    """The kernels give what the operator gives on a CPU."""
    out = run(call, tiles)

    assert call.query.dtype == out.dtype
    assert_close(out, call.run(), rtol=0, atol=ATOL[out.dtype])


# Kernels that are whole serve prompts too.
SPLIT = some_of(
    [(dtype, splits) for dtype in ATOL for splits in (1, 4)],
    [(torch.float32, 1), (torch.bfloat16, 4)],
)


@pytest.mark.parametrize(("dtype", "splits"), SPLIT, ids=str)
def test_one_new_token_each(dtype: torch.dtype, splits: int) -> None:
    """Whole or in splits, some of which have no keys; padding's rows are zeros."""
    check(make_call(ONE_EACH, widths=(32, 32), padding=2, dtype=dtype), replace(SMALL, splits=splits))


@pytest.mark.parametrize("dtype", some_of(ATOL, [torch.float32, torch.bfloat16]), ids=str)
def test_prompts_and_single_tokens_together(dtype: torch.dtype) -> None:
    """Tiles of one sequence each, single tokens beside them, padding behind them."""
    check(make_call(MIXED, widths=(32, 32), padding=9, dtype=dtype), SMALL)


@pytest.mark.parametrize("parts", [[(37, 1), (100, 1)], [(60, 4), (40, 1)]], ids=["answers", "mixed"])
def test_pages_before_every_window_need_not_be_listed(parts: list[tuple[int, int]]) -> None:
    """A list may begin behind a sequence's first page."""
    call = replace(make_call(parts, dtype=torch.float16), window=7)
    short = call.shortened()

    assert int(short.page_starts[0]) < 0
    assert torch.equal(run(call, PLAIN), run(short, PLAIN))


@pytest.mark.parametrize("parts", [ONE_EACH, MIXED], ids=["answers", "mixed"])
def test_latents_are_keys_and_values(parts: list[tuple[int, int]]) -> None:
    """As with keys that hold both parts, by the operator and by the kernels."""
    call = make_latent_call(parts, 4, (32, 8))
    assert call.tails is not None
    query, keys = (torch.cat(pair, -1) for pair in zip((call.query, call.keys), call.tails, strict=True))

    assert_close(call.run(), replace(call, query=query, keys=keys, tails=None).run())
    check(call, replace(PLAIN, splits=2))


WINDOWS = one_of_each([(1, 1), (33, 2), (16, 1), (7, 2)], lambda row: row[1])


@pytest.mark.parametrize(("window", "splits"), WINDOWS)
def test_a_window_is_a_token_and_those_just_before_it(window: int, splits: int) -> None:
    """In prompts and in single tokens."""
    call = make_call(MIXED, dtype=torch.float16)
    check(replace(call, window=window), replace(PLAIN, splits=splits))


@pytest.mark.parametrize("splits", some_of((1, 2), (2,)))
def test_soft_cap_and_sinks(splits: int) -> None:
    """A sink counts once, however many splits there are."""
    call = make_call(MIXED, has_sinks=True, dtype=torch.float16)
    check(replace(call, scale=2.0, soft_cap=3.0, window=20), replace(PLAIN, splits=splits))


HEADS = one_of_each([(4, 4), (6, 2), (7, 1), (20, 1)], lambda heads: heads[1] == 1)


@pytest.mark.parametrize("heads", HEADS)
def test_groups_need_not_be_a_power_of_two(heads: tuple[int, int]) -> None:
    """A tile's rows are tokens times the query heads of a key head; what is left of it is not used."""
    tile = Tile(32, 16, 4, 1)
    check(make_call(MIXED, heads, dtype=torch.float16), Tiles(tile, tile, 1))


@pytest.mark.parametrize("widths", some_of([((24, 24),), ((48, 32),), ((20, 40),)], [((20, 40),)]))
def test_widths_need_not_be_a_power_of_two(widths: tuple[int, int]) -> None:
    """Nor need values be as wide as keys."""
    check(make_call(MIXED, widths=widths, dtype=torch.float16), PLAIN)


@pytest.mark.parametrize("parts", [ONE_EACH, MIXED], ids=["one each", "mixed"])
def test_the_division_it_would_have_on_a_gpu(parts: list[tuple[int, int]]) -> None:
    """Nothing but what shapes say."""
    check(make_call(parts, heads=(8, 2), widths=(64, 64), padding=3, dtype=torch.bfloat16))


def test_hoppers_own_products_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 64 rows are other instructions on sm_90."""
    monkeypatch.setattr(own, "TARGET", 90)
    with own_launches():
        check(
            make_call(MIXED, widths=(64, 64), dtype=torch.bfloat16),
            Tiles(SMALL.decode, Tile(64, 32, 4, 3), 1),
        )


def test_what_nobody_wrote_is_not_looked_at() -> None:
    """Unused pages, the rest of a page and padding may hold anything."""
    call = make_call(MIXED, widths=(32, 32), padding=3, dtype=torch.bfloat16)

    assert torch.equal(run(call.filled(0.0), SMALL), run(call.filled(float("nan")), SMALL))


def test_a_query_may_be_a_view() -> None:
    """As a model has it: heads before tokens, and a slice of a joined product."""
    call = make_call(MIXED, dtype=torch.float16)
    tokens, heads, width = call.query.shape
    wide = torch.randn(3 * heads, tokens, width).half().transpose(0, 1)
    wide[:, heads : 2 * heads] = call.query
    query = wide[:, heads : 2 * heads]

    assert not query.is_contiguous()
    assert torch.equal(run(call, PLAIN), run(replace(call, query=query), PLAIN))


# How a step is divided -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "splits"), [(1, 64), (4, 32), (8, 16), (16, 8), (31, 8), (32, 1), (128, 1)]
)
def test_few_sequences_are_split(sequences: int, splits: int) -> None:
    """From 32 sequences of 8 key heads up there are programs enough."""
    assert splits == tiles_for(sequences, sequences, (32, 8), (128, 128), 2, 8192).splits


@pytest.mark.parametrize(("table", "splits"), [(1, 1), (4, 1), (16, 4), (32, 8), (100, 16), (8192, 64)])
def test_a_short_table_has_few_splits(table: int, splits: int) -> None:
    """Nobody shares the keys of sequences that cannot be long."""
    assert splits == tiles_for(1, 1, (32, 8), (128, 128), 2, table).splits


@pytest.mark.parametrize("group", [1, 3, 4, 7, 16, 71])
def test_a_tile_holds_a_whole_group(group: int) -> None:
    """All query heads of a key head, of at least one token."""
    tiles = tiles_for(2048, 8, (2 * group, 2), (64, 64), 2, 128)

    assert group <= min(tiles.decode.rows, tiles.prefill.rows)


def test_more_shared_memory_changes_only_the_pipeline() -> None:
    """Results have the same bits on cards that differ in nothing else."""
    small, large = (tiles_for(64, 8, (8, 2), (256, 256), 4, 128, kib << 10) for kib in (64, 227))

    assert small != large
    assert replace(large.decode, stages=1) == replace(small.decode, stages=1)
    assert replace(large.prefill, stages=1) == replace(small.prefill, stages=1)
    assert large.splits == small.splits


# What kernels touch ----------------------------------------------------------------------------------------

READ = {"query", "keys", "values", "pages", "page_starts", "lengths", "query_starts", "sinks"}
ACCESSES = {
    "paged_decode": (READ, {"out", "parts", "tops"}),
    "paged_join": ({"parts", "tops", "query_starts"}, {"out"}),
    "paged_prefill": (READ, {"out"}),
}


@pytest.mark.parametrize("arch", some_of((80, 90), (80,)))
def test_latents_are_read_once(arch: int) -> None:
    """At DeepSeek's sizes: every access is proved, and there is room for it on a card."""
    shared_bytes = {80: 99, 90: 227}[arch] << 10
    call = make_latent_call(MIXED, 16, (512, 64), torch.bfloat16)
    for kernel in compiled(arch, call, shared_bytes):
        (report,) = analyze(kernel.asm["ptx"])
        names = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        read = {names[a.param] for a in report.accesses if a.read}

        assert (True, ()) == (report.movable, report.why)
        assert report.name == "paged_join" or READ - {"values", "sinks"} | {"query_tail", "key_tail"} == read
        assert kernel.metadata.shared <= shared_bytes


def compiled(arch: int, call: PagedCall, shared_bytes: int) -> list[Any]:
    """The kernels of a call, compiled for a target."""
    tiles = tiles_for(
        call.query.shape[0],
        call.lengths.numel(),
        (call.query.shape[1], call.keys.shape[2]),
        (call.query.shape[2], call.values.shape[3]),
        call.query.element_size(),
        8192,
        shared_bytes,
    )
    with compiled_for(arch) as kernels:
        run(call, tiles)
    return kernels


WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
# Widths that are a power of two, and those that are not.
TARGETS = some_of(
    [(arch, widths) for arch in (80, 90) for widths in WIDTHS], ((80, (80, 80)), (90, (64, 64)))
)


@pytest.mark.parametrize(("arch", "widths"), TARGETS, ids=str)
def test_every_access_is_proved(arch: int, widths: tuple[int, int]) -> None:
    """Through page tables too: what is read, what is written, nothing unknown, and room for it on a card."""
    call = replace(make_call(MIXED, (8, 2), widths, has_sinks=True, dtype=torch.bfloat16), window=30)
    shared_bytes = {80: 99, 90: 227}[arch] << 10
    for kernel in compiled(arch, call, shared_bytes):
        (report,) = analyze(kernel.asm["ptx"])
        names = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        touched = [(names[a.param], a.read, a.write) for a in report.accesses]

        assert (True, ()) == (report.movable, report.why)
        assert ACCESSES[report.name] == (
            {name for name, read, _ in touched if read},
            {name for name, _, write in touched if write},
        )
        assert not any(a.atomic for a in report.accesses)
        assert kernel.metadata.shared <= shared_bytes
