"""The gate: who knows the secret comes in, everybody else is sent away, and nobody holds up the others."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection

import pytest
from tessera.execute.handshake import ENGINE, LOOPBACK_SECRET, EngineCall, call_engine, check_secret, prove
from tessera.execute.remote import Caller, Gate

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute import handshake, messages
from tessera.execute.messages import Cancel, Hello, Refused

OWN = handshake.own_version()
SECRET = b"a secret of more than sixteen bytes"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate on this machine that is not patient."""
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 1.0)
    made = Gate("127.0.0.1", 0, SECRET)
    yield made
    made.close()


def come_in(gate: Gate, rank: int = 0, secret: bytes = SECRET) -> Connection:
    """Calls as a worker does."""
    return call_engine(EngineCall(gate.address, secret, "plans"), rank, 5.0)


def complaint(gate: Gate) -> str:
    """The next complaint, when it has come."""
    deadline = time.monotonic() + 5
    while not gate.complaints:
        assert time.monotonic() < deadline, "nobody complained"
        time.sleep(0.01)
    return gate.complaints.popleft()


def first(callers: Sequence[Caller]) -> Caller | None:
    """Whoever waits longest."""
    return next(iter(callers), None)


def taken(gate: Gate) -> Caller:
    """The next caller."""
    caller = gate.take(first, 5.0)
    assert caller is not None
    return caller


def test_who_knows_the_secret_comes_in(gate: Gate) -> None:
    """The gate knows the caller's rank and plans, and both can speak."""
    pipe = come_in(gate, 3)
    caller = taken(gate)
    messages.post(caller.pipe, Cancel(7))

    assert Hello(3, "plans", handshake.own_version()) == caller.hello
    assert Cancel(7) == messages.decode(pipe.recv_bytes())


def test_another_secret_is_refused_on_both_sides(gate: Gate) -> None:
    """The caller has one clear message, the gate another; nobody waits inside."""
    with pytest.raises(MismatchError, match=r"another secret. Use one --secret-file"):
        come_in(gate, secret=b"another secret, as long")

    assert "another secret" in complaint(gate)
    assert gate.take(first, 0.0) is None


def test_a_false_engine_is_found_out() -> None:
    """A caller does not speak to one that has not proved that it knows the secret."""
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer() -> None:
            with false.accept()[0] as calling:
                calling.sendall(ENGINE + os.urandom(32))
                proof = calling.recv(4096)
                calling.sendall(proof[-32:])  # all it can do: send the caller's own proof back

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(MismatchError, match="another secret"):
            call_engine(EngineCall(("127.0.0.1", false.getsockname()[1]), SECRET), 0, 0.0)


def test_something_else_at_the_port_is_named() -> None:
    """A server that greets in its own way is no engine."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as calling, suppress(ConnectionError):
                calling.sendall(b"220 mail.example")
                calling.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(MismatchError, match="no engine"):
            call_engine(EngineCall(("127.0.0.1", other.getsockname()[1]), SECRET), 0, 0.0)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 64, struct.pack("!i", 64) + b"x" * 64]
)
def test_garbage_is_one_complaint(gate: Gate, garbage: bytes) -> None:
    """Whatever is sent in place of a proof, the caller is hung up on and the next one comes in."""
    with socket.create_connection(gate.address) as calling:
        calling.sendall(garbage)
        said = complaint(gate)
    kept = come_in(gate)

    assert said.startswith("127.0.0.1: ")
    assert 0 == taken(gate).hello.rank
    kept.close()


def test_a_caller_that_hangs_holds_up_nobody(gate: Gate) -> None:
    """Silent and dripping callers have a deadline; meanwhile others come in at once."""
    silent = [socket.create_connection(gate.address) for _ in range(20)]
    dripping = socket.create_connection(gate.address)
    dripping.sendall(b"\0")
    kept = come_in(gate, 1)
    assert 1 == taken(gate).hello.rank
    assert not gate.complaints, "the others were still waited for"
    kept.close()

    dripping.settimeout(5)
    while dripping.recv(256):  # the greeting, and then the hang-up
        pass
    assert "silent" in complaint(gate)
    for calling in silent:
        calling.close()


@contextmanager
def crowd(gate: Gate, size: int, source: str = "127.0.0.1", says: bytes = b"") -> Iterator[None]:
    """So many callers of one address that say this and nothing more."""
    made = [socket.create_connection(gate.address, source_address=(source, 0)) for _ in range(size)]
    for calling in made:
        with suppress(OSError):  # it may have been hung up on
            calling.sendall(says)
    yield
    for calling in made:
        calling.close()


@pytest.mark.parametrize("says", [b"", b"\0"])
def test_a_crowd_holds_up_nobody(says: bytes) -> None:
    """200 callers that are silent, or drip: a worker of the same machine comes in at once all the same."""
    gate, start_s = Gate("127.0.0.1", 0, SECRET), time.monotonic()
    with crowd(gate, 200, says=says):
        kept = come_in(gate, 2)

        assert 2 == taken(gate).hello.rank
        assert time.monotonic() - start_s < 5.0 < handshake.HANDSHAKE_S
        assert len(gate.door.answering) < handshake.MAX_HANDSHAKES
    kept.close()
    gate.close()


def test_a_crowd_pushes_out_only_itself(gate: Gate) -> None:
    """One that is slow keeps its place while others of another address come and go."""
    slow = socket.create_connection(gate.address)
    with crowd(gate, 2 * handshake.MAX_HANDSHAKES, "127.0.0.2"):
        prove(slow, SECRET, ENGINE, messages.encode(Hello(1, "", handshake.own_version())))

        assert 1 == taken(gate).hello.rank
    slow.close()


def test_one_that_says_nothing_is_soon_hung_up_on(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the deadline of the whole handshake, and a crowd of them is one line."""
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 60.0)
    monkeypatch.setattr(handshake, "FIRST_BYTE_S", 0.2)
    said: list[str] = []
    gate._complain = said.append
    with crowd(gate, 5):
        deadline = time.monotonic() + 5
        while len(gate.complaints) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)

    assert 5 == len(gate.complaints)
    assert ["127.0.0.1: did not know the secret, or was silent"] == said


def test_one_with_the_secret_must_say_who_it_is(gate: Gate) -> None:
    """Another message, garbage or nothing in its place is a complaint."""
    for said in (messages.encode(Cancel(1)), b"\x02\0\0\0[]", b""):
        with socket.create_connection(gate.address) as calling, pytest.raises(EOFError):
            prove(calling, SECRET, ENGINE, said)

        assert "127.0.0.1: " in complaint(gate)
    assert gate.take(first, 0.0) is None


def test_another_version_is_refused_with_both_named(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is told which versions there are."""
    monkeypatch.setattr(handshake, "own_version", lambda: "9.9 (format 99)")
    pipe = come_in(gate)
    answer = messages.decode(pipe.recv_bytes())

    assert isinstance(answer, Refused)
    assert "9.9" in answer.message
    assert OWN in answer.message


def test_one_that_left_while_it_waited_is_not_taken(gate: Gate) -> None:
    """A worker that died before it was needed is passed over."""
    come_in(gate, 0).close()
    time.sleep(0.1)
    kept = come_in(gate, 1)

    assert 1 == taken(gate).hello.rank
    kept.close()


def test_no_engine_is_said_after_the_patience() -> None:
    """A worker that nobody answers ends with one line."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = ("127.0.0.1", int(free.getsockname()[1]))
    with pytest.raises(WorkerError, match=r"no engine answers.*Start rank 0 first"):
        call_engine(EngineCall(address, SECRET), 0, 0.0)


def test_the_old_handshake_is_no_way_in(gate: Gate) -> None:
    """Python's own client, with the right secret, is not understood and hung up on."""
    with pytest.raises((OSError, EOFError, AssertionError)):
        Client(gate.address, authkey=SECRET)


def test_a_port_in_use_is_named(gate: Gate) -> None:
    """Two gates cannot have one address."""
    with pytest.raises(TesseraError, match="cannot listen"):
        Gate(*gate.address, SECRET)


def test_an_address_that_others_can_call_needs_a_secret() -> None:
    """Loopback is served without one, anything else is not."""
    assert LOOPBACK_SECRET == check_secret("127.0.0.1", None)
    with pytest.raises(TesseraError, match="--secret-file"):
        check_secret("10.1.2.3", None)


def test_a_secret_is_not_shown() -> None:
    """It does not get into messages and logs by way of a record."""
    assert SECRET.decode() not in repr(EngineCall(("127.0.0.1", 1), SECRET))
