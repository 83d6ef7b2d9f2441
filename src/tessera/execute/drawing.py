"""drawing: a launch that draws random numbers, given the state of the generator it was recorded with.

Around the launch the process's default generator of the device is exchanged: it starts from the bytes of the
generator's buffer, which afterwards hold what is left. The process's own generator is as before. So a draw
depends on its buffer alone, wherever and between whatever other draws it runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessera.errors import WorkerError
from tessera.execute.memory import Storage
from tessera.ir import GENERATOR, Launch, Trace


def generator_buffer(trace: Trace, launch: Launch) -> int | None:
    """The buffer of the generator that a launch draws from."""
    return next((a.buffer for a in launch.accesses if trace.buffers[a.buffer].is_generator), None)


@contextmanager
def drawing(name: str, state: Storage) -> Iterator[None]:
    """While entered, the generator called `name` is at `state`, which is then brought up to date."""
    generator = _generator(name)
    before = generator.get_state().clone()
    flat = torch.empty(0, dtype=torch.uint8, device=state.device).set_(state)
    generator.set_state(flat.cpu().clone())
    try:
        yield
        flat.copy_(generator.get_state())
    finally:
        generator.set_state(before)


def _generator(name: str) -> torch.Generator:
    device = torch.device(name.removeprefix(GENERATOR))
    if device.type == "cpu":
        return torch.default_generator
    if not torch.cuda.is_available():
        message = f"the step draws from {name}, and this machine has no CUDA device"
        raise WorkerError(message, "Capture it with --device cpu.")
    torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]
