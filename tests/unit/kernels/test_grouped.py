"""Parts of mixtures of experts, and their joins."""

from collections.abc import Callable

import pytest
import torch

from tessera.kernels import grouped
from tessera.kernels.grouped import chosen, rotated

# Rows of five experts; one has none, and two rows have no expert.
OFFSETS, ROWS = torch.tensor([3, 3, 8, 9, 14], dtype=torch.int32), 16


@pytest.mark.parametrize("join", [torch.ops.tessera.grouped_join, grouped._join_on_cuda])
def test_parts_joined_in_place_are_the_whole_product(join: Callable[..., None]) -> None:
    """From the last to the first; rows that no part has are 0."""
    x, weight = torch.randn(ROWS, 8), torch.randn(5, 8, 6)
    whole = torch.ops.tessera.grouped_part(x, weight, OFFSETS, 0, 1.0)
    bounds = [(0, 2), (2, 3), (3, 5)]
    parts = [torch.ops.tessera.grouped_part(x, weight[a:b], OFFSETS, a, 0.3) for a, b in bounds]
    into = parts.pop()
    for (first, last), part in reversed(list(zip(bounds, parts, strict=False))):
        join(into, part, OFFSETS, first, last, 0.3)

    assert torch.equal(whole, into)
    assert not into[14:].any()


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_rotated_part_has_the_rows_of_its_experts(first: int) -> None:
    x, weight = torch.randn(ROWS, 8), torch.randn(2, 8, 6)

    def product(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.ops.tessera.grouped_part(rows, weight, ends, 0, 1.0)  # type: ignore[no-any-return]

    found = rotated(product, x, OFFSETS, first, 2)
    for expert, rows in chosen(OFFSETS, first, 2):
        torch.testing.assert_close(found[rows], x[rows] @ weight[expert])
