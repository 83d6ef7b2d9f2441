"""Rows selected by value: programs with loops over experts give the same results in fixed sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, one_hot, silu

from tessera.capture.models.selected import selecting

ROWS, EXPERTS, WIDTH = 6, 5, 4
RANDOM = torch.Generator().manual_seed(0)
WEIGHTS = torch.randn(EXPERTS, WIDTH, WIDTH, generator=RANDOM)
Program = Callable[[torch.Tensor, torch.Tensor], Any]


def over_chosen(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A class more than there are experts, as for padding."""
    out, mask = torch.zeros_like(x), one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
    for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        place, row = torch.where(mask[expert[0]])
        rows = silu(linear(x[row], WEIGHTS[expert[0]])) * (1.0 + place[:, None])
        out.index_add_(0, row, rows.to(out.dtype))
    return out


def by_number(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    out, mask = torch.zeros_like(x), one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for expert in mask.sum((-1, -2)).nonzero():
        number = int(expert.item())
        _, row = torch.where(mask[number])
        if row.numel():
            out.index_add_(0, row, x[row] if number == 3 else x[row] @ WEIGHTS[number])
    return out


def by_counts(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    order = chosen[:, 0].argsort(stable=True)
    sizes = one_hot(chosen[:, 0], num_classes=EXPERTS).sum(0).tolist()
    parts = x[order].split(sizes, dim=0)
    return torch.cat([linear(part, weight) for part, weight in zip(parts, WEIGHTS, strict=True)], dim=0)


@pytest.mark.parametrize("program", [over_chosen, by_number, by_counts])
@pytest.mark.parametrize("seed", range(3))
def test_results_are_those_of_the_program(program: Program, seed: int) -> None:
    """Some experts are chosen by no row."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=random)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=random)[:2] for _ in range(ROWS)])
    with selecting():
        found = program(x, chosen)

    torch.testing.assert_close(found, program(x, chosen))


@pytest.mark.parametrize(
    "program",
    [
        lambda x, rows: x[rows].sum(0),
        lambda x, rows: x[rows].softmax(0),
        lambda x, rows: x[rows] * torch.ones(len(rows), 1),
        lambda x, rows: WEIGHTS[0] @ x[rows].t(),
        lambda x, rows: x.index_add(0, rows, x),
        lambda x, rows: torch.cat([x[rows], x]),
        lambda x, rows: x[:, rows],
        lambda x, rows: x[rows][1:],
        lambda x, rows: rows.tolist(),
        lambda x, rows: int(rows[0]),
        lambda x, rows: x.index_put_((rows,), torch.zeros(())),
    ],
)
def test_other_uses_of_selected_rows_are_refused_with_the_line(program: Program) -> None:
    """What depends on several rows, on their number or their values, or overwrites."""
    x = torch.ones(ROWS, WIDTH)
    with selecting(), pytest.raises(ValueError, match=r"test_selected\.py:\d+ selects rows by value"):
        program(x, torch.where(x[:, 0] > 0)[0])
