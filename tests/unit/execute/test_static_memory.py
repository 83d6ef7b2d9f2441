"""Static memory: places, lifetimes, and the signals and waits that reuse brings."""

import random

import pytest

import engine_factory as made
from factories import make_chain, make_cluster, make_plan, make_trace
from models import random_placement
from tessera.analyze import build_graph
from tessera.errors import DeviceMemoryError
from tessera.execute import lower
from tessera.execute.check_program import check_programs
from tessera.execute.footprint import check_fits, footprints, ready_programs
from tessera.execute.static_memory import ALIGN, lower_bound, with_memory
from tessera.ir import BufferKind, Plan, Program, Run, Send, Signal, Wait


def placed(plan: Plan) -> tuple[Program, ...]:
    """The first lane's programs with memory."""
    return with_memory(plan, lower(plan)[0])


def random_plan(seed: int, num_devices: int = 3) -> Plan:
    """Sixty launches that read, overwrite and update nine buffers, state among them."""
    rng = random.Random(seed)
    touches = [
        [
            (rng.randrange(9), 0, rng.choice([8, 64]), "r"),
            (rng.randrange(9), 0, rng.choice([8, 64]), rng.choice(["w", "rw"])),
        ]
        for _ in range(60)
    ]
    trace = make_trace(touches, {0: BufferKind.INPUT, 1: BufferKind.STATE})
    placement = random_placement(build_graph(trace), rng, num_devices)
    return make_plan([trace], [[placement]], cluster=make_cluster(num_devices))


def test_a_chain_needs_two_buffers_at_a_time() -> None:
    """However long a chain is, only a launch's input and output are alive together."""
    program = placed(make_plan([make_chain(20, 256)], [[[0] * 20]]))[0]

    assert 2 * 256 == program.arena_bytes[0] == lower_bound(build_graph(make_chain(20, 256)), program, 0)
    assert 0 == program.arena_bytes[1]


def test_places_are_aligned_as_torch_aligns() -> None:
    """Results can depend on alignment, so every place starts where torch could have started it."""
    program = placed(make_plan([make_chain(5, 100)], [[[0, 1, 0, 1, 0]]]))[0]

    assert {0} == {p.offset % ALIGN for places in program.places for p in places}


def test_a_landing_place_is_kept_free_from_the_producer_on() -> None:
    """What arrives from launch 1 may not land where launch 2 of the receiver still works."""
    trace = make_trace(
        [[(0, 0, 64, "w")], [(1, 0, 64, "w")], [(0, 0, 64, "r")], [(1, 0, 64, "r"), (2, 0, 64, "w")]]
    )
    program = placed(make_plan([trace], [[[1, 0, 1, 1]]]))[0]
    places = {p.buffer: p for p in program.places[1]}

    assert not places[0].overlaps(places[1])


def test_a_place_is_signalled_behind_its_last_use() -> None:
    """Where a landing place had another tenant, the signal follows that tenant's last launch."""
    trace = make_trace(
        [[(0, 0, 64, "w")], [(0, 0, 64, "r")], [(1, 0, 64, "w")], [(1, 0, 64, "r"), (2, 0, 64, "w")]]
    )
    program = placed(make_plan([trace], [[[1, 1, 0, 1]]]))[0]
    column = program.instructions[1]

    assert column.index(Run(1)) < column.index(Signal(0)) < column.index(Run(3))


def test_memory_that_was_sent_is_awaited_before_it_is_overwritten() -> None:
    """The second launch overwrites what the first one sent."""
    touches = [[(0, 0, 64, "w")], [(0, 0, 64, "r"), (1, 0, 64, "w")], [(0, 0, 64, "w")], [(0, 0, 64, "r")]]
    trace = make_trace(touches)
    program = placed(make_plan([trace], [[[0, 1, 0, 0]]]))[0]
    column = program.instructions[0]

    assert column.index(Send(0)) < column.index(Wait(0)) < column.index(Run(2))


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_pass_the_check_with_and_without_memory(seed: int) -> None:
    """Whatever the placement, lowering and layout give programs that are proved right."""
    plan = random_plan(seed)

    check_programs(plan, lower(plan)[0])
    check_programs(plan, placed(plan))


def test_state_stays_at_its_offset_through_the_lane() -> None:
    """Every program of a lane finds the state where the one before left it, and nothing else there."""
    plan = made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)
    seen: dict[tuple[int, str], int] = {}
    for program in placed(plan):
        buffers = plan.unit.graphs[program.step].trace.buffers
        for device, places in enumerate(program.places):
            for place in places:
                if buffers[place.buffer].kind is BufferKind.STATE:
                    key = (device, buffers[place.buffer].name)
                    assert place.offset == seen.setdefault(key, place.offset)


def test_peak_bytes_are_weights_and_slots() -> None:
    """The figure is known from the plan alone."""
    plan = made.plan_of([made.scattered(random.Random(0), [0])], 1, slots=5)
    programs = ready_programs(plan)
    found = footprints([plan], [programs])[0]

    weights = sum(t.numel() * 4 for t in made.workloads()[0].weights().values())
    assert weights + 5 * max(p.arena_bytes[0] for p in programs[0]) == found.peak_bytes


@pytest.mark.parametrize(
    ("memory_bytes", "remedy"),
    [
        (20_000, r"Lower --slots to \d+, or capture with a smaller batch"),
        (4_400, r"Use one slot, and capture with a batch or context at least \d+% smaller"),
        (1_000, r"Put .* of its weights on another device"),
    ],
)
def test_too_little_memory_says_what_to_lower_and_by_how_much(memory_bytes: int, remedy: str) -> None:
    """The message names device, need and excess, and the first thing that would help."""
    plan = made.plan_of([made.scattered(random.Random(0), [0])], 1, slots=40)
    found = footprints([plan], [ready_programs(plan)])
    small = made.with_memory_of(plan, memory_bytes)

    with pytest.raises(DeviceMemoryError, match=rf"device d0: .*are needed .* more than its .*{remedy}"):
        check_fits([small], found)
