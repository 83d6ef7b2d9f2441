"""CompileProcess: the compiled steps of a model, captured in processes that see no GPU.

The program loads the weights meanwhile. Launches are those that Inductor makes for a card with these
properties. Nothing is timed: a kernel has its first configuration.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tessera.errors import CaptureError, TesseraError, extra_module
from tessera.execute.processes import FORKSERVER, LocalProcess, warm_up
from tessera.ir import Step, Trace

if TYPE_CHECKING:
    from tessera.serve.steps import ServedModel

    Make = Callable[[], ServedModel]

# A step that takes longer to capture counts as hung.
LIMIT_S = 300.0
END_S = 2.0
REMEDY = "Capture the steps in the process of the service."


class CompileProcess:
    """`is_early`: capture begins with the model's steps, before `begin` names those of the plan."""

    def __init__(self, make: "Make", card: SimpleNamespace, is_early: bool = True) -> None:
        warm_up()
        self._process = LocalProcess(work, (make, card, is_early), "tessera-compile", FORKSERVER)

    def begin(self, steps: Sequence[Step]) -> None:
        with suppress(OSError):  # `traces` reports it
            self._process.pipe.send(list(steps))

    def traces(
        self, steps: Sequence[Step], weights: Mapping[str, torch.Tensor], advance: Callable[[str], None]
    ) -> list[Trace]:
        """`CaptureError` if the model cannot be built without weights."""
        traces: dict[int, Trace] = {}
        try:
            if self._answer() != layouts(weights):
                raise CaptureError("its weights are laid out differently when they are loaded", REMEDY)
            while len(traces) < len(steps):
                left = ", ".join(str(step.context) for n, step in enumerate(steps) if n not in traces)
                advance(f"capturing {len(steps)} steps, left: {left} tokens")
                number, trace = self._answer()
                traces[number] = trace
        except (OSError, EOFError) as error:
            raise CaptureError(f"the compiling process ended early ({error})", REMEDY) from error
        return [traces[number] for number in range(len(steps))]

    def close(self) -> None:
        self._process.pipe.close()
        self._process.end(END_S)

    def _answer(self) -> Any:
        if not self._process.pipe.poll(LIMIT_S):
            raise EOFError(f"it took more than {LIMIT_S:g} s")
        answer = self._process.pipe.recv()
        if isinstance(answer, TesseraError):
            raise answer
        return answer


def layouts(weights: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {name: (tuple(t.shape), t.stride(), t.dtype) for name, t in weights.items()}


def work(pipe: Connection, make: "Make", card: SimpleNamespace, is_early: bool) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context would take memory, and forbid to fork
    children: dict[Connection, int] = {}
    with pipe, suppress(OSError, EOFError):
        try:
            import torch._inductor.compile_fx

            from tessera.capture.inductor import record_inductor_offline
            from tessera.capture.models import another

            # One lock for all processes: a lock that a forked process makes is never removed.
            extra_module("tqdm", "hf").tqdm.get_lock()
            with torch.device("meta"):
                model = make()

            def record(step: Step) -> Trace:
                return record_inductor_offline(another(model.workloads[-1], step), card)

            begun = [w.step for w in model.workloads] if is_early and model.shape.is_flat else []
            children = _fork(begun, record)
            steps: list[Step] = pipe.recv()
            pipe.send(layouts(model.weights()))
            if steps != begun:
                _end(children)
                children = _fork(steps, record)
            _pass_on(children, pipe)
        except Exception as error:  # noqa: BLE001 - the program captures by itself
            message = f"its steps cannot be compiled without weights: {type(error).__name__}: {error}"
            pipe.send(CaptureError(message, REMEDY))
        finally:
            _end(children)


def _fork(steps: Sequence[Step], record: Callable[[Step], Trace]) -> dict[Connection, int]:
    """Processes that send (number, trace) of every step."""
    num = min(len(steps), len(os.sched_getaffinity(0)))
    children = {}
    for part in range(num):
        reader, writer = Pipe(duplex=False)
        child = os.fork()
        if not child:
            try:
                for number in range(part, len(steps), num):
                    try:
                        writer.send((number, record(steps[number])))
                    except Exception as error:  # noqa: BLE001 - sent to the program
                        writer.send(CaptureError(f"{type(error).__name__}: {error}", REMEDY))
            finally:
                os._exit(0)
        writer.close()
        children[reader] = child
    return children


def _pass_on(children: dict[Connection, int], pipe: Connection) -> None:
    """Until all are sent, or nobody reads the pipe."""
    readers = list(children)
    while readers and pipe not in (ready := wait([*readers, pipe])):
        for reader in [r for r in readers if r in ready]:
            try:
                pipe.send(reader.recv())
            except EOFError:
                readers.remove(reader)


def _end(children: dict[Connection, int]) -> None:
    for child in children.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    children.clear()
