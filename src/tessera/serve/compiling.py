"""CompileProcess: the compiled steps of a model, captured in processes of their own that see no GPU.

    process = CompileProcess(step, properties)       imports compilers and builds the model without weights
    process.begin(steps)                             one process per step, as many as there are cores
    traces = process.traces(steps, weights, print)

It works beside the program, which loads the weights meanwhile. Launches are those that Inductor makes for a
card with these properties. Nothing is timed: the first configuration of a kernel is taken.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import torch

from tessera.errors import CaptureError, TesseraError, extra_module
from tessera.execute.processes import FORKSERVER, LocalProcess, warm_up
from tessera.ir import Step, Trace

# A step that takes longer to capture than this is taken for hung.
LIMIT_S = 300.0
# The process leaves by itself within this time.
END_S = 2.0
REMEDY = "Capture the steps in the process of the service."


class CompileProcess:
    def __init__(self, smallest: Step, card: SimpleNamespace) -> None:
        warm_up()
        self._process = LocalProcess(work, (smallest, card), "tessera-compile", FORKSERVER)

    def begin(self, steps: Sequence[Step]) -> None:
        """Starts to capture these steps."""
        with suppress(OSError):  # `traces` reports it
            self._process.pipe.send(list(steps))

    def traces(
        self, steps: Sequence[Step], weights: Mapping[str, torch.Tensor], advance: Callable[[str], None]
    ) -> list[Trace]:
        """Traces of steps that were begun; `CaptureError` if the model cannot be built without weights."""
        found: dict[int, Trace] = {}
        try:
            if self._answer() != layouts(weights):
                raise CaptureError("its weights are laid out differently when they are loaded", REMEDY)
            while len(found) < len(steps):
                left = ", ".join(str(step.context) for n, step in enumerate(steps) if n not in found)
                advance(f"capturing {len(steps)} steps, left: {left} tokens")
                number, trace = self._answer()
                found[number] = trace
        except (OSError, EOFError) as error:
            raise CaptureError(f"the compiling process ended early ({error})", REMEDY) from error
        return [found[number] for number in range(len(steps))]

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


def work(pipe: Connection, smallest: Step, card: SimpleNamespace) -> None:
    """Body of the process: builds the model, reads steps, and sends their traces as they come."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context would take memory, and forbid to fork
    with pipe, suppress(OSError, EOFError):
        try:
            import torch._inductor.compile_fx

            from tessera.capture import build
            from tessera.capture.inductor import record_inductor_offline
            from tessera.capture.models import another

            # One lock for all processes: a lock that a forked process makes is never removed.
            extra_module("tqdm", "hf").tqdm.get_lock()
            with torch.device("meta"):
                first = build(smallest)
            steps: list[Step] = pipe.recv()
            pipe.send(layouts(first.weights()))
            _fork(pipe, steps, lambda step: record_inductor_offline(another(first, step), card))
        except Exception as error:  # noqa: BLE001 - the program captures by itself
            message = f"its steps cannot be compiled without weights: {type(error).__name__}: {error}"
            pipe.send(CaptureError(message, REMEDY))


def _fork(pipe: Connection, steps: Sequence[Step], record: Callable[[Step], Trace]) -> None:
    """Sends (number, trace) of every step; each process records its part one after another."""
    num = min(len(steps), len(os.sched_getaffinity(0)))
    readers = []
    for part in range(num):
        reader, writer = Pipe(duplex=False)
        if not os.fork():
            try:
                for number in range(part, len(steps), num):
                    try:
                        writer.send((number, record(steps[number])))
                    except Exception as error:  # noqa: BLE001 - sent to the program
                        writer.send(CaptureError(f"{type(error).__name__}: {error}", REMEDY))
            finally:
                os._exit(0)
        writer.close()
        readers.append(reader)
    while readers:
        for reader in [r for r in readers if r in wait(readers)]:
            try:
                pipe.send(reader.recv())
            except EOFError:
                readers.remove(reader)
