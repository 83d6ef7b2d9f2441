"""A step that draws random numbers in four places, with work that needs no random numbers between them."""

import torch

from tessera.ir import Step

WIDTH, WORDS = 16, 12


class Sampler(torch.nn.Module):
    """Noise on the input, dropout, a stochastic rounding, and a token sampled from the scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> dict[str, torch.Tensor]:
        """The sampled tokens and their scores; `seen` counts the tokens."""
        noisy = self.first(x) + torch.rand(x.shape, device=x.device)
        kept = torch.nn.functional.dropout(noisy, 0.5, True)
        scores = self.second(kept)
        rounded = (scores * 8 + torch.rand(scores.shape, device=x.device)).floor() / 8
        token = torch.multinomial(rounded.softmax(-1), 1)
        seen.scatter_add_(1, token, torch.ones_like(seen))
        return {"token": token, "scores": scores}


def step(record: Step) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """For `drawing_model:step`."""
    x = torch.randn(record.batch, WIDTH, generator=torch.Generator().manual_seed(record.seed))
    return Sampler(), {"x": x, "seen": torch.zeros(record.batch, WORDS)}
