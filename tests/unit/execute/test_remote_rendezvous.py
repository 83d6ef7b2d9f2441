"""The rendezvous: workers with the secret connect, all others are refused and hold up nobody."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute import engine_connection, mailbox
from tessera.execute.engine_connection import (
    LOOPBACK_SECRET,
    EngineAddress,
    EngineConnection,
    check_secret,
    connect_engine,
)
from tessera.execute.mailbox import Hangup, PeerConnection, derive_keys
from tessera.execute.messages import Cancel, Hello
from tessera.execute.rendezvous import Rendezvous

SECRET = b"a secret of more than sixteen bytes"


class Heard:
    """A rendezvous, and what came."""

    def __init__(self) -> None:
        self.rendezvous = Rendezvous("127.0.0.1", 0, SECRET)
        self.news: list[tuple[PeerConnection, Any]] = []
        self.rendezvous.hear = lambda connection, message, contents: self.news.append((connection, message))
        self.complaints = self.rendezvous.complaints

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.rendezvous.port

    def until(self, condition: Callable[[], object], limit_s: float = 10.0) -> None:
        """Hears what comes until it is so."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, (self.news, self.complaints)
            self.rendezvous.mailbox.pump(0.05)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """One on this machine that is not patient."""
    monkeypatch.setattr(mailbox, "HANDSHAKE_MS", 1000)
    found = Heard()
    yield found
    found.rendezvous.close()


def come_in(heard: Heard, rank: int = 0, secret: bytes = SECRET) -> EngineConnection:
    """Connects as a worker does."""
    worker = connect_engine(EngineAddress(*heard.address, secret, "plans"), 5.0)
    worker.tell(Hello(rank, "plans", "1"))
    return worker


def test_who_knows_the_secret_comes_in(heard: Heard) -> None:
    """The engine knows the worker's rank and plans, and both can speak."""
    worker = come_in(heard, 3)
    heard.until(lambda: heard.news)
    connection, hello = heard.news[0]
    connection.send(Cancel(7))

    assert hello == Hello(3, "plans", "1")
    assert worker.take(block=True) == Cancel(7)
    worker.close()
    heard.until(lambda: len(heard.news) == 2)
    assert heard.news[1] == (connection, Hangup())


def test_another_secret_is_refused_on_both_sides(heard: Heard) -> None:
    """The worker has one clear message, the engine another; nothing is heard."""
    with pytest.raises(MismatchError, match=r"another secret.*Use one --secret-file"):
        come_in(heard, secret=b"another secret, as long")
    heard.until(lambda: heard.complaints)

    assert "another secret" in heard.complaints[0]
    assert not heard.news


def test_the_address_of_the_engine_is_no_way_in(heard: Heard) -> None:
    """A client that knows the engine's public key but not the secret is refused."""
    box = mailbox.Mailbox()
    server = derive_keys(SECRET, "server")[0]
    connection = box.connect(f"tcp://127.0.0.1:{heard.address[1]}", lambda *news: None, b"x" * 32)
    connection.end.socket.curve_serverkey = server
    connection.end.socket.connect(f"tcp://127.0.0.1:{heard.address[1]}")
    connection.send(Hello(0, "", "1"))
    heard.until(lambda: heard.complaints)
    time.sleep(0.3)
    heard.rendezvous.mailbox.pump(0.1)
    box.close()

    assert not heard.news


def answered_by(answer: Callable[[socket.socket], None]) -> None:
    """A worker that connects to something else at the port."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with other.accept()[0] as calling, suppress(OSError):
                        answer(calling)

        threading.Thread(target=serve, daemon=True).start()
        connect_engine(EngineAddress("127.0.0.1", other.getsockname()[1], SECRET), 0.0)


def test_a_false_engine_is_found_out() -> None:
    """A worker does not speak to one that does not prove that it knows the secret."""

    def reflect(calling: socket.socket) -> None:
        calling.settimeout(2.0)
        while data := calling.recv(4096):  # all it can do: send the worker's own words back
            calling.sendall(data)

    with pytest.raises(MismatchError, match="another secret"):
        answered_by(reflect)


def test_something_else_at_the_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that greets in its own way is no engine."""
    for module in (mailbox, engine_connection):
        monkeypatch.setattr(module, "HANDSHAKE_MS", 300)

    def greet(calling: socket.socket) -> None:
        calling.sendall(b"220 mail.example")
        calling.settimeout(2.0)
        while calling.recv(4096):
            pass

    with pytest.raises(MismatchError, match="no engine"):
        answered_by(greet)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 64, struct.pack("!i", 64) + b"x" * 64]
)
def test_garbage_is_one_complaint(heard: Heard, garbage: bytes) -> None:
    """Whatever is sent in place of a handshake, the caller is hung up on and the next one comes in."""
    with socket.create_connection(heard.address) as calling:
        calling.sendall(garbage)
        heard.until(lambda: heard.complaints)
    worker = come_in(heard)
    heard.until(lambda: heard.news)
    worker.close()

    assert len(heard.complaints) == 1
    assert "no worker" in heard.complaints[0] or "silent" in heard.complaints[0]


@contextmanager
def crowd(heard: Heard, size: int, source: str = "127.0.0.1", says: bytes = b"") -> Iterator[None]:
    """So many callers of one address that say this and nothing more."""
    made = [socket.create_connection(heard.address, source_address=(source, 0)) for _ in range(size)]
    for calling in made:
        with suppress(OSError):
            calling.sendall(says)
    yield
    for calling in made:
        calling.close()


@pytest.mark.parametrize("says", [b"", b"\0", b"\xff" * 10])
def test_a_crowd_holds_up_nobody(heard: Heard, says: bytes) -> None:
    """200 callers that are silent, or drip: a worker comes in at once all the same."""
    start_s = time.monotonic()
    with crowd(heard, 200, says=says):
        worker = come_in(heard, 2)
        heard.until(lambda: heard.news)
        assert heard.news[0][1].rank == 2
        assert time.monotonic() - start_s < 5.0
    worker.close()


def test_one_that_is_slow_keeps_its_place(heard: Heard) -> None:
    """While others of another address come and go."""
    slow = come_in(heard, 1)
    with crowd(heard, 128, "127.0.0.2"):
        heard.until(lambda: heard.news)
        slow.tell(Cancel(1))
        heard.until(lambda: len(heard.news) == 2)
    slow.close()


def test_silent_callers_are_soon_hung_up_on() -> None:
    """And a crowd of them is one line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailbox, "HANDSHAKE_MS", 200)
        heard = Heard()
    said: list[str] = []
    heard.rendezvous._complain = said.append
    with crowd(heard, 5):
        heard.until(lambda: len(heard.complaints) == 5)
    heard.rendezvous.close()

    assert said == ["127.0.0.1: it was silent"]


def test_what_is_no_message_ends_a_connection(heard: Heard) -> None:
    """A peer with the secret that breaks a bound is not heard any more, and the reason is reported."""
    worker = come_in(heard)
    heard.until(lambda: heard.news)
    worker._connection.send(b"\x02\0\0\0[]")
    worker.tell(Cancel(1))
    heard.until(lambda: len(heard.news) == 2)
    heard.rendezvous.mailbox.pump(0.2)
    worker.close()

    assert "cannot be read" in heard.news[1][1].reason
    assert len(heard.news) == 2


def test_no_engine_is_said_after_the_patience() -> None:
    """A worker that nobody answers ends with one line."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with pytest.raises(WorkerError, match=r"no engine answers.*Start rank 0 first"):
        connect_engine(EngineAddress("127.0.0.1", port, SECRET), 0.0)


def test_an_engine_that_closes_after_a_probe_is_soon_given_up() -> None:
    """A worker that connects again does not wait as long as one that connects first."""
    with socket.create_server(("127.0.0.1", 0)) as closing:

        def close() -> None:
            closing.accept()[0].close()
            closing.close()

        port = int(closing.getsockname()[1])
        threading.Thread(target=close, daemon=True).start()
        with pytest.raises(WorkerError, match="no engine answers"):
            connect_engine(EngineAddress("127.0.0.1", port, SECRET), 20.0, again_s=0.2)


def test_a_port_in_use_is_named(heard: Heard) -> None:
    """Two engines cannot have one address."""
    with pytest.raises(TesseraError, match="cannot listen"):
        Rendezvous(*heard.address, SECRET)


def test_bytes_on_the_wire_are_encrypted(heard: Heard) -> None:
    """Neither a message nor the secret can be read in between."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(65536):
                    seen.extend(data)
                    target.sendall(data)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    calling, _ = between.accept()
                    engine = socket.create_connection(heard.address)
                    for pair in ((calling, engine), (engine, calling)):
                        threading.Thread(target=relay, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        worker = connect_engine(EngineAddress("127.0.0.1", between.getsockname()[1], SECRET), 5.0)
        worker.tell(Hello(0, "a text to look for", "1"))
        heard.until(lambda: heard.news)
        worker.close()

    assert heard.news[0][1].digest == "a text to look for"
    assert len(seen) > 200
    assert b"a text to look for" not in seen
    assert SECRET not in seen
    assert b"Hello" not in seen


def test_an_address_that_others_can_reach_needs_a_secret() -> None:
    """Loopback is served without one, anything else is not."""
    assert LOOPBACK_SECRET == check_secret("127.0.0.1", None)
    with pytest.raises(TesseraError, match="--secret-file"):
        check_secret("10.1.2.3", None)


def test_a_secret_is_not_shown() -> None:
    """It does not get into messages and logs by way of a record."""
    assert SECRET.decode() not in repr(EngineAddress("127.0.0.1", 1, SECRET))


def test_versions_are_named() -> None:
    """With the format of files."""
    assert "format" in engine_connection.own_version()
