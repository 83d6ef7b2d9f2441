"""Links between workers: who has no key gets nothing, a wrong frame ends a link, a new one follows."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.execute import links
from tessera.execute.links import Links, PageNews
from tessera.execute.mailbox import Mailbox, PeerConnection
from tessera.execute.messages import Cancel, LinkFrame, LinkOpen, PeerLost, Setup
from tessera.ir import Cluster, Program, Transfer

KEY = b"k" * 32
LIMIT = 1 << 20


class Ear:
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.got: list[tuple[int, LinkFrame, bytes]] = []
        self.lost: list[tuple[int, str]] = []

    def arrived(self, peer: int, frame: LinkFrame, contents: memoryview) -> None:
        """In order."""
        self.got.append((peer, frame, bytes(contents)))

    def gone(self, gone: PeerLost | PageNews) -> None:
        """With the reason."""
        assert isinstance(gone, PeerLost)
        self.lost.append((gone.device, gone.message))


class Pair:
    """Two workers' ends."""

    def __init__(self, folder: Path, is_tcp: bool) -> None:
        self.ears, self.boxes = [Ear(), Ear()], [Mailbox(), Mailbox()]
        self.folder, self.host = folder, "127.0.0.1" if is_tcp else ""
        self.ends = [self.end(device, self.boxes[device]) for device in (0, 1)]
        for device, box in enumerate(self.boxes):
            box.start()
            self.ends[device].relink(1 - device, 0, self.ends[1 - device].address)

    def end(
        self, device: int, box: Mailbox, epochs: tuple[int, int] = (0, 0), ear: Ear | None = None
    ) -> Links:
        """One that listens."""
        own, sent = ear or self.ears[device], tuple(Transfer(0, 0, 0, LIMIT, n, 1 - n) for n in (0, 1))
        program = Program(0, 0, 1, ((), ()), sent, ((), ()), (), ())
        setup = Setup(
            device,
            Cluster((), ()),
            (),
            ((program,),),
            1,
            epochs=epochs,
            weights={},
            folder=str(self.folder),
            host=self.host,
            secret=KEY,
        )
        made = Links(setup, box, own.gone)
        made.arrived = own.arrived
        return made

    def stranger(self, secret: bytes) -> tuple[Mailbox, PeerConnection]:
        """A connection to the second worker that no worker made."""
        box = Mailbox()
        box.start()
        return box, box.connect(self.ends[1].address, lambda *news: None, secret)


@pytest.fixture(params=["ipc", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """On one machine, and as if on two."""
    found = Pair(tmp_path_factory.mktemp("l"), request.param == "tcp")
    yield found
    for end, box in zip(found.ends, found.boxes, strict=True):
        end.close()
        box.close()


def until(condition: Callable[[], bool]) -> None:
    """Waits for a thread."""
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("size", [0, 1, 5000, 900_000])
def test_frames_arrive_in_order_both_ways(pair: Pair, size: int) -> None:
    """Without waiting, both ways at once."""
    contents = [os.urandom(size) for _ in range(12)]
    for number, data in enumerate(contents):
        pair.ends[0].post(1, LinkFrame(3, number, 0.5), memoryview(data))
        pair.ends[1].post(0, LinkFrame(4, number, 0.25), memoryview(data))
    until(lambda: len(pair.ears[0].got) == len(pair.ears[1].got) == len(contents))

    assert pair.ears[1].got == [(0, LinkFrame(3, n, 0.5), d) for n, d in enumerate(contents)]
    assert pair.ears[0].got == [(1, LinkFrame(4, n, 0.25), d) for n, d in enumerate(contents)]


def test_frames_wait_for_an_address_that_comes_later(pair: Pair) -> None:
    """In order; those for a worker that was started again meanwhile are dropped."""
    pair.ends[0].relink(1, 0, "")
    for number, data in enumerate((b"one", b"two")):
        pair.ends[0].post(1, LinkFrame(3, number, 0.5), memoryview(bytearray(data)))
    pair.ends[0].relink(1, 0, pair.ends[1].address)
    until(lambda: len(pair.ears[1].got) == 2)
    pair.ends[0].relink(1, 0, "")
    pair.ends[0].post(1, LinkFrame(3, 7, 0.5))
    pair.ends[0].relink(1, 1, pair.ends[1].address)
    pair.ends[0].post(1, LinkFrame(4, 0, 0.5))
    until(lambda: len(pair.ears[1].got) == 3)

    assert [(3, b"one"), (3, b"two"), (4, b"")] == [(frame.run, data) for _, frame, data in pair.ears[1].got]
    assert not pair.ears[0].lost


def test_what_was_posted_may_be_overwritten_at_once(pair: Pair) -> None:
    """Also if the link does not take it all."""
    data = bytearray(b"a" * LIMIT)
    for number in range(8):
        pair.ends[0].post(1, LinkFrame(0, number, 0.0), memoryview(data))
        data[:] = bytes([98 + number]) * LIMIT
    until(lambda: len(pair.ears[1].got) == 8)

    assert [chr(got[0]) for _, _, got in pair.ears[1].got] == list("abcdefgh")
    assert all(set(got) == {got[0]} for _, _, got in pair.ears[1].got)


@pytest.mark.parametrize(
    ("wrong", "size"),
    [
        (LinkFrame(0, 0, 0.0), LIMIT + 1),
        (LinkFrame(-2, 0, 0.0), 0),
        (LinkFrame(0, -1, 0.0), 0),
        (Cancel(0), 0),
    ],
)
def test_a_frame_that_no_program_sends_ends_the_link(pair: Pair, wrong: Any, size: int) -> None:
    """The next frame comes over a new link."""
    pair.ends[0].post(1, wrong, memoryview(bytes(size)))
    until(lambda: bool(pair.ears[1].lost))
    pair.ends[0].relink(1, 0, pair.ends[1].address)
    pair.ends[0].post(1, LinkFrame(0, 0, 0.0), memoryview(b"ok"))
    until(lambda: bool(pair.ears[1].got))

    assert any(words in pair.ears[1].lost[0][1] for words in ("it sent", "cannot be read"))
    assert pair.ears[1].got == [(0, LinkFrame(0, 0, 0.0), b"ok")]


def cut(pair: Pair) -> None:
    """Shuts the accepted socket of the link to the second worker."""
    (listener,) = [end for end in pair.boxes[1]._ends if end.connection is None]
    (fd,) = listener.by_fd
    with socket.socket(fileno=os.dup(fd)) as link:
        link.shutdown(socket.SHUT_RDWR)


def test_a_cut_link_is_told_and_opened_again(pair: Pair) -> None:
    """At the end that reads; a relink closes what is left of it."""
    pair.ends[0].post(1, LinkFrame(0, 0, 0.0))
    until(lambda: bool(pair.ears[1].got))
    cut(pair)
    until(lambda: bool(pair.ears[1].lost) and bool(pair.ears[0].lost))
    pair.ends[0].relink(1, 0, pair.ends[1].address)
    pair.ends[0].post(1, LinkFrame(1, 0, 0.0))
    until(lambda: len(pair.ears[1].got) == 2)

    assert pair.ears[1].got[1][1].run == 1
    assert pair.ears[1].lost == [(0, "the link was closed")]


def test_a_relink_on_purpose_is_no_news(pair: Pair) -> None:
    """The other end does not take it for a cut."""
    for number in range(20):
        pair.ends[0].post(1, LinkFrame(0, number, 0.0))
        until(lambda: len(pair.ears[1].got) == number + 1)  # noqa: B023 - waited for here
        pair.ends[0].relink(1, 0, pair.ends[1].address)
    time.sleep(0.1)

    assert not pair.ears[1].lost


def test_a_worker_that_was_started_again_is_reached_anew(pair: Pair) -> None:
    """Its old address is not used, and what an earlier worker still says is not heard."""
    pair.ends[0].post(1, LinkFrame(0, 0, 0.0))
    until(lambda: len(pair.ears[1].got) == 1)
    pair.boxes[1].close()
    pair.boxes[1] = Mailbox()
    pair.ends[1] = pair.end(1, pair.boxes[1], (0, 1))
    pair.boxes[1].start()
    pair.ends[0].relink(1, 1, pair.ends[1].address)
    pair.ends[0].post(1, LinkFrame(1, 0, 0.0))
    until(lambda: len(pair.ears[1].got) == 2)
    box = Mailbox()
    box.start()
    old = box.connect(pair.ends[0].address, lambda *news: None, KEY if pair.host else b"")
    old.send(LinkOpen(1, 0))
    old.send(LinkFrame(2, 0, 0.0))
    time.sleep(0.2)
    box.close()

    assert not pair.ears[0].got


def test_who_has_another_key_gets_nothing(pair: Pair) -> None:
    """And nothing of it is told as a link; in the private folder, nobody else can connect."""
    if not pair.host:
        assert (os.stat(pair.folder).st_mode & 0o077) == 0
        return
    for secret in (b"?" * 32, b""):
        box, stranger = pair.stranger(secret)
        stranger.send(LinkOpen(0, 0))
        stranger.send(LinkFrame(0, 0, 0.0))
        time.sleep(0.5)
        assert not stranger.is_open
        box.close()

    assert not pair.ears[1].got
    assert not pair.ears[1].lost


def test_a_crowd_of_silent_callers_holds_nobody_up(pair: Pair) -> None:
    """A worker gets through at once; noise is not heard."""
    crowd = [call(pair.ends[1].address) for _ in range(100)]
    for one in crowd[:20]:
        one.sendall(bytes(4096))
    start = time.monotonic()
    pair.ends[0].post(1, LinkFrame(0, 0, 0.0))
    until(lambda: bool(pair.ears[1].got))
    assert time.monotonic() - start < 3.0
    assert len(pair.ears[1].got) == 1
    assert not pair.ears[1].lost
    for one in crowd:
        one.close()


def call(address: str) -> socket.socket:
    """A plain socket."""
    kind, _, where = address.partition("://")
    if kind == "tcp":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)))
    made = socket.socket(socket.AF_UNIX)
    made.connect(where)
    return made


def test_nobody_waits_for_a_worker_that_does_not_come(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A post returns at once, and the peer is told as gone after a while."""
    monkeypatch.setattr(links, "OPEN_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    pair.ends[0].relink(1, 5, nowhere)
    start = time.monotonic()
    pair.ends[0].post(1, LinkFrame(0, 0, 0.0))
    assert time.monotonic() - start < links.OPEN_S
    until(lambda: bool(pair.ears[0].lost))
    assert pair.ears[0].lost[0][1] == "no connection could be opened"
