"""PlannerProcess: a `ServicePlanner` in a process of low priority for each job: planning delays no client.

The planner is pickled once. Graphs, costs and plans that both sides have are named by number: the engine's
thread would wait while they are read.
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
from tessera.serve.groups import Policies, plans_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tessera.serve.policies import ServicePlanner

NICE = 10
LIMIT_S = 600.0


class PlannerProcess:
    """`replan` waits for a process; call it from any thread but the engine's."""

    def __init__(self, planner: "ServicePlanner") -> None:
        self._shared = shared_parts(planner)
        self._planner = pickle.dumps(replace(planner))  # without its cached properties
        self._lock = threading.Lock()
        self._processes: set[LocalProcess] = set()
        self._is_closed = False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        for process in processes:
            process.end(0.0)

    def replan(self, policies: Policies, change: Change) -> Replanned[ServicePlan]:
        job = dumps((policies, change), self._shared)
        with self._lock:
            if self._is_closed:
                raise TesseraError("the service is stopping")
            try:
                process = LocalProcess(work, (), "tessera-planner", FORKSERVER)
            except OSError as error:
                raise TesseraError(f"no planning process can be started ({error})") from error
            self._processes.add(process)
        try:
            process.pipe.send_bytes(self._planner)
            process.pipe.send_bytes(job)
            if not process.pipe.poll(LIMIT_S):
                raise EOFError(f"it took more than {LIMIT_S:g} s")
            answer = process.pipe.recv_bytes()
        except (OSError, EOFError) as error:
            how = str(error) or process.end(0.0)
            raise TesseraError(f"the planning process ended early ({how})") from error
        finally:
            process.end(0.0)
            with self._lock:
                self._processes.discard(process)
        result: Replanned[ServicePlan] | TesseraError = loads(answer, (*self._shared, *plans_of(policies)))
        if isinstance(result, TesseraError):
            raise result
        return result


def work(pipe: "Connection") -> None:
    os.nice(NICE)
    with pipe, suppress(OSError, EOFError):
        planner = pickle.loads(pipe.recv_bytes())
        if planner.is_beside_host:  # all threads of a CPU's worker wait for one that this process displaces
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        shared = shared_parts(planner)
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
