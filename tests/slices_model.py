"""A hand-written step with every kind of hazard: overlapping slices, overwrites behind readers, updates."""

from collections.abc import Mapping

import torch

from tessera.capture import Workload
from tessera.ir import Step

Tensors = Mapping[str, torch.Tensor]


def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
    """RAW everywhere; WAR on `first` and on the state; WAW on the overlapping slices."""
    x, kept = inputs["x"], state["kept"]
    first = x * 2
    seen = first + 1
    first.copy_(x.t().contiguous())  # behind a reader: WAR
    parts = torch.empty(8, 12)
    parts[:, :6].copy_(first[:, :6])
    parts[:, 4:].copy_(seen)  # on columns 4 and 5 of the slice before: WAW
    parts[2:4].mul_(3)
    before = kept * 0.5
    kept[::2].copy_(seen[::2])  # the state it just read: WAR
    kept[1::2].add_(before[1::2])
    return {"y": parts.sum(1) + before.sum(1), "flag": seen > 3}


def step(record: Step) -> Workload:
    """The workload, for `slices_model:step`."""

    def random(seed: int) -> torch.Tensor:
        return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))

    return Workload(
        record,
        torch.nn.Module(),
        call,
        lambda seed: {"x": random(seed)},
        lambda seed: {"kept": random(seed + 1)},
        lambda first, run, last: dict(first),
    )
