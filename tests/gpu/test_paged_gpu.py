"""Paged attention on a GPU: the numbers of the CPU's operator, the same bits every time, also in a graph."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton", reason="needs triton")

from paged_factory import PagedCall, make_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ATOL = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# (length, new tokens)
ONE_EACH = [(700, 1), (5, 1), (0, 0), (100, 1), (16, 1), (4096, 1)]
MIXED = [(700, 1), (300, 300), (1, 1), (0, 0), (1024, 200), (130, 2), (17, 17)]


def on_gpu(call: PagedCall) -> PagedCall:
    """The same call with its tensors on the GPU."""
    values = {field.name: getattr(call, field.name) for field in fields(call)}
    there: dict[str, Any] = {n: v.cuda() for n, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(call, **there)


def check(call: PagedCall) -> None:
    """GPU and CPU agree; twice on the GPU, the bits are the same."""
    there = on_gpu(call)
    out = there.run()

    assert_close(out.cpu(), call.run(), rtol=0, atol=ATOL[out.dtype])
    assert torch.equal(out, there.run())


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize(
    "widths", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("parts", [ONE_EACH, MIXED], ids=["one each", "mixed"])
def test_head_sizes(parts: list[tuple[int, int]], widths: tuple[int, int], dtype: torch.dtype) -> None:
    """From 64 to 256, with padding behind."""
    scale = widths[0] ** -0.5
    check(replace(make_call(parts, (8, 2), widths, padding=5, dtype=dtype), scale=scale))


@pytest.mark.parametrize("heads", [(4, 4), (14, 2), (32, 8), (71, 1)], ids=str)
@pytest.mark.parametrize("parts", [ONE_EACH, MIXED, MIXED * 5], ids=["one each", "mixed", "many"])
def test_groups(parts: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    """Any number of query heads to a key head, few and many tokens."""
    check(replace(make_call(parts, heads, (64, 64), dtype=torch.bfloat16), scale=0.125))


@pytest.mark.parametrize("window", [0, 1, 17, 128])
@pytest.mark.parametrize("parts", [ONE_EACH, MIXED], ids=["one each", "mixed"])
def test_windows_caps_and_sinks(parts: list[tuple[int, int]], window: int) -> None:
    """All of them together."""
    call = make_call(parts, (8, 2), (64, 64), has_sinks=True, dtype=torch.bfloat16)
    check(replace(call, scale=0.3, soft_cap=5.0, window=window))


@pytest.mark.parametrize("sequences", [1, 31, 32, 100])
def test_split_or_not(sequences: int) -> None:
    """Few sequences are split, many are not."""
    parts = [(1 + 37 * s % 900, 1) for s in range(sequences)]
    check(replace(make_call(parts, (32, 8), (128, 128), dtype=torch.bfloat16), scale=0.09))


def test_a_graph_follows_the_lengths_of_each_replay() -> None:
    """Nothing was read on the host: a captured step attends over what is there when it is replayed."""
    calls = [
        on_gpu(make_call(parts, padding=padding))
        for parts, padding in (([(40, 20), (60, 1)], 4), ([(90, 1), (33, 24)], 0))
    ]
    names = ("query", "pages", "page_starts", "lengths", "query_starts")
    pool = torch.randn_like(calls[0].keys.repeat(4, 1, 1, 1))
    tables = torch.zeros(64, dtype=torch.int32, device="cuda")
    room: dict[str, Any] = {n: getattr(calls[0], n).clone() for n in names} | {"pages": tables}
    room["pages"][: calls[0].pages.numel()] = calls[0].pages
    step = replace(calls[0], keys=pool, values=pool, **room)
    step.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run()
    for call in calls:
        for name in names:
            given = getattr(call, name)
            room[name][: given.shape[0]] = given
        graph.replay()
        torch.cuda.synchronize()
        wanted = replace(call, keys=pool, values=pool, pages=tables).run()

        assert_close(out, wanted, rtol=0, atol=1e-5)
