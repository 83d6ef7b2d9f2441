"""torch.compile with Tessera: one model, divided between two emulated GPUs, equal bit for bit.

    python examples/compile_a_model.py

The first call captures, plans and starts one worker process a device. The devices compute on CPU workers, so
this shows that a divided model gives the same bits; it is slower than the model itself, and measures nothing.
"""

from collections.abc import Callable

import torch

import tessera


class Block(torch.nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to x what the layers make of it."""
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return out


@torch.no_grad()
def main() -> None:
    """Captures the model by hand, then compiles it, then compares."""
    torch.set_num_threads(1)  # as a worker has: the order of a parallel sum depends on the number of threads
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(256) for _ in range(4))).eval()
    x = torch.randn(8, 256)

    trace = tessera.capture(model, x)
    print(f"{len(trace.launches)} launches, {len(trace.kernels)} kernels")

    options: dict[str, str | int | bool | Callable[..., object]] = {
        "devices": "emu:a100,emu:l40s",
        "policy": "layer-pipeline",
    }
    divided = torch.compile(model, backend="tessera", options=options)
    print("equal bit for bit" if torch.equal(model(x), divided(x)) else "DIFFERENT")


if __name__ == "__main__":
    main()
