"""fresh: other values for the tensors of an example, of the kind that a program may expect there.

Nobody knows what a program's inputs mean, so the example is the guide:
  floats     between the least and the greatest of the example; what is not finite stays
  integers   likewise (they may be indices); rows that rise stay rising from their first to their last value
             (positions, offsets), rows that fall stay falling (masks with padding at the end)
  bools      true about as often, never always or never
A tensor of one value throughout gets values near it: 1 becomes numbers between 0.5 and 1.5, or 0 and 1 for
integers, a row of which keeps its first. That may not suit the program; `is_mild` leaves such integers alone.
"""

from collections.abc import Mapping

import torch


def fresh(example: Mapping[str, torch.Tensor], seed: int, is_mild: bool = False) -> dict[str, torch.Tensor]:
    """New tensors of the example's shapes and types; the same seed gives the same values."""
    return {
        name: fresh_tensor(tensor, seed * 1_000 + place, is_mild)
        for place, (name, tensor) in enumerate(example.items())
    }


def fresh_tensor(example: torch.Tensor, seed: int, is_mild: bool = False) -> torch.Tensor:
    """Other values for one tensor, where there can be any."""
    random = torch.Generator().manual_seed(seed)
    if example.is_complex():
        parts = torch.view_as_real(example.cpu())
        return torch.view_as_complex(_floats(parts, random)).to(example.device)
    old = example.detach().cpu()
    if not old.numel():
        return example.detach().clone()
    if old.dtype is torch.bool:
        share = float(old.float().mean())
        made = torch.rand(old.shape, generator=random) < min(max(share, 0.25), 0.75)
    elif old.is_floating_point():
        made = _floats(old, random)
    else:
        made = _integers(old.long(), random, is_mild)
    return made.to(old.dtype).to(example.device)


def _floats(old: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    wide = old.float()
    is_finite = wide.isfinite()
    known = wide[is_finite]
    if not known.numel():
        return old.clone()
    if set(known.unique().tolist()) == {0.0, 1.0}:  # a mask
        made = _integers(wide.nan_to_num(0, 0, 0).long(), random, False).float()
    else:
        low, high = float(known.min()), float(known.max())
        share = torch.rand(old.shape, generator=random)
        if low < high:
            made = low + (high - low) * share
        else:
            made = low * (0.5 + share) if low else torch.randn(old.shape, generator=random)
    return torch.where(is_finite, made, wide).to(old.dtype)


def _integers(old: torch.Tensor, random: torch.Generator, is_mild: bool) -> torch.Tensor:
    low, high = int(old.min()), int(old.max())
    if low == high:
        if is_mild:
            return old.clone()
        low, high = min(low, 0), max(high, 1)
    made = torch.randint(low, high + 1, old.shape, generator=random)
    if old.dim() == 0 or old.shape[-1] < 2:
        return made
    steps = old.diff(dim=-1)
    falls, rises = bool((steps <= 0).all()), bool((steps >= 0).all())
    if falls or rises:
        made = made.sort(-1, descending=falls).values
        made[..., 0] = old[..., 0]
        if not falls:
            made[..., -1] = old[..., -1]
    return made
