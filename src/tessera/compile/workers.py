"""Workers: a stepper for one graph, started when needed, ended with the graph, at most a few at a time."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tessera.errors import TesseraError
from tessera.execute.offline import RunResult, run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Plan

# Graphs that keep their workers; the one used longest ago gives its up and starts them again when called.
MAX_ENGINES = 8
# A device whose worker fails so often in a row is given up.
MAX_FAILURES = 3

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One call: a request of one step."""

    given_inputs: Tensors
    given_state: Tensors

    def state(self) -> Tensors:
        """The state before the call."""
        return self.given_state

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        """The call's inputs."""
        return self.given_inputs


@dataclass
class _Waiting:
    """A call that waits for its turn, or has had it."""

    request: Call
    result: RunResult | None = None
    error: BaseException | None = None


class Workers:
    """A stepper that starts when it is first needed and ends with this object.

    Calls of several threads that come while others run are taken together, `slots` of them in flight.
    """

    # All that have started, the one used longest ago first.
    live: ClassVar["OrderedDict[int, weakref.ref[Workers]]"] = OrderedDict()
    live_lock = threading.RLock()

    def __init__(self, plan: Plan, weights: Tensors) -> None:
        self.plan, self._weights = plan, weights
        self._stepper: WorkerStepper | None = None
        self._end: Callable[[], Any] | None = None
        self._turn = threading.RLock()
        self._waiting: list[_Waiting] = []
        self._waiting_lock = threading.Lock()

    def run(self, request: Call) -> RunResult:
        """Runs one call, alone or together with those that wait."""
        mine = _Waiting(request)
        with self._waiting_lock:
            self._waiting.append(mine)
        with self._turn:
            if mine.result is None and mine.error is None:
                self._run_waiting(mine)
        if mine.error is not None:
            raise mine.error
        assert mine.result is not None, "a call that had its turn has a result or an error"
        return mine.result

    def close(self) -> None:
        """Ends the worker processes; a later run starts new ones."""
        with self._turn:
            if self._end is not None:
                self._end()
            self._stepper, self._end = None, None

    def _run_waiting(self, mine: _Waiting) -> None:
        with self._waiting_lock:
            batch, self._waiting = self._waiting, []
        try:
            run = run_offline(self._started(), [waiting.request for waiting in batch])
            run.raise_failures()
        except TesseraError as error:
            for waiting in batch:
                waiting.error = error
        else:
            for waiting, result in zip(batch, run.results, strict=True):
                waiting.result = result
        finally:
            left = [w for w in batch if w.result is None and w.error is None]
            if left or batch[0].error is not None:  # work may be left in the pipes
                self.close()
            with self._waiting_lock:  # whoever was interrupted, the others still want their results
                self._waiting = [w for w in left if w is not mine] + self._waiting

    def _started(self) -> WorkerStepper:
        with self.live_lock:
            self.live.pop(id(self), None)
            if self._stepper is None:
                self._make_room()
                made = WorkerStepper([self.plan], self._weights, max_failures=MAX_FAILURES)
                self._stepper = made.__enter__()
                self._end = weakref.finalize(self, _stop, self._stepper, id(self), self.live)
            self.live[id(self)] = weakref.ref(self)
            return self._stepper

    def _make_room(self) -> None:
        """Ends the workers used longest ago, unless they are at work."""
        for key, known in list(self.live.items())[: max(0, len(self.live) - MAX_ENGINES + 1)]:
            other = known()
            if other is None or other._turn.acquire(blocking=False):
                self.live.pop(key, None)
                if other is not None:
                    other.close()
                    other._turn.release()


def _stop(stepper: WorkerStepper, key: int, live: "OrderedDict[int, weakref.ref[Workers]]") -> None:
    live.pop(key, None)
    stepper.__exit__(None, None, None)


def close_all() -> None:
    """Ends the workers of all graphs; a graph that is called again starts new ones."""
    for known in list(Workers.live.values()):
        workers = known()
        if workers is not None:
            workers.close()
