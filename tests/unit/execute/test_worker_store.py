"""What workers tell one another through the engine."""

from pathlib import Path

import pytest

from tessera.errors import WorkerError
from tessera.execute.engine_connection import EngineConnection, OwnerGone, key_of
from tessera.execute.mailbox import Mailbox, PeerConnection
from tessera.execute.messages import Message, StoreGet, StoreValue
from tessera.execute.rendezvous import Board

LATE = key_of("link", 1, 0)


class Wires:
    """Keeps what a board sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[tuple[int, int], Message]] = []

    def send(self, source: tuple[int, int], message: Message) -> None:
        self.sent.append((source, message))


def test_who_waits_for_a_worker_that_dies_before_it_has_told_is_answered() -> None:
    """So that a worker that starts does not wait for the place of one that was killed while it started."""
    wires = Wires()
    board = Board(wires.send)
    board.get((0, 0), LATE)
    assert not wires.sent
    board.forget(1, 0)
    assert wires.sent == [((0, 0), StoreValue(LATE, b""))]


def test_what_a_dead_worker_has_told_is_not_handed_out_any_more() -> None:
    wires = Wires()
    board = Board(wires.send)
    board.set(LATE, b"somewhere")
    board.forget(1, 0)
    board.get((0, 0), LATE)
    assert wires.sent == [((0, 0), StoreValue(LATE, b""))]


def test_the_worker_that_takes_the_place_of_a_dead_one_is_waited_for() -> None:
    wires, key = Wires(), key_of("link", 1, 1)
    board = Board(wires.send)
    board.get((0, 0), key)
    board.forget(1, 0)
    assert not wires.sent
    board.set(key, b"here")
    assert wires.sent == [((0, 0), StoreValue(key, b"here"))]


def test_a_dead_worker_is_not_answered() -> None:
    wires = Wires()
    board = Board(wires.send)
    board.get((1, 0), key_of("link", 0, 0))
    board.forget(1, 0)
    board.set(key_of("link", 0, 0), b"here")
    assert not wires.sent


def test_a_worker_hears_at_once_that_nobody_will_tell(tmp_path: Path) -> None:
    engine = Mailbox()

    def answer(connection: PeerConnection, message: object, contents: memoryview | None) -> None:
        if isinstance(message, StoreGet):
            connection.send(StoreValue(message.key, b""))

    address = engine.listen(f"ipc://{tmp_path}/e", answer)
    engine.start()
    worker = EngineConnection(address)
    with pytest.raises(OwnerGone):
        worker.get(LATE, 60.0)
    worker.close()
    engine.close()
    assert issubclass(OwnerGone, WorkerError)
