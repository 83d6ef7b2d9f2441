"""The worker's side of a rendezvous: calls the engine, is briefed, and works for it until it hangs up.

It makes its weights itself where it can, and asks the engine for the others; see `setups`. No code crosses
the network.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

import torch

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute import messages, worker
from tessera.execute.handshake import EngineCall, call_engine, has_hung_up, link_key, socket_of
from tessera.execute.hub import START_TIMEOUT_S, STOP_TIMEOUT_S
from tessera.execute.messages import Briefed, Failed, Refused, Want, WeightBytes, Welcome
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
