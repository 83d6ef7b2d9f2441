"""Dilation, partitions, spans and measuring for GPUs, as far as no GPU is needed."""

import itertools

import pytest
from numpy.testing import assert_allclose

from factories import make_chain, make_plan
from tessera.errors import WorkerError
from tessera.execute.cuda.device import check_device, divide
from tessera.execute.cuda.graphs import priority
from tessera.execute.cuda.measure import FLOOR_US, without_stamps
from tessera.execute.cuda.pace import TURN_US, TimeScale, choose_scale, link_hold, throttled_links
from tessera.execute.cuda.transport import ALIGN, Inboxes, InboxSpot
from tessera.execute.cuda.worker import GpuClock
from tessera.execute.lower import lower
from tessera.ir import Cluster, Device, DeviceKind, Link


def make_device(name: str, dilated: bool = False, kind: DeviceKind = DeviceKind.CUDA) -> Device:
    """A device on GPU 0."""
    return Device(name, kind, "a100", 1 << 34, is_dilated=dilated)


def test_a_card_that_is_fast_enough_needs_no_scale() -> None:
    """Targets above what the card takes, busy on every device, leave time as it is."""
    scale = choose_scale([[50.0, 80.0]] * 3, [10.0] * 3, 2)

    assert 1.0 == scale.factor
    assert 1.0 == scale.covered


def test_the_scale_covers_all_but_one_percent_of_the_time() -> None:
    """One tiny launch in a thousand does not slow everything down; it is counted instead."""
    targets = [[100.0]] * 999 + [[0.1]]
    scale = choose_scale(targets, [200.0] * 1000, 1)

    assert scale.factor == pytest.approx((200.0 + TURN_US) / 100.0)
    assert 0.99 <= scale.covered < 1.0


def test_launches_that_cost_nothing_do_not_count() -> None:
    """Allocations have no time to keep."""
    assert TimeScale(1.0, 1.0) == choose_scale([[0.0, 0.0]], [5.0], 2)


def test_a_message_holds_its_wire_and_arrives_later() -> None:
    """Wire time occupies the link, latency does not; both are scaled."""
    hold = link_hold(Link("a", "b", "pcie4", 10.0, 25.0), 25_000, 2.0)

    assert (2000, 20_000) == (hold.hold_ns, hold.extra_ns)


def test_only_links_of_dilated_devices_are_throttled() -> None:
    """Between two real devices a copy takes what it takes."""
    devices = (make_device("cuda:0/as=a100", True), make_device("cuda:1"), make_device("cuda:2"))
    links = tuple(Link(a.name, b.name, "pcie4", 10.0, 25.0) for a in devices for b in devices if a is not b)

    assert {(0, 1), (1, 0), (0, 2), (2, 0)} == set(throttled_links(Cluster(devices, links)))


# As on an H200: groups of eight SMs, and twelve that fill no group.
GROUPS, REST = [8] * 15, 12


@pytest.mark.parametrize("sizes", [[100, 32], [32, 100], [64, 32], [16, 32, 84], [132], [12, 120]])
def test_parts_have_the_sizes_asked_for_and_share_nothing(sizes: list[int]) -> None:
    """Each device gets its size out of pieces of its own, also where SMs stay unused."""
    parts = divide(GROUPS, REST, sizes, "cuda:0")
    pieces = [*GROUPS, REST]

    assert sizes == [sum(pieces[i] for i in part) for part in parts]
    assert sum(map(len, parts)) == len({i for part in parts for i in part})


@pytest.mark.parametrize("sizes", [[30, 64], [64, 64], [20, 28]])
def test_a_part_that_cannot_be_had_is_refused_with_what_can(sizes: list[int]) -> None:
    """Another size than asked for would make another device of it."""
    with pytest.raises(WorkerError, match=r"it offers 15 groups of 8 and 12 more.*multiples of 8"):
        divide(GROUPS, REST, sizes, "cuda:0")


def test_parts_that_do_not_fit_are_refused() -> None:
    """More SMs than the card has."""
    with pytest.raises(WorkerError, match="do not fit the 132"):
        divide(GROUPS, REST, [100, 64], "cuda:0")


@pytest.mark.parametrize(("rest", "size"), [(132, 132), (132, 8), (0, 8)])
def test_a_card_without_groups_has_no_parts(rest: int, size: int) -> None:
    """The driver may offer none, for all SMs or for a part of them."""
    with pytest.raises(WorkerError, match=r"cuda:0: the driver offers no groups of SMs. Use the whole card"):
        divide([], rest, [size], "cuda:0")


def test_parts_take_a_rest_that_is_as_good_as_groups() -> None:
    """Groups alone are too few for both."""
    assert [(0, 2), (1,)] == divide([8, 8], 8, [16, 8], "cuda:0")


def test_short_steps_and_early_microbatches_go_first() -> None:
    """On a GPU with six priorities, three microbatches of short steps go before three of long ones."""
    order = [priority(number, is_short, 0, -5) for is_short in (True, False) for number in range(3)]

    assert [-5, -4, -3, -2, -1, 0] == order
    assert 0 == priority(7, False, 0, -5) == priority(3, True, 0, 0)


def test_devices_that_are_not_here_are_named() -> None:
    """A plan for another machine, and a device that is no GPU."""
    with pytest.raises(WorkerError, match=r"cuda:0: this machine has no CUDA device"):
        check_device(make_device("cuda:0"), 0)
    with pytest.raises(WorkerError, match=r"emu:a100 is no CUDA device"):
        check_device(make_device("emu:a100", kind=DeviceKind.EMU), 1)


def test_transfers_of_a_program_share_no_byte_of_an_inbox() -> None:
    """Flags, records and places of two microbatches lie apart, places where torch would align them."""
    trace = make_chain(4)
    program = lower(make_plan([trace], [[[0, 1, 0, 1]]]))[0][0]
    inboxes = Inboxes(2, 2)
    inboxes.add([program], [trace])
    layout = inboxes.layout(0, 1)
    here = [n for n, transfer in enumerate(program.transfers) if transfer.dst == 1]
    spots = [InboxSpot(microbatch, 0, number) for microbatch in range(2) for number in here]
    parts = [(layout.flag(s), 8) for s in spots] + [(layout.record(s), 32) for s in spots]
    sizes = [trace.buffers[program.transfers[s.transfer].buffer].size_bytes for s in spots]
    parts += [(inboxes.place(s, 1), size) for s, size in zip(spots, sizes, strict=True)]
    ends = sorted((start, start + size) for start, size in parts)

    assert len(here) > 1
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    assert all(inboxes.place(spot, 1) % ALIGN == 0 for spot in spots)
    assert ends[-1][1] <= layout.total_bytes


def test_plans_that_replace_others_land_in_the_inbox_that_is_there() -> None:
    """However often they come; larger ones have another, and all together stay below three of the largest."""
    small, large = make_chain(4), make_chain(12)
    programs = [
        lower(make_plan([trace], [[[n % 2 for n in range(num)]]]))[0][0]
        for trace, num in ((small, 4), (large, 12))
    ]
    inboxes = Inboxes(2, 2)
    for _ in range(5):
        inboxes.add([programs[0]], [small])
    assert [1, 1] == [len(layouts) for layouts in inboxes.layouts]
    for _ in range(5):
        inboxes.add([programs[1]], [large])
        inboxes.add([programs[0]], [small])
    assert [2, 2] == [len(layouts) for layouts in inboxes.layouts]
    for layouts in inboxes.layouts:
        assert sum(x.total_bytes for x in layouts) < 3 * layouts[-1].total_bytes


def test_times_of_launches_add_up_to_the_whole_step() -> None:
    """The cost of stamping is taken off each launch, so that the sum is the plain step's."""
    times = without_stamps(130.0, [[13.0] * 5, [103.0] * 5, [23.0] * 5])

    assert_allclose([10.0, 100.0, 20.0], [us for us, _ in times.launches], rtol=1e-3)
    assert times.stamp_us == pytest.approx(3.0, abs=1e-3)


def test_no_launch_is_measured_below_the_floor() -> None:
    """A launch shorter than its stamps is still a launch."""
    times = without_stamps(100.0, [[1.0] * 5, [103.0] * 5])

    assert min(us for us, _ in times.launches) >= FLOOR_US * 0.9


def test_times_are_exact_though_the_clock_is_large() -> None:
    """Nanoseconds since 1970 do not fit a float; differences survive."""
    zero = 1_794_000_000_000_000_000
    clock = GpuClock(zero, 100.0)

    assert 100.000005032 == pytest.approx(clock.seconds(zero + 5_032), abs=1e-12)
