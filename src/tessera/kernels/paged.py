"""tessera::paged_attention: causal attention of tokens of several sequences over paged keys and values.

    query         [T, Hq, D]          new tokens, sequence after sequence; their keys are in pages already
    keys, values  [P, 16, Hkv, D|Dv]  pages of 16 positions each
    pages         [W]                 page numbers: those of sequence s begin at pages[page_starts[s]]
    page_starts   [S]                 negative where pages behind a window are not listed
    lengths       [S]                 tokens in pages, the new ones included; 0: unused
    query_starts  [S + 1]             new tokens of sequence s: query_starts[s] : query_starts[s + 1]
    -> [T, Hq, Dv]                    zeros for padding tokens

With a `window`, a token sees itself and the window - 1 before. Scores are multiplied by `scale`, bounded by
`soft_cap` unless 0, and joined by a head's `sinks` score, which has no value. Query heads share key heads in
groups. `query_tail` and `key_tail` are further elements of queries and, for all heads, of keys: the rotated
keys of latent attention, whose values are its keys. `expected_length`, the average of sequences, is for cost
models. `one_each` promises at most one token per sequence: it selects the kernel.

Lengths are read inside: a program that calls it reads nothing on the host.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, softmax

from tessera.kernels import PAGE
from tessera.kernels.register import register

# Queries per product on a CPU; bounds the memory of their scores.
MAX_QUERIES = 256

SCHEMA = (
    "(Tensor query, Tensor keys, Tensor values, Tensor pages, Tensor page_starts, Tensor lengths, "
    "Tensor query_starts, float scale, int window, float soft_cap, Tensor? sinks, int expected_length, "
    "bool one_each, Tensor? query_tail=None, Tensor? key_tail=None) -> Tensor"
)


@dataclass(frozen=True)
class _QueryRows:
    first: int
    count: int
    position: int
    # First page read: its index in `pages`, the position of its first key; and the number of pages.
    page: int
    begin: int
    num_pages: int


def _on_cpu(call: Any) -> torch.Tensor:
    """Parts with equal tokens and similar numbers of pages are computed together."""
    query, keys, window = call.query, call.keys, call.window
    out: torch.Tensor = query.new_zeros((*query.shape[:2], call.values.shape[3]))
    query = query if call.query_tail is None else torch.cat([query, call.query_tail], -1)
    alike: dict[tuple[int, int], list[_QueryRows]] = defaultdict(list)
    for part in _parts(call.page_starts.tolist(), call.lengths.tolist(), call.query_starts.tolist(), window):
        alike[part.count, part.num_pages.bit_length()].append(part)
    for (count, _), group in alike.items():
        most = max(part.num_pages for part in group)
        numbers = [(p.first, p.position - p.begin, p.page, p.num_pages - 1) for p in group]
        first, now, page, last = torch.tensor(numbers).t()[..., None]
        rows = (first + torch.arange(count)).flatten()
        # A short part repeats its last page.
        table = call.pages.index_select(0, (page + torch.arange(most).minimum(last)).flatten())
        ago = (now + torch.arange(count))[:, :, None] - torch.arange(most * PAGE)
        seen = (ago >= 0) & (ago < window) if window else ago >= 0
        beyond = (ago[:, -1] < 0).flatten().nonzero()[:, 0]  # padding, may not be finite
        held_values, *key_parts = (
            held.index_select(0, table)
            .flatten(0, 1)
            .index_fill_(0, beyond, 0.0)
            .unflatten(0, (len(group), -1))
            for held in (call.values, keys, call.key_tail)
            if held is not None
        )
        shared = [part.expand(-1, -1, keys.shape[2], -1) for part in key_parts]
        held_keys = torch.cat(shared, -1) if len(shared) > 1 else key_parts[0]
        queries = query.index_select(0, rows).view(len(group), count, *query.shape[1:])
        results = _attend(queries, held_keys, held_values, seen, call)
        out.index_copy_(0, rows, results.flatten(0, 1))
    return out


def _parts(starts: list[int], lengths: list[int], firsts: list[int], window: int) -> Iterator[_QueryRows]:
    for start, length, first, after in zip(starts, lengths, firsts[:-1], firsts[1:], strict=True):
        for row in range(first, after if length else first, MAX_QUERIES):
            count = min(after - row, MAX_QUERIES)
            position = length - (after - row)
            page = max(0, position - window + 1) // PAGE if window else 0
            num_pages = (position + count - 1) // PAGE + 1 - page
            yield _QueryRows(row, count, position, start + page, page * PAGE, num_pages)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, call: Any
) -> torch.Tensor:
    """Query heads that share a key head become further queries."""
    parts, count, heads, width = query.shape
    if call.soft_cap or call.sinks is not None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (t.to(dtype).transpose(1, 2) for t in (query, keys, values))
        out = by_formula(q, k, v, seen[:, None], call.scale, call.sinks, call.soft_cap)
    else:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        kv_heads = keys.shape[1]
        rows = query.view(parts, count, kv_heads, -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = seen[:, None].repeat(1, 1, heads // kv_heads, 1)
        out = scaled_dot_product_attention(rows, keys, values, mask, scale=call.scale)
    return out.reshape(parts, heads, count, -1).transpose(1, 2).to(query.dtype)


def by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention with sinks or bounded scores, for which torch has no kernel. Heads come before positions."""
    batch, heads, num, width = query.shape
    kv_heads, held = key.shape[1], key.shape[2]
    rows = query.reshape(batch, kv_heads, -1, width)
    scores = (rows @ key.transpose(2, 3)).view(batch, heads, num, held) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        hides = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if hides else scores + mask
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(batch, -1, num, 1)
        scores = torch.cat([scores, column], -1)
    weights = softmax(scores, -1)[..., :held]
    out = weights.reshape(batch, kv_heads, -1, held) @ value
    return out.view(batch, heads, num, -1)


def _shaped(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((*query.shape[:2], values.shape[3]))


register("paged_attention", SCHEMA, _shaped, _on_cpu, "tessera.kernels.paged_triton")
