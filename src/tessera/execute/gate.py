"""Gate: where workers of other machines call; who does not know the secret is sent away.

After the handshake the caller says who it is (`Hello`) and waits until a hub takes it. Every call has a
thread and a deadline of its own, so that a caller that hangs or sends garbage holds up nobody. There is room
for so many handshakes, and for fewer from one address; who comes when there is none left takes the place of
the one that is at it longest, of the address with the most. So a crowd pushes itself out, not others.
"""

import contextlib
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tessera.errors import TesseraError
from tessera.execute import messages
from tessera.execute.handshake import RETRY_S, Address, admit, deadline_of, own_version, pipe_of
from tessera.execute.messages import Hello, Refused

MAX_HELLO_BYTES = 4096
# Calls in their handshake at one time, and of one address. Who is pushed out may call again.
MAX_HANDSHAKES, MAX_OF_ADDRESS = 64, 32
# Complaints that are kept.
NUM_COMPLAINTS = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """A worker that knows the secret and waits to be taken."""

    pipe: Connection
    hello: Hello
    # Where it called from.
    host: str

    def is_there(self) -> bool:
        """False once it has hung up; what it has said meanwhile is left to be read."""
        try:
            with socket.socket(fileno=os.dup(self.pipe.fileno())) as looked:
                return looked.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def refuse(self, message: str, remedy: str) -> None:
        """Tells it why, and hangs up."""
        messages.post(self.pipe, Refused(message, remedy))
        self.pipe.close()


class Gate:
    """Listens from the moment it is made until it is closed."""

    def __init__(
        self, host: str, port: int, secret: bytes, complain: Callable[[str], None] = lambda line: None
    ) -> None:
        self._secret, self._complain = secret, complain
        try:
            self._socket = socket.create_server((host, port), backlog=512)
        except OSError as error:
            place = f"{host}:{port}"
            remedy = "Use this machine's address and a free port."
            raise TesseraError(f"cannot listen: {error.strerror}", remedy, place) from error
        self.address: Address = (host, int(self._socket.getsockname()[1]))
        # One line for every caller that was sent away, the last ones.
        self.complaints: deque[str] = deque(maxlen=NUM_COMPLAINTS)
        self._callers: list[Caller] = []
        self._is_closed = False
        # Calls in their handshake, the oldest first, by a number of their own: (address, to hang up by).
        self._answering: dict[int, tuple[str, socket.socket]] = {}
        self._num_calls = 0
        self._lock = threading.Condition()
        threading.Thread(target=self._listen, name="tessera-gate", daemon=True).start()

    def take(self, choose: Callable[[Sequence[Caller]], Caller | None], timeout_s: float) -> Caller | None:
        """The caller that is chosen of those that wait, as soon as there is one; None after the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                found = choose(self._waiting())
                if found is not None:
                    self._callers.remove(found)
                    return found
                left = deadline - time.monotonic()
                if left <= 0.0:
                    return None
                self._lock.wait(left)

    def _waiting(self) -> Sequence[Caller]:
        """Those that are still there, in the order they came."""
        for caller in [c for c in self._callers if not c.is_there()]:
            caller.pipe.close()
            self._callers.remove(caller)
        return self._callers

    def send_away(self, caller: Caller, message: str, remedy: str) -> None:
        """Tells a caller why it cannot be had, and keeps the complaint."""
        caller.refuse(message, remedy)
        self._note(caller.host, f"{message}. {remedy}" if remedy else message)

    def close(self) -> None:
        """Nobody can call any more; who still waits is hung up on."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        with self._lock:
            for caller in self._callers:
                caller.pipe.close()
            self._callers.clear()

    def _note(self, host: str, what: str) -> None:
        line = f"{host}: {what}"
        is_new = not self.complaints or self.complaints[-1] != line
        self.complaints.append(line)
        if is_new:  # a crowd is one line
            self._complain(line)

    def _listen(self) -> None:
        while True:
            try:
                calling, (host, *_) = self._socket.accept()
            except ConnectionError:
                continue  # hung up before it was answered
            except OSError as error:
                if self._is_closed:
                    return
                self._note("the gate", f"cannot answer a call: {error.strerror}")
                time.sleep(RETRY_S)  # too many open files, perhaps; others will be closed
                continue
            number = self._make_room(calling, host)
            threading.Thread(target=self._answer, args=(number, calling, host), daemon=True).start()

    def _make_room(self, calling: socket.socket, host: str) -> int:
        """A place for a call, another's if need be; returns the number of the call."""
        with self._lock:
            crowd = Counter(address for address, _ in self._answering.values())
            if crowd[host] >= MAX_OF_ADDRESS:
                self._push_out(host)
            elif len(self._answering) >= MAX_HANDSHAKES:
                self._push_out(crowd.most_common(1)[0][0])
            self._num_calls += 1
            self._answering[self._num_calls] = host, calling.dup()
            return self._num_calls

    def _push_out(self, host: str) -> None:
        number = next(n for n, (address, _) in self._answering.items() if address == host)
        _, own = self._answering.pop(number)
        with own, contextlib.suppress(OSError):  # it may just have hung up itself
            own.shutdown(socket.SHUT_RDWR)

    def _leave(self, number: int) -> bool:
        """A call's handshake is over; False if it was pushed out."""
        with self._lock:
            found = self._answering.pop(number, None)
        if found is None:
            return False
        found[1].close()
        return True

    def _answer(self, number: int, calling: socket.socket, host: str) -> None:
        """One call, in a thread of its own."""
        pipe = pipe_of(calling)
        is_in = False
        try:
            with deadline_of(pipe):
                admit(pipe, self._secret)
                is_in = True
                hello = messages.decode(pipe.recv_bytes(MAX_HELLO_BYTES))
            if not isinstance(hello, Hello):
                raise TesseraError("it did not say who it is")
            if not self._leave(number):
                raise EOFError("pushed out")
        except (EOFError, OSError):
            # A hang-up or an end of patience: of somebody with the secret it is worth a word.
            pipe.close()
            self._note(host, "hung up or was silent" if is_in else "did not know the secret, or was silent")
        except TesseraError as error:
            pipe.close()
            self._note(host, str(error))
        else:
            self._welcome(Caller(pipe, hello, host))
        finally:
            self._leave(number)

    def _welcome(self, caller: Caller) -> None:
        version = caller.hello.version
        if version != own_version():
            remedy = "Install the same version everywhere."
            self.send_away(caller, f"it has Tessera {version}, the engine {own_version()}", remedy)
            return
        with self._lock:
            if self._is_closed:
                caller.pipe.close()
            else:
                self._callers.append(caller)
                self._lock.notify_all()
