"""PlannerProcess: a `ServicePlanner` in processes of low priority, so that planning delays no client.

The planner is pickled once. Graphs, costs and plans that both sides have are named by their number instead of
being sent: the engine's thread would wait while they are read.
"""

import io
import os
import pickle
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tessera.adapt.controller import Change, Replanned
from tessera.errors import TesseraError
from tessera.execute.processes import FORKSERVER, LocalProcess
from tessera.ir import ServicePlan
from tessera.serve.groups import plans_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tessera.serve.policies import ServicePlanner

NICE = 10
LIMIT_S = 600.0
Policies = tuple[ServicePlan, ...]


class PlannerProcess:
    """`replan` waits for a process; call it from any thread but the engine's."""

    def __init__(self, planner: "ServicePlanner") -> None:
        self._shared = shared_parts(planner)
        self._planner = pickle.dumps(replace(planner))  # without what it has worked out
        self._lock = threading.Lock()
        self._processes: set[LocalProcess] = set()
        self._idle: list[LocalProcess] = []
        self._is_closed = False

    def close(self) -> None:
        """Ends all processes, also those that run a job."""
        with self._lock:
            self._is_closed = True
            processes, self._processes, self._idle = list(self._processes), set(), []
        for process in processes:
            process.end(0.0)

    def replan(self, policies: Policies, change: Change) -> Replanned[ServicePlan]:
        job = dumps((policies, change), self._shared)
        process = self._taken()
        try:
            process.pipe.send_bytes(job)
            if not process.pipe.poll(LIMIT_S):
                raise EOFError(f"it took more than {LIMIT_S:g} s")
            answer = process.pipe.recv_bytes()
        except (OSError, EOFError) as error:
            with self._lock:
                self._processes.discard(process)
            how = process.end(0.0)
            raise TesseraError(f"the planning process ended early ({str(error) or how})") from error
        with self._lock:
            self._idle.append(process)
        result: Replanned[ServicePlan] | TesseraError = loads(answer, (*self._shared, *plans_of(policies)))
        if isinstance(result, TesseraError):
            raise result
        return result

    def _taken(self) -> LocalProcess:
        with self._lock:
            if self._is_closed:
                raise TesseraError("the service is stopping")
            if self._idle:
                return self._idle.pop()
            process = LocalProcess(work, (), "tessera-planner", FORKSERVER)
            self._processes.add(process)
        with suppress(OSError):  # the job finds out
            process.pipe.send_bytes(self._planner)
        return process


def work(pipe: "Connection") -> None:
    os.nice(NICE)
    with pipe, suppress(OSError, EOFError):
        planner = pickle.loads(pipe.recv_bytes())
        if planner.is_beside_host:  # all threads of a CPU's worker wait for one that this process displaces
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        shared = shared_parts(planner)
        while True:
            policies, change = loads(pipe.recv_bytes(), shared)
            try:
                result = planner.replan(policies, change)
            except TesseraError as error:
                result = error
            pipe.send_bytes(dumps(result, (*shared, *plans_of(policies))))


def shared_parts(planner: "ServicePlanner") -> tuple[object, ...]:
    return (*planner.unit.graphs, *planner.costs, planner.unit, planner.cluster)


def dumps(value: object, shared: Sequence[object]) -> bytes:
    numbers, buffer = {id(part): number for number, part in enumerate(shared)}, io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> int | None:
            return numbers.get(id(obj))

    Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes, shared: Sequence[object]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> object:
            return shared[pid]

    return Unpickler(io.BytesIO(data)).load()  # between a process and its child
