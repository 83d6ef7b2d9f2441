"""Workers of several machines: the engine listens, each worker calls and says who it is.

The call is authenticated both ways by a shared secret (HMAC, as `multiprocessing.connection` does it) before
a byte of it is looked at; after that only `messages` travel, which are JSON and bytes. Without a secret, only
the loopback address is served. Every machine loads the plan from its own file and makes its own weights; a
worker whose plans differ from the engine's is sent away. Transfers go over gloo between the workers.

A worker elsewhere cannot be looked into: of a lost one the request is known that it had, not the instruction.
Clocks of machines are compared once, when a worker is ready, to the time that one message takes.
"""

import ipaddress
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess
from typing import Any

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute import messages, worker
from tessera.execute.collective import meetings
from tessera.execute.footprint import Programs, landing_bytes
from tessera.execute.hub import START_TIMEOUT_S, STOP_TIMEOUT_S, Reception
from tessera.execute.inbox import Inbox
from tessera.execute.messages import Hello, Message

Address = tuple[str, int]
# What stands for a secret on the loopback address, where only this machine can call.
LOOPBACK_SECRET = b"tessera on loopback"
RETRY_S = 0.2


def check_secret(host: str, secret: bytes | None) -> bytes:
    """The secret to use; refuses to meet without one where others could call."""
    if secret:
        return secret
    try:
        is_local = ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError as error:
        raise TesseraError(f"cannot find the host {host}: {error.strerror}", place="--rendezvous") from error
    if not is_local:
        raise TesseraError(
            f"{host} can be called by other machines",
            "Give all processes the same --secret-file.",
            "--rendezvous",
        )
    return LOOPBACK_SECRET


@dataclass(frozen=True)
class Call:
    """How a worker reaches its engine."""

    address: Address
    secret: bytes
    # Names the plans; both sides must have the same.
    digest: str


def opener_of(programs: Programs, device: int, world: int, host: str) -> Any:
    """Opens the gloo transport of one worker that others reach at `host`."""
    joined = [
        (src, dst)
        for src in range(world)
        for dst in range(world)
        if src != dst and landing_bytes(programs, src, dst)
    ]
    return meetings("gloo", world, joined, [host] * world)[device]


def serve_device(setup: worker.Setup, world: int, call: Call) -> None:
    """Calls the engine and works for it until it hangs up."""
    pipe = _call(call)
    with socket.socket(fileno=os.dup(pipe.fileno())) as own:
        host = str(own.getsockname()[0])
    pipe.send_bytes(messages.encode(Hello(setup.device, call.digest)))
    worker.serve(setup, opener_of(setup.programs, setup.device, world, host), pipe, pipe)


def serve_and_exit(setup: worker.Setup, world: int, call: Call) -> None:
    """The same, as a process of its own; threads of gloo may still wait for peers that are gone."""
    serve_device(setup, world, call)
    os._exit(0)


def _call(call: Call) -> Connection:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return Client(call.address, authkey=call.secret)
        except AuthenticationError as error:
            place = f"{call.address[0]}:{call.address[1]}"
            raise MismatchError("the engine has another secret", "Use one --secret-file.", place) from error
        except OSError as error:
            if time.monotonic() > deadline:
                place = f"{call.address[0]}:{call.address[1]}"
                raise WorkerError(f"no engine answers: {error}", "Start rank 0 first.", place) from error
        time.sleep(RETRY_S)


@dataclass
class RemoteHub:
    """The engine's side: the worker of device 0 on this machine, the others wherever they call from."""

    names: Sequence[str]
    setups: Sequence[worker.Setup]
    call: Call
    listener: Listener
    _pipes: dict[int, Connection] = field(default_factory=dict)
    _own: BaseProcess | None = None
    _inbox: Inbox = field(default_factory=Inbox)
    _offsets: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Waits until all have called and are ready."""
        context = multiprocessing.get_context("spawn")
        arguments = (self.setups[0], len(self.names), self.call)
        self._own = context.Process(target=serve_and_exit, args=arguments, daemon=True)
        self._own.start()
        calls: queue.SimpleQueue[Connection | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._accept, args=(calls,), daemon=True).start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self._pipes) < len(self.names):
            self._greet(calls, deadline)
        self._inbox.listen(self._pipes, messages.decode)
        reception = Reception(self.names, self.order)
        reception.run(self._inbox)
        self._offsets = reception.offsets

    def order(self, device: int, message: Message) -> bool:
        """Sends to a worker; False if it is gone."""
        return messages.post(self._pipes[device], message)

    def take(self, timeout_s: float | None) -> tuple[int, Any] | None:
        """The next message of any worker."""
        return self._inbox.take(True, timeout_s)

    def progress(self, device: int, slot: int) -> tuple[int, int] | None:
        """Not known: no memory is shared."""
        return None

    def end(self, device: int) -> str:
        """Hangs up; a worker that still lives leaves when it notices."""
        try:
            with socket.socket(fileno=os.dup(self._pipes[device].fileno())) as pipe:
                pipe.shutdown(socket.SHUT_RDWR)
        except OSError:
            return "its connection is closed"
        return "its connection was closed"

    def clock_offset_s(self, device: int) -> float:
        """As found when the worker was ready."""
        return self._offsets[device]

    def stop(self) -> None:
        """Hangs up on all; the worker of this machine is ended if it does not leave."""
        self.listener.close()
        for device in list(self._pipes):
            self.end(device)
        self._inbox.join(STOP_TIMEOUT_S)
        for pipe in self._pipes.values():
            pipe.close()
        if self._own is not None:
            self._own.join(STOP_TIMEOUT_S)
            if self._own.is_alive():
                self._own.kill()
                self._own.join()

    def _accept(self, calls: "queue.SimpleQueue[Connection | Exception]") -> None:
        while True:
            try:
                calls.put(self.listener.accept())
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # a caller without the secret, or one that hung up: not ours
            except OSError:
                return  # the listener was closed

    def _greet(self, calls: "queue.SimpleQueue[Connection | Exception]", deadline: float) -> None:
        try:
            pipe = calls.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            missing = ", ".join(n for d, n in enumerate(self.names) if d not in self._pipes)
            raise WorkerError(
                f"nobody called within {START_TIMEOUT_S:.0f} s",
                "Start one process a device.",
                f"device {missing}",
            ) from None
        assert isinstance(pipe, Connection)
        try:
            hello = messages.decode(pipe.recv_bytes())
        except (EOFError, OSError, TesseraError):
            pipe.close()
            return
        if not isinstance(hello, Hello) or not 0 <= hello.rank < len(self.names):
            pipe.close()
            return
        if hello.digest != self.call.digest:
            pipe.close()
            name = self.names[hello.rank]
            raise MismatchError(
                "it has other plans", "Copy the same plan files everywhere.", f"device {name}"
            )
        if hello.rank in self._pipes:
            pipe.close()
            raise MismatchError(
                f"two processes say they are rank {hello.rank}", "Give each its own --rank.", "--rank"
            )
        self._pipes[hello.rank] = pipe
