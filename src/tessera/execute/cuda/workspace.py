"""own_workspaces: scratch memory of matrix products that belongs to the graph it was captured into.

torch keeps one workspace for each handle of cuBLAS and stream, in common memory, and captured products name
it. Whoever clears them (torch.compile with CUDA graphs does) frees memory that the graph still writes to. So
workspaces are cleared before a capture, which makes the capture allocate them from the graph's own pool, and
again after it, so that nothing else uses them.

Not handled: other people's CUDA graphs that name a common workspace; these are torch's rules, not ours.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Enter it around a capture, with nothing at work on the streams that are captured."""
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:  # a torch without CUDA
        yield
        return
    clear()
    try:
        yield
    finally:
        clear()
