"""Joining: worker processes that call the engine, are briefed, work, and call again when it needs them anew.

A session is one process: it calls, has the weights of its device, and works until the engine hangs up. When
its device is lost to the engine, by whatever fault, the engine takes whoever calls next, so a worker that is
left, one that was killed and one on a new machine are the same to it: they call. `keep_working` sees to it
that a session follows a session until no engine answers any more: soon where the engine's machine says that
nobody listens, and patiently where the network says nothing.

The engine names the model. Built-in names and folders are built; code that a name would import is not,
because the briefing of another machine should choose no code on this one: its weights are sent instead.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from tessera.errors import CaptureError, MismatchError, TesseraError, WorkerError
from tessera.execute.calling import serve_call
from tessera.execute.handshake import EngineCall
from tessera.execute.hub import START_TIMEOUT_S, STOP_TIMEOUT_S, hidden_main
from tessera.ir import Step

# After a session, how long the engine's machine may say that nobody listens until the worker leaves.
AGAIN_S = 5.0
# What a session imports: done once, by the process that sessions are forked from.
# Most of the time goes into transformers, which is passed over where it is not installed.
PRELOADED = ["tessera.execute.calling", "tessera.flow", "transformers.modeling_utils"]


@dataclass(frozen=True)
class ModelHere:
    """Makes weights of the engine's model on this machine."""

    # A name or folder in place of the engine's; empty: the engine's own.
    model: str = ""
    # True where the user of this machine has named the model: it may be code.
    may_import: bool = False

    def __call__(self, step: Step) -> Mapping[str, torch.Tensor]:
        import tessera.flow  # noqa: F401 - hands workers what runs kernels with PTX
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
