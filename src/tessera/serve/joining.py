"""Joining: remote worker processes that connect to the engine, and reconnect when a session ends.

A session is one process. After any loss the engine takes the next worker that connects, so old, killed and
new workers are treated alike. `keep_working` runs sessions until no engine answers: soon if connections are
refused, patiently if the network is silent.

The engine names the model. Built-in names and folders are built here; a name that would import code is not,
because another machine must not choose code to run: its weights are sent instead.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

from tessera.errors import CaptureError, MismatchError, TesseraError, WorkerError
from tessera.execute import messages, worker
from tessera.execute.engine_connection import EngineAddress, EngineConnection, connect_engine, own_version
from tessera.execute.hub import START_TIMEOUT_S, STOP_TIMEOUT_S
from tessera.execute.mailbox import Hangup
from tessera.execute.processes import FORKSERVER, LocalProcess, warm_up
from tessera.ir import Step

MakeWeights = Callable[[Step], Mapping[str, torch.Tensor]]
Say = Callable[[str], None]
# How long refused connections are tried again after a session.
AGAIN_S = 5.0
# A missing transformers is skipped.
PRELOADED = ["tessera.serve.joining", "tessera.flow", "transformers.modeling_utils"]


@dataclass(frozen=True)
class LocalModel:
    # In place of the engine's.
    model: str = ""
    # This machine's user named the model: it may import code.
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
    engine: EngineAddress,
    rank: int,
    make: LocalModel,
    patience_s: float = START_TIMEOUT_S,
    again_s: float = AGAIN_S,
    say: Say = lambda line: None,
) -> int:
    sessions = 0
    while True:
        error, ended = _session(engine, rank, make, patience_s, again_s if sessions else None)
        if isinstance(error, WorkerError) and sessions:
            return sessions  # the engine is gone
        if error is not None:
            raise error
        sessions += 1
        how = "the engine hung up" if ended == "exit code 0" else f"the worker ended with {ended}"
        say(f"{how}; connecting again")


def _session(*arguments: Any) -> tuple[TesseraError | None, str]:
    warm_up(PRELOADED)
    process = LocalProcess(_session_main, arguments, "tessera-worker", FORKSERVER)
    error: TesseraError | None = None
    try:
        error = process.pipe.recv()
    except EOFError:
        pass  # it worked until the engine hung up, or was killed
    except KeyboardInterrupt:
        process.end(0.0)
        raise
    return error, process.end(STOP_TIMEOUT_S)


def _session_main(outcome: Pipe, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent handles it
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        join(*(*arguments, lambda line: print(line, file=sys.stderr, flush=True)))
    except TesseraError as error:
        outcome.send(error)
        outcome.close()
    os._exit(0)  # threads may still wait for lost peers


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def join(
    address: EngineAddress,
    rank: int,
    make_weights: MakeWeights,
    patience_s: float = START_TIMEOUT_S,
    again_s: float | None = None,
    say: Say = lambda line: None,
) -> None:
    engine = connect_engine(address, patience_s, again_s)

    def end_late() -> None:
        """A worker in an endless computation does not notice a hang-up."""
        timer = threading.Timer(STOP_TIMEOUT_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    engine.ended = end_late
    try:
        engine.tell(messages.Hello(rank, address.digest, own_version()))
        answer = engine.take(block=True)  # a spare worker waits here until it is needed
        if isinstance(answer, Hangup):
            return
        if isinstance(answer, messages.Failed):
            raise MismatchError(answer.message, answer.remedy, address.place)
        if not isinstance(answer, messages.Welcome):
            what = f"the engine sent {type(answer).__name__} in place of a configuration"
            raise WorkerError(what, place=address.place)
        config = messages.unpack_config(answer.config)
        weights = _weights(config, make_weights, engine, say)
        setup = messages.setup_of(config, weights, address.secret, address.own_host)
        engine.tell(messages.Configured())
        worker.serve(setup, engine)
    except OSError:
        return  # the engine is gone
    except TesseraError as error:
        if not isinstance(error, WorkerError) or not error.place:
            engine.tell(messages.Failed(error.message, error.remedy))  # it must not wait for this worker
        raise
    finally:
        engine.close()


def _weights(
    config: messages.WorkerConfig, make: MakeWeights, engine: EngineConnection, say: Say
) -> dict[str, torch.Tensor]:
    """Steps share weights: build from as few as needed, and request the rest."""
    weights: dict[str, torch.Tensor] = {}
    names = {record.name for record in config.weight_records}
    for step in dict.fromkeys(trace.step for trace in config.traces):
        if not names <= weights.keys():
            try:
                weights |= make(step)
            except TesseraError as error:
                say(f"{error.message}; the engine sends the weights")
                break

    def ask(name: str, start: int) -> memoryview:
        engine.tell(messages.Want(name, start))
        answer = engine.take(block=True)
        if isinstance(answer, Hangup):
            raise BrokenPipeError("the engine is gone")
        if not isinstance(answer, messages.WeightBytes):
            raise WorkerError(f"the engine sent {type(answer).__name__} in place of weight '{name}'")
        return answer.data

    missing = [record for record in config.weight_records if record.name not in weights]
    return weights | {record.name: messages.fetch(record, ask) for record in missing}
