"""Links between workers: who has no key gets nothing, a wrong frame ends a link, a new one follows."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessera.execute import handshake, links
from tessera.execute.links import LinkFrame, LinkLost, Links

KEY = b"k" * 32
LIMIT = 1 << 20


class Board:
    """A store of this process."""

    def __init__(self) -> None:
        self._known = threading.Condition()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """At once."""
        with self._known:
            self.values[key] = value
            self._known.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """When it is there."""
        with self._known:
            if not self._known.wait_for(lambda: key in self.values, timeout_s):
                raise LinkLost("nobody has set it")
            return self.values[key]


class Ear:
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.got: list[tuple[int, LinkFrame, bytes]] = []
        self.lost: list[tuple[int, str]] = []
        self._place = bytearray()
        self.throws_away = False

    def place(self, peer: int, frame: LinkFrame) -> memoryview | None:
        """Memory of its own."""
        self._place = bytearray(frame.size)
        return None if self.throws_away else memoryview(self._place)

    def arrived(self, peer: int, frame: LinkFrame) -> None:
        """In order."""
        self.got.append((peer, frame, bytes(self._place)))
        self._place = bytearray()

    def gone(self, peer: int, why: str) -> None:
        """With the reason."""
        self.lost.append((peer, why))


class Pair:
    """Two workers' ends."""

    def __init__(self, folder: Path, is_tcp: bool) -> None:
        self.board, self.ears = Board(), [Ear(), Ear()]
        self.folder, self.host = folder, "127.0.0.1" if is_tcp else ""
        self.ends = [self.end(device) for device in (0, 1)]

    def end(self, device: int, key: bytes = KEY, epochs: tuple[int, int] = (0, 0)) -> Links:
        """One that listens."""
        made = Links(
            device,
            epochs,
            key,
            self.board,
            self.ears[device],
            lambda peer: LIMIT,
            folder=str(self.folder),
            host=self.host,
        )
        made.start()
        return made

    def address(self, device: int, epoch: int = 0) -> str:
        """Where it listens."""
        return self.board.values[f"link/{device}/{epoch}"].decode()


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """On one machine, and as if on two."""
    found = Pair(tmp_path_factory.mktemp("l"), request.param == "tcp")
    yield found
    for end in found.ends:
        end.close()


def until(condition: Callable[[], bool]) -> None:
    """Waits for a thread."""
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("size", [0, 1, 5000, 900_000])
def test_frames_arrive_in_order_whoever_writes_them(pair: Pair, size: int) -> None:
    """Blocking and without waiting, both ways at once."""
    contents = [os.urandom(size) for _ in range(12)]
    for number, data in enumerate(contents):
        pair.ends[0].post(1, LinkFrame(3, number, size, 0.5), memoryview(data))
        pair.ends[1].send(0, LinkFrame(4, number, size, 0.25), memoryview(data))
    until(lambda: len(pair.ears[0].got) == len(pair.ears[1].got) == len(contents))

    assert pair.ears[1].got == [(0, LinkFrame(3, n, size, 0.5), d) for n, d in enumerate(contents)]
    assert pair.ears[0].got == [(1, LinkFrame(4, n, size, 0.25), d) for n, d in enumerate(contents)]


def test_what_was_posted_may_be_overwritten_at_once(pair: Pair) -> None:
    """Also where the link does not take it all."""
    data = bytearray(b"a" * LIMIT)
    for number in range(8):
        pair.ends[0].post(1, LinkFrame(0, number, LIMIT, 0.0), memoryview(data))
        data[:] = bytes([98 + number]) * LIMIT
    until(lambda: len(pair.ears[1].got) == 8)

    assert [chr(got[0]) for _, _, got in pair.ears[1].got] == list("abcdefgh")
    assert all(set(got) == {got[0]} for _, _, got in pair.ears[1].got)


def test_frames_that_nobody_wants_are_passed_over(pair: Pair) -> None:
    """What follows them is read right."""
    pair.ears[1].throws_away = True
    pair.ends[0].send(1, LinkFrame(0, 0, 200_000, 0.0), memoryview(b"x" * 200_000))
    until(lambda: len(pair.ears[1].got) == 1)
    pair.ears[1].throws_away = False
    pair.ends[0].send(1, LinkFrame(0, 1, 3, 0.0), memoryview(b"abc"))
    until(lambda: len(pair.ears[1].got) == 2)

    assert pair.ears[1].got[1][2] == b"abc"


@pytest.mark.parametrize(
    "wrong",
    [
        LinkFrame(0, 0, LIMIT + 1, 0.0),
        LinkFrame(0, 0, -1, 0.0),
        LinkFrame(-2, 0, 0, 0.0),
        LinkFrame(0, -1, 0, 0.0),
    ],
)
def test_a_frame_that_no_program_sends_ends_the_link(pair: Pair, wrong: LinkFrame) -> None:
    """Nothing is allocated for it; the next frame comes over a new link."""
    pair.ends[0].send(1, wrong, memoryview(b""))
    until(lambda: bool(pair.ears[1].lost))
    pair.ends[0].relink(1, 0)
    pair.ends[0].send(1, LinkFrame(0, 0, 2, 0.0), memoryview(b"ok"))
    until(lambda: bool(pair.ears[1].got))

    assert "it sent a frame of" in pair.ears[1].lost[0][1]
    assert pair.ears[1].got == [(0, LinkFrame(0, 0, 2, 0.0), b"ok")]


def test_a_cut_link_is_told_at_the_end_that_reads_and_opened_again(pair: Pair) -> None:
    """The writer is told when it writes; a relink drops what waited."""
    pair.ends[0].send(1, LinkFrame(0, 0, 0, 0.0), memoryview(b""))
    until(lambda: bool(pair.ends[1]._ins))
    pair.ends[1]._ins[0].shutdown(socket.SHUT_RDWR)
    until(lambda: pair.ears[1].lost == [(0, "the link was closed")])
    pair.ends[0].relink(1, 0)
    pair.ends[0].post(1, LinkFrame(1, 0, 0, 0.0), memoryview(b""))
    until(lambda: len(pair.ears[1].got) == 2)

    assert pair.ears[1].got[1][1].run == 1
    assert len(pair.ears[1].lost) == 1


def test_a_relink_on_purpose_is_no_news(pair: Pair) -> None:
    """The other end does not take it for a cut."""
    for number in range(20):
        pair.ends[0].post(1, LinkFrame(0, number, 0, 0.0), memoryview(b""))
        until(lambda: len(pair.ears[1].got) == number + 1)  # noqa: B023 - waited for here
        pair.ends[0].relink(1, 0)
    time.sleep(0.1)

    assert not pair.ears[1].lost


def test_a_worker_that_was_started_again_is_reached_anew(pair: Pair) -> None:
    """Its old address is not used, and what an earlier worker still says is refused."""
    pair.ends[0].send(1, LinkFrame(0, 0, 0, 0.0), memoryview(b""))
    until(lambda: len(pair.ears[1].got) == 1)
    pair.ends[1].close()
    pair.ends[1] = pair.end(1, epochs=(0, 1))
    pair.ends[0].relink(1, 1)
    pair.ends[0].send(1, LinkFrame(1, 0, 0, 0.0), memoryview(b""))
    until(lambda: len(pair.ears[1].got) == 2)
    old = Links(1, (0, 0), KEY, pair.board, Ear(), lambda peer: LIMIT, folder=str(pair.folder))
    with pytest.raises(LinkLost, match="no link could be opened"):
        _briefly(old, 0)


def _briefly(end: Links, peer: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "OPEN_S", 0.3)
        end.send(peer, LinkFrame(0, 0, 0, 0.0), memoryview(b""))


def test_who_has_another_key_gets_nothing(pair: Pair) -> None:
    """At either end; and nothing of it is told as a link."""
    stranger = Links(0, (0, 0), b"?" * 32, pair.board, Ear(), lambda peer: LIMIT)
    with pytest.raises(LinkLost, match="no link could be opened"):
        _briefly(stranger, 1)

    assert not pair.ears[1].got
    assert not pair.ears[1].lost


def test_a_crowd_of_silent_callers_holds_nobody_up(pair: Pair) -> None:
    """The oldest are pushed out, and a worker gets through at once."""
    crowd = [links.call(pair.address(1)) for _ in range(handshake.MAX_HANDSHAKES + 40)]
    start = time.monotonic()
    pair.ends[0].send(1, LinkFrame(0, 0, 0, 0.0), memoryview(b""))
    until(lambda: bool(pair.ears[1].got))
    assert time.monotonic() - start < handshake.FIRST_BYTE_S
    door = pair.ends[1].door
    assert door is not None
    assert len(door.answering) <= handshake.MAX_HANDSHAKES + 1
    for one in crowd:
        one.close()


def test_noise_at_the_door_is_not_heard(pair: Pair) -> None:
    """Bytes without a proof end the call."""
    with links.call(pair.address(1)) as call:
        call.sendall(b"\0" * 4096)
        call.settimeout(10.0)
        with contextlib.suppress(ConnectionError):
            while call.recv(4096):
                pass
    assert not pair.ears[1].got
    assert not pair.ears[1].lost


def test_nobody_waits_for_a_worker_that_does_not_come(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A post returns at once, and the peer is told as gone after a while."""
    monkeypatch.setattr(links, "OPEN_S", 0.2)
    pair.ends[0].relink(1, 5)
    start = time.monotonic()
    pair.ends[0].post(1, LinkFrame(0, 0, 0, 0.0), memoryview(b""))
    assert time.monotonic() - start < 0.1
    until(lambda: bool(pair.ears[0].lost))
    assert pair.ears[0].lost[0][1].startswith("no link could be opened")
