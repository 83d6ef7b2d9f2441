"""The road through NCCL, over gloo and with a stand-in for the GPU: both ways at once, and in order."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cuda_stub
from tessera.errors import WorkerError
from tessera.execute.collective import Collective, Meeting, gloo_group, meetings
from tessera.execute.nccl_road import NcclRoad, open_nccl

# torch's stubs know neither its stores nor its groups.
C10D: Any = dist
CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
PAIRS = ((0, 1), (1, 0))


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_stub.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: cuda_stub.Stream())


def gloo(store: Any, rank: int, world: int) -> Any:
    """A group that needs no GPU."""
    return gloo_group(store, rank, world, LOOPBACK)


def on_all(what: Callable[[int], Any], world: int = 2) -> list[Any]:
    """Runs something for every rank, each in a thread."""
    found: list[Any] = [None] * world

    def one(rank: int) -> None:
        found[rank] = what(rank)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    return found


def make_roads(pairs: tuple[tuple[int, int], ...] = PAIRS, world: int = 2) -> list[NcclRoad]:
    """Roads of all ranks that have met, staged on the CPU."""
    store = C10D.HashStore()

    def road(rank: int) -> NcclRoad:
        groups = [gloo(C10D.PrefixStore(way, store), rank, world) for way in ("up", "down")]
        made = NcclRoad(rank, CPU, *groups)
        made.greet(pairs)
        return made

    return on_all(road, world)


def test_both_ranks_may_receive_before_they_send() -> None:
    """Which is what two workers do; on one communicator they would wait for one another."""
    roads = make_roads()

    def both(rank: int) -> list[int]:
        into = torch.empty(4, dtype=torch.int64)
        listening = threading.Thread(target=roads[rank].recv, args=(into, 1 - rank), daemon=True)
        listening.start()
        roads[rank].send(torch.arange(4) + 10 * rank, 1 - rank)
        listening.join(20.0)
        return into.tolist()

    assert [[10, 11, 12, 13], [0, 1, 2, 3]] == on_all(both)


class Asked:
    """A group that does nothing and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "Asked":
        self.asked.append(("send", peer))
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "Asked":
        self.asked.append(("recv", peer))
        return self

    def wait(self) -> None:
        """At once."""


def test_directions_do_not_share_a_group() -> None:
    """A receive that waits holds up no send: messages up and down go by different groups."""

    up, down = Asked(), Asked()
    road = NcclRoad(1, CPU, up, down)
    for peer in (0, 2):
        road.send(torch.zeros(1), peer)
        road.recv(torch.zeros(1), peer)

    assert [("recv", 0), ("send", 2)] == up.asked
    assert [("send", 0), ("recv", 2)] == down.asked


def test_what_was_sent_is_not_written_back() -> None:
    """The sender may change its memory as soon as `send` returns."""
    roads = make_roads(((0, 1),))
    mine, theirs = torch.ones(3), torch.zeros(3)

    def one(rank: int) -> None:
        if rank == 0:
            roads[0].send(mine, 1)
            mine.fill_(7.0)
        else:
            roads[1].recv(theirs, 0)

    on_all(one)
    assert [7.0] * 3 == mine.tolist()
    assert [1.0] * 3 == theirs.tolist()


def test_three_ranks_greet_in_one_order() -> None:
    """Every pair talks once before any work, and nobody waits in a circle."""
    pairs = tuple((a, b) for a in range(3) for b in range(3) if a != b)

    assert 3 == len(make_roads(pairs, 3))


def test_a_transport_over_the_road_delivers() -> None:
    """Headers and bytes as with gloo, in both directions, and a goodbye."""
    roads = make_roads()
    sides = [Collective(meeting, road) for meeting, road in zip(make_meetings(), roads, strict=True)]
    news: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in sides]
    for side, inbox in zip(sides, news, strict=True):
        side.start(inbox.put)
    for rank, side in enumerate(sides):
        parcel = FakeParcel(1 - rank)
        side.send(parcel, torch.full((5,), rank, dtype=torch.uint8))  # type: ignore[arg-type]
    heard = [{type(inbox.get(timeout=20.0)).__name__ for _ in range(2)} for inbox in news]
    got = [side.fetch(FakeParcel(rank)).tolist() for rank, side in enumerate(sides)]  # type: ignore[arg-type]
    for side in sides:
        side.close()

    assert [{"Left", "Arrived"}] * 2 == heard
    assert [[1] * 5, [0] * 5] == got


def make_meetings() -> list[Meeting]:
    """Two ranks on one machine."""
    return meetings("nccl", 2, PAIRS, [LOOPBACK] * 2)


class FakeParcel:
    """A transfer to one rank."""

    ticket, number = 3, 0

    def __init__(self, dst: int) -> None:
        self.program = self
        self.transfers = [self]
        self.dst = dst


def test_ranks_of_one_machine_have_different_gpus() -> None:
    """Two on the first address, one on the second: its first GPU again."""
    made = meetings("nccl", 3, PAIRS, ["a", "a", "b"])

    assert [0, 1, 0] == [meeting.place for meeting in made]


def test_a_worker_without_a_gpu_of_its_own_is_refused() -> None:
    """Two ranks on one GPU are not possible; the message says what is."""
    with pytest.raises(WorkerError, match=r"this machine has 2\. Use --transport gloo"):
        open_nccl(C10D.HashStore(), 2, 3, 2, (), gloo)
