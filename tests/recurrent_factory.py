"""Calls of the operators of recurrent layers: answers alone, or prompts beside answers and padding."""

from typing import Any

import torch

from tessera.kernels import recurrent

OPERATORS = tuple(recurrent.SCHEMAS)
# Tokens of each sequence: one each, some unused; or prompts beside answers and padding. And state rows.
ONE_EACH, MIXED, LONG = (1, 1, 0), (19, 1, 0, 3), (300, 1, 0, 65)
ROWS = {ONE_EACH: [4, -2, 0], MIXED: [2, -1, 3, -5], LONG: [2, -1, 3, -5]}
NUM_ROWS, PADDING = 5, 2
WIDTH = 4


def make_call(name: str, counts: tuple[int, ...], dtype: torch.dtype, wide: bool = False) -> list[Any]:
    """Arguments of an operator; inputs are parts of wider tensors, as models make them."""
    random = torch.Generator().manual_seed(0)
    num = sum(counts) + (PADDING if counts != ONE_EACH else 1)
    heads, size, states = (4, 64, 128) if wide else (4, 10, 12)

    def some(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(sizes, generator=random).mul(scale).to(dtype)

    def part(*sizes: int) -> torch.Tensor:
        return some(num, *sizes[:-1], sizes[-1] + 4)[..., 2 : 2 + sizes[-1]]

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tables = [starts, torch.tensor(ROWS[counts], dtype=torch.int32)]
    bias, decays = some(heads), -torch.rand(heads, generator=random) - 0.1

    def state(*sizes: int) -> torch.Tensor:
        return torch.randn(NUM_ROWS, *sizes, generator=random)

    if name == "causal_conv":
        channels = 150
        held = state(WIDTH - 1, channels).to(dtype)
        return [part(channels), some(channels, WIDTH), some(channels), held, *tables, True]
    if name == "ssd_scan":
        inputs = [part(heads, size), part(heads), decays, part(2, states), part(2, states)]
        limits = [True, 0.0, float("inf")]
        return [*inputs, some(heads), bias, state(heads, size, states), *tables, *limits]
    if name == "selective_scan":
        x, dt, z = part(70), part(70), part(70)
        a = -torch.rand(70, states, generator=random)
        inputs = [x, dt, a, part(states), part(states), some(70), some(70), z]
        return [*inputs, state(70, states), *tables, True]
    inputs = [part(heads, size), part(heads, states), part(heads, states), -part(heads, 1).abs()]
    return [*inputs, part(heads).sigmoid(), state(heads, states, size), *tables, True]


def state_of(name: str, call: list[Any]) -> torch.Tensor:
    held = call[recurrent.SCHEMAS[name].split(", ").index("Tensor(a!) state")]
    assert isinstance(held, torch.Tensor)
    return held
