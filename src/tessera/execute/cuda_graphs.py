"""GraphPool: CUDA graphs of small pieces of work, many of them, captured quickly one after the other.

Not by `torch.cuda.graph`, which collects garbage and empties torch's cache at every capture. All graphs share
one pool of memory, which a first graph keeps alive; so only graphs that are not replayed side by side may be
made here. A capture that breaks costs its own pool and nothing else.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

# What torch raises when work cannot be captured.
CAPTURE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)


class GraphPool:
    """Captures work on one stream."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._pool = torch.cuda.graph_pool_handle()
        # Graphs that hold the pools, which would go with their last graph.
        self._anchors: dict[Any, torch.cuda.CUDAGraph] = {}

    def capture(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """A graph of some work."""
        if self._pool not in self._anchors:
            self._anchors[self._pool] = self._record(lambda: torch.zeros(8, device=self._device))
        return self._record(work)

    def _record(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(*CAPTURE_ERRORS):
                    graph.capture_end()
                # A capture that broke may hold on to its pool.
                self._pool = torch.cuda.graph_pool_handle()
                raise
            graph.capture_end()
        return graph


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Operators that wait for the device raise: inside a capture they would break more than themselves."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch calls this mode a prototype, each time
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
