"""Works tasks out in several processes, each told where the library is, and says which are done.

Processes are spawned, so nothing of the caller is shared but what is sent. Each uses one thread. A task that
fails with a user's error or a bug ends the run: no figure is drawn from half of its cases.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from benchmarks.paper.library import Library

T = TypeVar("T")
# Works one task out; a function of a module, so that it can be sent.
Work = Callable[[Library, T], Any]


def work_out(
    library: Library, work: Work[T], tasks: Sequence[T], num_processes: int, until: float | None = None
) -> Iterator[tuple[T, Any]]:
    """(task, result) in the order in which they are done; in this process if there is to be one only.

    None is begun after `until`, by `time.perf_counter`.
    """
    if num_processes <= 1 or len(tasks) <= 1:
        for task in tasks:
            if until is None or time.perf_counter() < until:
                yield task, work(library, task)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _prepare) as pool:
        futures: dict[Future[Any], T] = {pool.submit(work, library, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                if not future.cancelled():
                    yield futures[future], future.result()
                if until is not None and time.perf_counter() >= until:
                    for other in futures:
                        other.cancel()
        finally:
            for future in futures:
                future.cancel()


def _prepare() -> None:
    """One thread a process: there is a process a core."""
    import logging

    import torch

    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is not about our flow

    torch.set_num_threads(1)
