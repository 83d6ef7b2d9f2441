"""Moves of pages between workers: bytes, many pieces, steps beside them, and faults on the way."""

import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import cuda_stub
import home_factory as made
from tessera.errors import TesseraError
from tessera.execute import page_mover
from tessera.execute.messages import PIECE_BYTES, MovePages
from tessera.execute.page_mover import cut
from tessera.execute.stepper import DeviceBack, DeviceLost, Event, Moved, PageMove, StepCall, StepDone
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Cluster, Device, DeviceKind, Link, Plan
from tessera.kernels import PAGE

HOMES = ("left", "right", "both")


def cluster_of(kind: DeviceKind, is_dilated: bool = False, gbps: float = 25.0) -> Cluster:
    """Two devices and their links."""
    devices = tuple(Device(f"d{n}", kind, "a100", 1 << 34, is_dilated=is_dilated) for n in range(2))
    links = tuple(Link(a.name, b.name, "pcie4", 10.0, gbps) for a in devices for b in devices if a is not b)
    return Cluster(devices, links)


def plans(cluster: Cluster) -> tuple[Plan, ...]:
    """A home on each device, and one over both."""
    return tuple(
        made.plan_of((2, 4), devices, home, cluster=cluster)
        for home, devices in zip(HOMES, ([0], [1], [0, 1]), strict=True)
    )


def opened(transport: str = "auto", timeout_s: float = 30.0, cluster: Cluster | None = None) -> WorkerStepper:
    """Workers with a microbatch at each home."""
    kind = DeviceKind.CUDA if transport == "ipc" else DeviceKind.EMU
    found = plans(cluster or cluster_of(kind))
    return WorkerStepper(found, made.weights(), transport=transport, timeout_s=timeout_s)


def open_all(stepper: WorkerStepper) -> None:
    """Microbatch n at home n."""
    for number in range(len(HOMES)):
        if number not in stepper.opened:
            stepper.open(number, stepper.lanes.open(number)[0].number)


def until(stepper: WorkerStepper, *kinds: type, limit_s: float = 60.0) -> list[Event]:
    """Events up to one of each kind."""
    found: list[Event] = []
    end = time.monotonic() + limit_s
    while not all(any(isinstance(event, kind) for event in found) for kind in kinds):
        assert time.monotonic() < end, found
        event = stepper.take(1.0)
        if event is not None:
            found.append(event)
    return found


def moved_of(events: list[Event]) -> Moved:
    """The only end of a move."""
    (found,) = [event for event in events if isinstance(event, Moved)]
    return found


def fill(stepper: WorkerStepper, wanted: made.Expectation, microbatch: int, seed: int = 0) -> None:
    """Writes tokens to pages 1 and 2 of a home."""
    for page in (1, 2):
        given = made.inputs(4, page * PAGE, PAGE, seed + page)
        stepper.start(StepCall(microbatch, 1, given))
        done = stepper.take(60.0)
        assert isinstance(done, StepDone), done
        assert torch.equal(wanted.run(HOMES[microbatch], microbatch, 4, given), done.outputs["y"])


def pages_of(stepper: WorkerStepper, wanted: made.Expectation, microbatch: int) -> dict[str, str]:
    """Hashes of a home's pages, after a step that changes page 7."""
    given = made.inputs(2, 7 * PAGE, 7 * PAGE)
    stepper.start(StepCall(microbatch, 0, given, wants_state=True))
    done = next(event for event in until(stepper, StepDone) if isinstance(event, StepDone))
    wanted.run(HOMES[microbatch], microbatch, 2, given)
    return {name: hashlib.sha256(done.state[name].numpy().tobytes()).hexdigest() for name in made.NAMES}


def hashes(wanted: made.Expectation, home: str) -> dict[str, str]:
    """What they should be."""
    return {n: hashlib.sha256(wanted.homes[home][n].numpy().tobytes()).hexdigest() for n in made.NAMES}


@pytest.fixture(params=["shm", "host", "ipc"])
def stepper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerStepper]:
    """Processes; with a stand-in for the GPU, threads."""
    if request.param == "ipc":
        cuda_stub.install(monkeypatch)
    threads = torch.get_num_threads()
    with opened(request.param) as found:
        open_all(found)
        yield found
    torch.set_num_threads(threads)


def test_moved_pages_have_the_same_bytes_at_both_ends(stepper: WorkerStepper) -> None:
    """From one device to another, to a home over both, and back; and use counts them."""
    wanted = made.Expectation()
    fill(stepper, wanted, 0)
    total = 0
    for number, (source, destination) in enumerate([(0, 1), (1, 2), (2, 0)]):
        pairs = [(1, 3), (2, 5), (3, 2)] if number == 0 else [(3, 4), (5, 3)]
        from_pages, to_pages = (tuple(pair[n] for pair in pairs) for n in (0, 1))
        stepper.move(PageMove(number, source, destination, from_pages, to_pages))
        event = moved_of(until(stepper, Moved))
        size = len(pairs) * len(made.NAMES) * made.PAGE_BYTES
        assert (number, "", size) == (event.number, event.failure, event.num_bytes)
        assert event.seconds > 0.0
        wanted.move(HOMES[source], HOMES[destination], pairs)
        for microbatch in (source, destination):
            assert pages_of(stepper, wanted, microbatch) == hashes(wanted, HOMES[microbatch])
        total += size
    moved = stepper.use().moved
    transfers = sum(t.num_bytes for p in stepper.programs[2] for t in p.transfers if p.step == 0)

    assert {("d0", "d1"), ("d1", "d0"), ("d0", "d0"), ("d1", "d1")} == set(moved)
    assert total + 2 * transfers == sum(moved.values())


def test_steps_go_on_beside_moves(stepper: WorkerStepper) -> None:
    """Moves between the microbatches at both ends; every one ends, and once."""
    wanted = made.Expectation()
    fill(stepper, wanted, 0)
    for number in range(20):
        stepper.move(PageMove(number, 0, 1, (1, 2), (1, 2)))
        for microbatch in (0, 1):
            if microbatch not in {x.microbatch.number for x in stepper.running.values()}:
                stepper.start(StepCall(microbatch, 0, made.inputs(2, 6 * PAGE, PAGE)))
    events = [stepper.take(60.0)]
    while len([e for e in events if isinstance(e, Moved)]) < 20 or stepper.running:
        events.append(stepper.take(60.0))

    assert list(range(20)) == sorted(e.number for e in events if isinstance(e, Moved))
    assert not [e.failure for e in events if isinstance(e, Moved) and e.failure]
    assert sum(isinstance(e, StepDone) for e in events) >= 2


@pytest.mark.parametrize("transport", ["shm", "host", "ipc"])
def test_a_move_of_many_pieces_waits_for_slots(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages a piece, two slots; several moves at once, in both directions."""
    cuda_stub.install(monkeypatch)  # workers are threads, which see these sizes
    monkeypatch.setattr(page_mover, "PIECE_BYTES", 2 * made.PAGE_BYTES)
    monkeypatch.setattr(page_mover, "SLOTS", 2)
    threads = torch.get_num_threads()
    wanted = made.Expectation()
    with opened(transport) as stepper:
        open_all(stepper)
        fill(stepper, wanted, 0)
        fill(stepper, wanted, 1, seed=5)
        pairs = [(1, 3), (2, 4), (5, 5), (6, 6), (7, 1)]
        for number, (source, destination) in enumerate([(0, 1), (1, 2), (0, 1)]):
            places = [(a, b) for a, b in pairs] if number != 1 else [(1, 6), (2, 5), (5, 2)]
            stepper.move(
                PageMove(
                    number, source, destination, tuple(a for a, _ in places), tuple(b for _, b in places)
                )
            )
        ends = [moved_of(until(stepper, Moved)) for _ in range(3)]
        wanted.move("left", "right", pairs)
        assert not any(event.failure for event in ends)
        assert pages_of(stepper, wanted, 1) == hashes(wanted, "right")
    torch.set_num_threads(threads)


def test_pieces_are_bounded_and_cover_every_page() -> None:
    """Whatever the sizes of the buffers."""
    size = PIECE_BYTES // 3
    order = MovePages(
        1, 1, (0, -1), (1, -1), [("a", size), ("b", 8), ("c", size)], list(range(1, 8)), list(range(11, 18))
    )
    pieces = cut(order)
    found = {
        (name, page, place)
        for piece in pieces
        for name, _, pages, places in piece
        for page, place in zip(pages, places, strict=True)
    }

    assert {(name, n, n + 10) for name in "abc" for n in range(1, 8)} == found
    assert all(sum(s * len(p) for _, s, p, _ in piece) <= PIECE_BYTES for piece in pieces)


def test_a_page_larger_than_a_piece_is_divided() -> None:
    """As the state of a row may be."""
    size = 3 * PIECE_BYTES + 24
    pieces = cut(MovePages(1, 1, (0, 5), (1, 6), [("a", size)], [2], [0]))
    parts = [part for piece in pieces for part in piece]
    (part_bytes,) = {size for _, size, _, _ in parts}
    num = size // part_bytes

    assert part_bytes <= PIECE_BYTES
    assert [(2 * num + n, n) for n in range(num)] == [
        pair for _, _, pages, places in parts for pair in zip(pages, places, strict=True)
    ]


# Faults.


def signal_to(stepper: WorkerStepper, device: int, number: int) -> None:
    """To the worker of a device."""
    pid = stepper.use().devices[f"d{device}"].pid
    assert pid is not None
    os.kill(pid, number)


@pytest.mark.parametrize("transport", ["shm", "host"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_during_a_move_ends_it_and_the_rest_goes_on(transport: str, victim: int) -> None:
    """One failure and one loss; the other device's pages stay, and the next move is right."""
    wanted = made.Expectation()
    with opened(transport) as stepper:
        open_all(stepper)
        fill(stepper, wanted, 0)
        fill(stepper, wanted, 1, seed=5)
        signal_to(stepper, victim, signal.SIGSTOP)
        stepper.move(PageMove(7, 0, 1, (1, 2), (3, 4)))
        assert stepper.take(0.3) is None
        signal_to(stepper, victim, signal.SIGKILL)
        events = until(stepper, DeviceLost, Moved)
        lost = next(event for event in events if isinstance(event, DeviceLost))
        moved = moved_of(events)
        assert (7, 0) == (moved.number, moved.num_bytes)
        assert f"d{victim} was lost" in moved.failure
        assert (victim, 2) == lost.microbatches
        other = 1 - victim
        assert pages_of(stepper, wanted, other) == hashes(wanted, HOMES[other])
        while stepper.use().devices[f"d{victim}"].state != "ready":
            stepper.take(1.0)
        while stepper.take(0.0) is not None:
            pass
        open_all(stepper)
        for microbatch in (victim, 2):
            wanted.newest.pop(microbatch, None)
            wanted.homes.pop(HOMES[microbatch], None)
        fill(stepper, wanted, victim)
        stepper.move(PageMove(8, victim, other, (1,), (6,)))
        assert not moved_of(until(stepper, Moved)).failure
        wanted.move(HOMES[victim], HOMES[other], [(1, 6)])
        assert pages_of(stepper, wanted, other) == hashes(wanted, HOMES[other])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_stands_still_ends_a_move_by_its_deadline(victim: int) -> None:
    """The move fails; a worker that does not even confirm that is lost."""
    with opened("shm", timeout_s=1.0) as stepper:
        open_all(stepper)
        signal_to(stepper, victim, signal.SIGSTOP)
        stepper.move(PageMove(3, 0, 1, (1,), (1,)))
        events = until(stepper, Moved, DeviceLost)

        assert "within 1 s" in moved_of(events).failure
        assert [f"d{victim}"] == [event.device for event in events if isinstance(event, DeviceLost)]


@pytest.mark.parametrize("transport", ["shm", "host"])
def test_a_cut_link_ends_the_moves_over_it(transport: str) -> None:
    """Nothing is lost, and the next move is right."""
    wanted = made.Expectation()
    with opened(transport) as stepper:
        open_all(stepper)
        fill(stepper, wanted, 0)
        stepper.move(PageMove(1, 0, 1, (1,), (1,)))  # opens the link
        assert not moved_of(until(stepper, Moved)).failure
        signal_to(stepper, 1, signal.SIGSTOP)
        stepper.move(PageMove(2, 0, 1, (1,), (2,)))
        assert stepper.take(0.3) is None
        stepper._cut(0, 1, "by the test")
        assert stepper.take(0.3) is None  # the destination has not confirmed
        signal_to(stepper, 1, signal.SIGCONT)
        events = until(stepper, Moved)
        assert "the link between d0 and d1 was cut" in moved_of(events).failure
        stepper.move(PageMove(3, 0, 1, (1,), (3,)))
        assert not moved_of(until(stepper, Moved)).failure
        wanted.move("left", "right", [(1, 1), (1, 3)])
        found = pages_of(stepper, wanted, 1)
        wanted.move("left", "right", [(1, 2)])
        assert found in (hashes(wanted, "right"), _without_page_2(wanted))
        assert not any(isinstance(event, DeviceLost) for event in events)


def _without_page_2(wanted: made.Expectation) -> dict[str, str]:
    for name in made.NAMES:
        wanted.homes["right"][name][2] = 0.0
    return hashes(wanted, "right")


def test_a_closed_microbatch_ends_its_moves() -> None:
    """Once; the other microbatch stays open."""
    with opened("shm") as stepper:
        open_all(stepper)
        signal_to(stepper, 1, signal.SIGSTOP)
        stepper.move(PageMove(1, 0, 1, (1,), (1,)))
        stepper.close(0)
        signal_to(stepper, 1, signal.SIGCONT)
        assert "closed" in moved_of(until(stepper, Moved)).failure
        assert stepper.take(0.2) is None
        assert 1 in stepper.opened


def test_a_move_of_a_lost_microbatch_fails_at_once() -> None:
    """Its loss may not have been taken yet."""
    with opened("shm") as stepper:
        open_all(stepper)
        signal_to(stepper, 0, signal.SIGKILL)
        with contextlib.suppress(IndexError):
            while not stepper.dead:
                stepper._hear(*stepper.hub.take(60.0))  # type: ignore[misc]
        stepper.move(PageMove(1, 0, 1, (1,), (1,)))
        assert "was lost" in moved_of(until(stepper, Moved, DeviceLost)).failure


def test_state_that_is_no_page_does_not_move() -> None:
    """Without a home."""
    found = tuple(replace(plan, home="") for plan in plans(cluster_of(DeviceKind.EMU)))
    with WorkerStepper(found, made.weights(), timeout_s=30.0) as stepper:
        open_all(stepper)
        with pytest.raises(TesseraError, match="not in the pages of a home"):
            stepper.move(PageMove(1, 0, 1, (1,), (1,)))


def test_a_modelled_link_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One move behind the other; both directions at once."""
    cuda_stub.install(monkeypatch)
    threads = torch.get_num_threads()
    size = 2 * len(made.NAMES) * made.PAGE_BYTES
    gbps = size / 0.1 * 1e-9  # a tenth of a second each
    with opened("ipc", cluster=cluster_of(DeviceKind.CUDA, is_dilated=True, gbps=gbps)) as stepper:
        open_all(stepper)
        for number, (source, destination) in enumerate([(0, 1), (0, 1), (1, 0)]):
            stepper.move(PageMove(number, source, destination, (1, 2), (3, 4)))
        ends = [moved_of(until(stepper, Moved)) for _ in range(3)]
    seconds = {event.number: event.seconds for event in ends}
    torch.set_num_threads(threads)

    assert 0.1 <= min(seconds[0], seconds[2])
    assert 0.2 <= seconds[1] < 2 * seconds[0] + 0.2  # on a busy machine the first takes longer too
    assert seconds[2] < seconds[1]


class Stress:
    """Random writes and moves between two homes, and what their pages must hold; None: unknown."""

    def __init__(self, stepper: WorkerStepper, seed: int) -> None:
        self.stepper, self.random = stepper, random.Random(seed)
        self.pages: list[list[int | None]] = [[0] * made.PAGES for _ in range(2)]
        # Move -> (source, destination, pairs)
        self.under_way: dict[int, tuple[int, int, list[tuple[int, int]]]] = {}
        # Move -> what its pages held when it began; nothing writes to them meanwhile.
        self.values: dict[int, list[int | None]] = {}
        self.num_moves = 0

    def free(self, home: int) -> list[int]:
        """Pages that no move under way reads or writes."""
        used = {
            pair[side]
            for source, destination, pairs in self.under_way.values()
            for side, end in ((0, source), (1, destination))
            if end == home
            for pair in pairs
        }
        return [page for page in range(1, made.PAGES) if page not in used]

    def take(self) -> Event:
        """The next event, noted."""
        event = self.stepper.take(30.0)
        assert event is not None, self.under_way
        if isinstance(event, Moved):
            _, destination, pairs = self.under_way.pop(event.number)
            values = self.values.pop(event.number)
            for (_, place), value in zip(pairs, values, strict=False):
                self.pages[destination][place] = None if event.failure else value
        elif isinstance(event, DeviceLost):
            lost = int(event.device[1:])
            self.pages[lost] = [0] * made.PAGES
            for number, (_, destination, _) in self.under_way.items():
                if destination == lost:  # whatever had arrived is gone
                    self.values[number] = []
        elif isinstance(event, DeviceBack):
            open_all(self.stepper)
        return event

    def write(self, home: int) -> None:
        """A number to a free page, if there is one, by a step."""
        if not (free := self.free(home)):
            return
        page, value = self.random.choice(free), self.random.randrange(1, 1000)
        x = torch.full((2, made.WIDTH), float(value))
        self.stepper.start(StepCall(home, 0, {**made.inputs(2, page * PAGE, page * PAGE), "x": x}))
        while True:
            event = self.take()
            if isinstance(event, StepDone):
                self.pages[home][page] = value
                return
            if isinstance(event, DeviceLost) and home in event.microbatches:
                return

    def begin(self, home: int) -> None:
        """A move of free pages to free pages."""
        free, there = self.free(home), self.free(1 - home)
        num = min(len(free), len(there), 2)
        if num:
            pairs = list(zip(self.random.sample(free, num), self.random.sample(there, num), strict=True))
            self.under_way[self.num_moves] = (home, 1 - home, pairs)
            self.values[self.num_moves] = [self.pages[home][page] for page, _ in pairs]
            ends = [tuple(pair[side] for pair in pairs) for side in (0, 1)]
            self.stepper.move(PageMove(self.num_moves, home, 1 - home, ends[0], ends[1]))
            self.num_moves += 1

    def held(self, home: int) -> list[int]:
        """First number of every page."""
        self.stepper.start(StepCall(home, 0, made.inputs(2, 0, 0), wants_state=True))
        while not isinstance(event := self.take(), StepDone):
            pass
        pages = event.state[made.NAMES[0]].view(torch.float32).view(made.PAGES, PAGE, made.WIDTH)
        return [round(number) for number in pages[:, 0, 0].tolist()]


@pytest.mark.parametrize("transport", ["shm", "host"])
def test_random_moves_and_kills_leave_no_wrong_page(transport: str) -> None:
    """Every move ends once; what arrived is right, and what failed is not believed."""
    with opened(transport) as stepper:
        open_all(stepper)
        stress, kills, last = Stress(stepper, 3), [12, 25, 40], 0
        while kills or stress.num_moves < last + 20:  # enough after the last kill for pages to be known
            for home in (0, 1):
                if home in stepper.opened:
                    stress.write(home)
                if {0, 1} <= stepper.opened.keys():
                    stress.begin(home)
            if kills and stress.num_moves >= kills[0] and len(stepper.opened) == len(HOMES):
                signal_to(stepper, kills.pop(0) % 2, signal.SIGKILL)
                last = stress.num_moves
            if stress.under_way or len(stepper.opened) < len(HOMES):
                stress.take()
        while stress.under_way or len(stepper.opened) < len(HOMES):
            stress.take()
        for home in (0, 1):
            found = stress.held(home)
            known = {n: value for n, value in enumerate(stress.pages[home]) if n and value is not None}
            assert known == {n: found[n] for n in known}
            assert len(known) > made.PAGES // 2
