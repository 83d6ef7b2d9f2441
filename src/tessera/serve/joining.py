"""Joining: worker processes that call the engine, are briefed, work, and call again when it needs them anew.

A session is one process: it calls, has the weights of its device, and works until the engine hangs up. It
makes its weights itself where it can, and asks the engine for the others (`execute.setups`). When its device
is lost to the engine, by whatever fault, the engine takes whoever calls next, so a worker that is left, one
that was killed and one on a new machine are the same to it: they call. `keep_working` sees to it that a
session follows a session until no engine answers any more: soon where the engine's machine says that nobody
listens, and patiently where the network says nothing.

The engine names the model. Built-in names and folders are built; code that a name would import is not,
because the briefing of another machine should choose no code on this one: its weights are sent instead.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from tessera.errors import CaptureError, MismatchError, TesseraError, WorkerError
from tessera.execute import messages, worker
from tessera.execute.handshake import EngineCall, call_engine, has_hung_up, link_key
from tessera.execute.hub import START_TIMEOUT_S, STOP_TIMEOUT_S, hidden_main
from tessera.execute.messages import Briefed, Failed, Refused, Want, WeightBytes, Welcome
from tessera.execute.pipes import socket_of
from tessera.execute.setups import (
    MAX_BRIEFING_BYTES,
    PIECE_BYTES,
    Briefing,
    fetch,
    setup_of,
    unpack_briefing,
)
from tessera.ir import Step

# From the step of a trace to the weights of its model; raises TesseraError where it cannot be had here.
MakeWeights = Callable[[Step], Mapping[str, torch.Tensor]]
Say = Callable[[str], None]
# Of a message around its tensors.
HEADER_BYTES = 1 << 16
# After a session, how long the engine's machine may say that nobody listens until the worker leaves.
AGAIN_S = 5.0
# What a session imports: done once, by the process that sessions are forked from.
# Most of the time goes into transformers, which is passed over where it is not installed.
PRELOADED = ["tessera.serve.joining", "tessera.flow", "transformers.modeling_utils"]


@dataclass(frozen=True)
class ModelHere:
    """Makes weights of the engine's model on this machine."""

    # A name or folder in place of the engine's; empty: the engine's own.
    model: str = ""
    # True where the user of this machine has named the model: it may be code.
    may_import: bool = False

    def __call__(self, step: Step) -> Mapping[str, torch.Tensor]:
        from tessera.capture import build

        model = self.model or step.model
        if ":" in model and not self.may_import and not os.path.isdir(model):
            raise CaptureError(f"the engine's model {model} is code to import")
        if not self.model and os.path.isabs(model) and not os.path.isdir(model):
            raise CaptureError(f"there is no folder {model} on this machine")
        return build(replace(step, model=model)).weights()


def keep_working(
    call: EngineCall,
    rank: int,
    make: ModelHere,
    patience_s: float = START_TIMEOUT_S,
    again_s: float = AGAIN_S,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Session after session until no engine answers; returns how many there were."""
    sessions = 0
    while True:
        found, code = _session(call, rank, make, patience_s, again_s if sessions else None)
        if isinstance(found, WorkerError) and sessions:
            return sessions  # the engine is gone, as it should be in the end
        if found is not None:
            raise found
        sessions += 1
        how = "the engine hung up" if code == 0 else f"the worker ended with exit code {code}"
        say(f"{how}; calling again")


def _session(
    call: EngineCall, rank: int, make: ModelHere, patience_s: float, again_s: float | None
) -> tuple[TesseraError | None, int]:
    """One process from call to hang-up: the error it ended with, and its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    mine, theirs = context.Pipe(duplex=False)
    arguments = (call, rank, make, patience_s, again_s, theirs)
    process = context.Process(target=_session_main, args=arguments, name="tessera-worker", daemon=True)
    with hidden_main():
        process.start()
    theirs.close()
    kind, words = "", []
    try:
        kind, *words = mine.recv()  # from our own child
    except EOFError:
        pass  # it has worked until the engine hung up, or was ended
    except KeyboardInterrupt:
        process.kill()
        raise
    finally:
        mine.close()
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
    code = process.exitcode or 0
    process.close()
    if not kind:
        return None, code
    error = WorkerError(*words) if kind == WorkerError.__name__ else MismatchError(*words)
    return error, code


def _session_main(
    call: EngineCall,
    rank: int,
    make: ModelHere,
    patience_s: float,
    again_s: float | None,
    outcome: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent acts on it
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        serve_call(
            call, rank, make, patience_s, again_s, lambda line: print(line, file=sys.stderr, flush=True)
        )
    except TesseraError as error:
        is_gone = isinstance(error, WorkerError)
        name = WorkerError.__name__ if is_gone else MismatchError.__name__
        outcome.send((name, error.message, error.remedy, error.place))
        outcome.close()
    os._exit(0)  # threads may still wait for peers that are gone


def _follow_parent() -> None:
    """A session does not outlive the process that keeps it going, even one that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def serve_call(
    call: EngineCall,
    rank: int,
    make_weights: MakeWeights,
    patience_s: float = START_TIMEOUT_S,
    again_s: float | None = None,
    say: Say = lambda line: None,
) -> None:
    """One session; `patience_s` and `again_s` as of `call_engine`."""
    pipe = call_engine(call, rank, patience_s, again_s)
    try:
        # A worker that is not needed now waits here until it is.
        answer = messages.decode(pipe.recv_bytes(MAX_BRIEFING_BYTES))
    except (EOFError, OSError):
        return  # the engine hung up before it had work
    if isinstance(answer, Refused):
        raise MismatchError(answer.message, answer.remedy, call.place)
    if not isinstance(answer, Welcome):
        raise WorkerError(f"the engine said {type(answer).__name__} in place of a briefing", place=call.place)
    try:
        briefing = unpack_briefing(answer.briefing)
        key = link_key(call.secret, bytes.fromhex(briefing.session_hex))
        setup = setup_of(briefing, _weights(briefing, make_weights, pipe, say), key, _own_host(pipe))
    except (EOFError, OSError):
        return
    except TesseraError as error:  # the engine should not wait for one that cannot come
        messages.post(pipe, Failed(error.message, error.remedy))
        pipe.close()
        raise
    if messages.post(pipe, Briefed()):
        threading.Thread(target=_leave_with, args=(socket_of(pipe),), daemon=True).start()
        worker.serve(setup, pipe)


def _weights(briefing: Briefing, make: MakeWeights, pipe: Connection, say: Say) -> dict[str, torch.Tensor]:
    """Of as many steps as it takes to have all; steps of one model share most. What is left is asked for."""
    found: dict[str, torch.Tensor] = {}
    wanted = {weight.name for weight in briefing.weights}
    for step in dict.fromkeys(trace.step for trace in briefing.duty.traces):
        if not wanted <= found.keys():
            try:
                found |= make(step)
            except TesseraError as error:
                say(f"{error.message}; the engine sends the weights")
                break

    def ask(name: str, start: int) -> memoryview:
        pipe.send_bytes(messages.encode(Want(name, start)))
        answer = messages.decode(pipe.recv_bytes(PIECE_BYTES + HEADER_BYTES))
        if not isinstance(answer, WeightBytes):
            raise WorkerError(f"the engine said {type(answer).__name__} in place of weight '{name}'")
        return answer.data

    missing = [weight for weight in briefing.weights if weight.name not in found]
    return found | {weight.name: fetch(weight, ask) for weight in missing}


def _own_host(pipe: Connection) -> str:
    """Under which the engine, and so the other workers, reach this machine."""
    with socket_of(pipe) as own:
        return str(own.getsockname()[0])


def _leave_with(engine: socket.socket) -> None:
    """Ends a process whose engine has hung up and that does not notice; it computes for ever, perhaps."""
    with engine:
        while not has_hung_up(engine):
            time.sleep(1.0)
    time.sleep(STOP_TIMEOUT_S)
    os._exit(1)
