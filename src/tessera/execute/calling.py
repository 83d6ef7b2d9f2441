"""The worker's side of a rendezvous: calls the engine, and works for it until it hangs up.

A worker either has the plan files itself, and says their digest; or it has none and is sent its briefing (see
`briefing`). Either way it makes its own weights, and no code and no weight crosses the network.
"""

import os
import socket
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute import messages, worker
from tessera.execute.briefing import Briefing, setup_of, unpack_briefing
from tessera.execute.collective import meetings
from tessera.execute.footprint import Programs, landing_bytes
from tessera.execute.handshake import Call, call_engine
from tessera.execute.hub import START_TIMEOUT_S
from tessera.execute.messages import Refused, Welcome
from tessera.ir import Step

# From the step of a trace to the weights of its model.
MakeWeights = Callable[[Step], Mapping[str, torch.Tensor]]


def opener_of(programs: Programs, device: int, world: int, host: str) -> Any:
    """Opens the gloo transport of one worker that others reach at `host`."""
    joined = [
        (src, dst)
        for src in range(world)
        for dst in range(world)
        if src != dst and landing_bytes(programs, src, dst)
    ]
    return meetings("gloo", world, joined, [host] * world)[device]


def serve_device(setup: worker.Setup, world: int, call: Call, rank: int | None = None) -> None:
    """Calls the engine with plans of its own and works for it until it hangs up."""
    pipe = call_engine(call, setup.device if rank is None else rank, START_TIMEOUT_S)
    _work(setup, world, pipe)


def serve_and_exit(setup: worker.Setup, world: int, call: Call, rank: int | None = None) -> None:
    """The same, as a process of its own; threads of gloo may still wait for peers that are gone."""
    serve_device(setup, world, call, rank)
    os._exit(0)


def serve_call(call: Call, rank: int, make_weights: MakeWeights, patience_s: float = START_TIMEOUT_S) -> None:
    """Calls the engine without plans, is briefed, and works for it until it hangs up."""
    pipe = call_engine(call, rank, patience_s)
    try:
        answer = messages.decode(pipe.recv_bytes())  # a spare worker waits here until it is needed
    except (EOFError, OSError):
        return  # the engine hung up before it had work
    if isinstance(answer, Refused):
        raise MismatchError(answer.message, answer.remedy, call.place)
    if not isinstance(answer, Welcome):
        raise WorkerError(f"the engine said {type(answer).__name__} in place of a briefing", place=call.place)
    try:
        briefing = unpack_briefing(answer.briefing)
        setup = setup_of(briefing, _weights(briefing, make_weights))
    except TesseraError as error:  # the engine should not wait for one that cannot come
        messages.post(pipe, messages.Failed(error.message, error.remedy))
        pipe.close()
        raise
    _work(setup, briefing.world, pipe)


def _weights(briefing: Briefing, make: MakeWeights) -> dict[str, torch.Tensor]:
    """Of as many steps as it takes to have all; steps of one model share most."""
    found: dict[str, torch.Tensor] = {}
    wanted = {name for name, _, _ in briefing.weights}
    for step in dict.fromkeys(trace.step for trace in briefing.traces):
        if not wanted <= found.keys():
            found |= make(step)
    return found


def _work(setup: worker.Setup, world: int, pipe: Connection) -> None:
    with socket.socket(fileno=os.dup(pipe.fileno())) as own:
        host = str(own.getsockname()[0])
    worker.serve(setup, opener_of(setup.programs, setup.device, world, host), pipe, pipe)
