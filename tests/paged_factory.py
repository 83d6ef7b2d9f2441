"""Sequences in shuffled pages, and attention by the textbook to hold the operator against."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import tessera.kernels.paged  # noqa: F401 - registers the operator
from tessera.kernels import PAGE


@dataclass(frozen=True)
class PagedCall:
    """The arguments of one call of the operator, and each sequence's keys and values in order."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    page_starts: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor
    scale: float = 0.25
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    one_each: bool = False
    # Further elements of queries and keys.
    tails: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self) -> torch.Tensor:
        """What the operator gives."""
        return torch.ops.tessera.paged_attention(  # type: ignore[no-any-return]
            self.query, self.keys, self.values, self.pages, self.page_starts, self.lengths, self.query_starts,
            self.scale, self.window, self.soft_cap, self.sinks, 64, self.one_each, *(self.tails or ()),
        )  # fmt: skip

    def textbook(self) -> torch.Tensor:
        """Token by token, head by head, in 64 bits."""
        out = torch.zeros((*self.query.shape[:2], self.values.shape[3]), dtype=torch.float64)
        heads, kv_heads = self.query.shape[1], self.keys.shape[2]
        for s, length in enumerate(self.lengths.tolist()):
            first, after = self.query_starts[s : s + 2].tolist()
            start = int(self.page_starts[s])
            slots = [int(self.pages[start + p // PAGE]) * PAGE + p % PAGE for p in range(length)]
            keys, values = (held.flatten(0, 1)[slots].double() for held in (self.keys, self.values))
            for row in range(first, after):
                now = length - (after - row)
                begin = max(0, now - self.window + 1) if self.window else 0
                for head in range(heads):
                    kv = head * kv_heads // heads
                    scores = keys[begin : now + 1, kv] @ self.query[row, head].double() * self.scale
                    if self.soft_cap:
                        scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
                    if self.sinks is not None:
                        scores = torch.cat([scores, self.sinks[head : head + 1].double()])
                    weights = torch.softmax(scores, 0)[: now + 1 - begin]
                    out[row, head] = weights @ values[begin : now + 1, kv]
        return out

    def shortened(self) -> "PagedCall":
        """Without the pages behind the window: the place of a sequence's first page may be negative."""
        pages: list[int] = []
        starts = []
        news = (self.query_starts[1:] - self.query_starts[:-1]).tolist()
        for start, length, new in zip(self.page_starts.tolist(), self.lengths.tolist(), news, strict=True):
            behind = max(0, length - new - self.window + 1) // PAGE
            starts.append(len(pages) - behind)
            pages += self.pages[start + behind : start - (-length // PAGE)].tolist()
        table = torch.zeros_like(self.pages)
        table[: len(pages)] = torch.tensor(pages)
        return replace(self, pages=table, page_starts=torch.tensor(starts, dtype=torch.int32))

    def filled(self, value: float) -> "PagedCall":
        """The same with another value wherever no sequence has a token: in pages and in padding."""
        used = torch.zeros(self.keys.shape[0] * PAGE, dtype=torch.bool)
        for s, length in enumerate(self.lengths.tolist()):
            start = int(self.page_starts[s])
            for p in range(length):
                used[int(self.pages[start + p // PAGE]) * PAGE + p % PAGE] = True
        keys, values, query = self.keys.clone(), self.values.clone(), self.query.clone()
        keys.flatten(0, 1)[~used] = value
        values.flatten(0, 1)[~used] = value
        query[int(self.query_starts[-1]) :] = value
        return replace(self, keys=keys, values=values, query=query)


def make_call(
    parts: Sequence[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (16, 16),
    padding: int = 0,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedCall:
    """Sequences by (length, new tokens), in pages in any order; `padding` tokens behind them."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // PAGE) for length, _ in parts]
    num_pages = sum(counts) + 3
    order = (torch.randperm(num_pages - 1, generator=random) + 1)[: sum(counts)]
    pages = torch.zeros(2 * num_pages, dtype=torch.int32)
    pages[: sum(counts)] = order
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0)
    firsts = torch.tensor([0, *(new for _, new in parts)], dtype=torch.int32).cumsum(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random).to(dtype)

    return PagedCall(
        normal(int(firsts[-1]) + padding, heads[0], widths[0]),
        normal(num_pages, PAGE, heads[1], widths[0]),
        normal(num_pages, PAGE, heads[1], widths[1]),
        pages,
        starts[:-1].to(torch.int32),
        torch.tensor([length for length, _ in parts], dtype=torch.int32),
        firsts.to(torch.int32),
        sinks=normal(heads[0]) if has_sinks else None,
        one_each=all(new <= 1 for _, new in parts),
    )


def make_latent_call(
    parts: Sequence[tuple[int, int]], heads: int, widths: tuple[int, int], dtype: torch.dtype = torch.float32
) -> PagedCall:
    """Latent attention: values are keys, and rotated keys are apart."""
    call = make_call(parts, (heads, 1), (widths[0], widths[0]), padding=2, dtype=dtype)
    random = torch.Generator().manual_seed(1)
    sizes = (*call.query.shape[:2], widths[1]), (*call.keys.shape[:3], widths[1])
    query, key = (torch.randn(size, generator=random).to(dtype) for size in sizes)
    return replace(call, values=call.keys, tails=(query, key))
