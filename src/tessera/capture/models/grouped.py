"""Attention that reads the key/value cache once.

Hugging Face repeats keys and values for every query head before it calls the kernel: for a decode step that
writes and reads the whole cache again, several times its size. Query heads that share a key head are
independent queries of it, so here they become rows of one attention call instead: heads (kv, group) and
queries (n) turn into kv heads with group * n queries. Nothing is repeated and nothing is copied but queries.

A model with attention sinks gives every head one more score that takes part in the softmax and has no
value (`s_aux`); another bounds its scores (`softcap`). No kernel of torch has either, so the formula is
written out.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, softmax

ATTENTION = "tessera"


def register_attention() -> None:
    """Makes the attention known to transformers under its name; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers: heads before positions in, positions before heads out."""
    batch, heads, num, _width = query.shape
    groups = heads // key.shape[1]
    causal = num > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if s_aux is not None or softcap is not None:
        if attention_mask is None and causal:
            attention_mask = torch.full((num, num), float("-inf"), dtype=query.dtype, device=query.device)
            attention_mask = attention_mask.triu(1)
        out = _written_out(query, key, value, attention_mask, scaling, s_aux, softcap)
    elif attention_mask is None:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scaling, enable_gqa=groups > 1
        )
    elif num == 1:
        rows = query.reshape(batch, key.shape[1], groups, -1)
        out = scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
        out = out.reshape(batch, heads, 1, -1)
    else:
        # Many queries: the mask has a row for each, and repeating keys costs little beside the products.
        key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    batch, heads, num, width = query.shape
    kv_heads, held = key.shape[1], key.shape[2]
    rows = query.reshape(batch, kv_heads, -1, width)
    scores = (rows @ key.transpose(2, 3)).view(batch, heads, num, held)
    scores = scores * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
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
