"""A model of four equal layers that needs no library but torch."""

import torch

from tessera.ir import Step

WIDTH, LAYERS = 64, 4


class Layers(torch.nn.Module):
    """Layers in a list, as those of any model."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The last layer's result; `seen` adds up what was read."""
        seen += x
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x + seen


def step(record: Step) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """For `layers_model:step`."""
    x = torch.randn(record.batch, WIDTH, generator=torch.Generator().manual_seed(record.seed))
    return Layers(), {"x": x, "seen": torch.zeros(record.batch, WIDTH)}
