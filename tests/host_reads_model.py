"""Modules that look at their values, or keep count, as programs of users do; for `module:callable`."""

import random
from types import SimpleNamespace

import torch

from tessera.ir import Step


class Summed(torch.nn.Module):
    """Multiplies by a sum that NumPy makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.numpy().sum())


class Branched(torch.nn.Module):
    """Takes one of two paths."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.tolist()[0][0] > 0 else x


class Masked(torch.nn.Module):
    """As many elements as are positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


class Counting(torch.nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2 if self.calls > 1_000 else x + 1


class Chancy(torch.nn.Module):
    """Seldom another path."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if random.random() > 0.999 else x + 1


class Remembering(torch.nn.Module):
    """Keeps what it computed in its first call, in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = vars(self.kept).setdefault("first", x * 2)
        return x + first


class Baked(torch.nn.Module):
    """The sum of the recorded example as a plain number, and later the sum itself."""

    is_baked = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 28.0 if self.is_baked else x * x.sum()


def example() -> tuple[torch.Tensor]:
    """Sums to 28."""
    return (torch.arange(8.0).reshape(2, 4),)


def summed(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return Summed(), example()


def branched(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return Branched(), example()


def masked(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return Masked(), example()


def counting(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return Counting(), example()


def chancy(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return Chancy(), example()


def remembering(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return Remembering(), example()


def baked(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """For the command line."""
    return Baked(), example()
