"""The sockets under `links`: how they are called, how both ends prove that they know the session's key.

Each end sends 32 random bytes, each answers with the HMAC-SHA-256 of its role, of the names of the two and of
both ends' bytes. The roles keep an answer from being sent back to whom it came from. All of it has a
deadline, however slowly the other side drips.
"""

import contextlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable

from tessera.errors import TesseraError

GREETING = b"tessera link 1\n"
NONCE_BYTES = PROOF_BYTES = 32
# Source device, its epoch, destination device.
_NAMES = struct.Struct("<qqq")
# From a call to the end of its handshake.
HANDSHAKE_S = 5.0
# What makes a machine that vanished without a word be noticed: after some seconds of silence it is asked, and
# bytes that it does not acknowledge end the connection. Shorter cuts are sat out.
VANISHED = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}


class LinkLost(TesseraError):
    """A link that cannot be opened, or was cut."""


def prove(link: socket.socket, key: bytes, names: tuple[int, int, int]) -> None:
    """The caller's half of the handshake; `names`: its device and epoch, and the device that it calls."""
    deadline = time.monotonic() + HANDSHAKE_S
    greeting = _read(link, len(GREETING) + NONCE_BYTES, deadline)
    if greeting[: len(GREETING)] != GREETING:
        raise LinkLost("what answers there is no worker")
    told = _NAMES.pack(*names)
    nonces = greeting[len(GREETING) :] + os.urandom(NONCE_BYTES)
    link.sendall(told + nonces[NONCE_BYTES:] + _proof(key, b"caller", told, nonces))
    answer = _read(link, PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(key, b"called", told, nonces)):
        raise LinkLost("what answers there has another key")
    link.settimeout(None)


def admit(link: socket.socket, key: bytes, check: Callable[[int, int, int], None]) -> int:
    """The other half: the device that calls. `check` raises LinkLost for names that are not wanted here."""
    deadline = time.monotonic() + HANDSHAKE_S
    link.settimeout(HANDSHAKE_S)
    own = os.urandom(NONCE_BYTES)
    link.sendall(GREETING + own)
    said = _read(link, _NAMES.size + NONCE_BYTES + PROOF_BYTES, deadline)
    told, proof = said[: _NAMES.size], said[-PROOF_BYTES:]
    nonces = own + said[_NAMES.size : -PROOF_BYTES]
    if not hmac.compare_digest(proof, _proof(key, b"caller", told, nonces)):
        raise LinkLost("it has another key")
    names = _NAMES.unpack(told)
    check(*names)
    link.sendall(_proof(key, b"called", told, nonces))
    link.settimeout(None)
    return int(names[0])


def _proof(key: bytes, role: bytes, names: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + names + nonces, "sha256")


def call(address: str) -> socket.socket:
    kind, *where = address.split(" ", 2)
    if kind == "tcp":
        link = socket.create_connection((where[0], int(where[1])), timeout=HANDSHAKE_S)
    else:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(HANDSHAKE_S)
        link.connect(" ".join(where))
    tune(link)
    return link


def tune(link: socket.socket) -> None:
    if link.family == socket.AF_UNIX:
        return
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in VANISHED.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read(link: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly so many bytes before the deadline, however slowly the other side drips."""
    data = bytearray(size)
    read_into(link, memoryview(data), deadline)
    return bytes(data)


def read_into(link: socket.socket, place: memoryview, deadline: float | None = None) -> None:
    at, size = 0, len(place)
    while at < size:
        if deadline is not None:
            link.settimeout(max(0.001, deadline - time.monotonic()))
        got = link.recv_into(place[at:] if at else place, 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError
        at += got


def end(link: socket.socket) -> None:
    """Ends a socket for both sides, and wakes the thread that uses it, which closes it.

    Nobody else may: the number of a closed socket is given to the next one, under the other thread's hands.
    """
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def words(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "the link was closed"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return getattr(error, "message", str(error))
