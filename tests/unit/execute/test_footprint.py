"""Memory of a device: what is counted before a run, and the places that a worker gives to buffers."""

import random

import pytest

import engine_factory as made
from factories import make_chain, make_cluster, make_plan, make_trace
from models import random_placement
from tessera.analyze import build_graph
from tessera.errors import DeviceMemoryError
from tessera.execute.lower import check_programs, lower
from tessera.execute.memory import (
    ALIGN,
    ProgramMemory,
    Storage,
    WorkerMemory,
    check_fits,
    footprints,
    ready_programs,
    touched,
)
from tessera.ir import BufferKind, Plan, Program


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


def ground_of(plan: Plan, device: int = 0) -> WorkerMemory:
    """A device's memory, without weights."""
    memory = WorkerMemory(device)
    for graph in plan.graphs:
        memory.add_step(graph.trace, {})
    return memory


def place_of(stand: ProgramMemory, buffer: int) -> Storage:
    return stand.memory.get(buffer)


def test_a_chain_needs_two_buffers_at_a_time() -> None:
    """However long a chain is, only a launch's input and output are alive together, and the step's input."""
    plan = make_plan([make_chain(20, 256)], [[[0] * 20]], microbatches=1)
    found = footprints([plan], [ready_programs(plan)])

    assert [3 * 256, 0] == [f.microbatch_bytes for f in found]


def test_what_is_freed_serves_the_buffers_behind_it() -> None:
    """A worker takes no more places for a chain than are alive together, however often it is set up."""
    plan = make_plan([make_chain(20, 256)], [[[0] * 20]])
    ground, program = ground_of(plan), lower(plan)[0][0]
    places = {
        place_of(ground.program_memory(0, program, ()), b).data_ptr() for b in range(21) for _ in range(2)
    }

    assert 3 == len(places)


@pytest.mark.parametrize("seed", range(6))
def test_no_two_buffers_that_are_needed_at_once_share_a_place(seed: int) -> None:
    """On every device, at every point of its list."""
    plan = random_plan(seed)
    program, trace = lower(plan)[0][0], plan.graphs[0].trace
    for device in range(3):
        stand = ground_of(plan, device).program_memory(0, program, ())
        alive: dict[int, int] = {}
        for buffer, is_needed in touched(trace, program, device):
            if is_needed:
                at = place_of(stand, buffer).data_ptr()
                assert at not in alive.values()
                assert at % ALIGN == 0
                alive[buffer] = at
            else:
                del alive[buffer]


def test_microbatches_share_nothing() -> None:
    """Each has places of its own."""
    plan = random_plan(0)
    ground, program = ground_of(plan), lower(plan)[0][0]
    one, other = ground.program_memory(0, program, ()), ground.program_memory(1, program, ())
    here = [b for b, _ in touched(plan.graphs[0].trace, program, 0)]

    assert not {place_of(one, b).data_ptr() for b in here} & {place_of(other, b).data_ptr() for b in here}


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_pass_the_check(seed: int) -> None:
    """Whatever the placement, lowering gives programs that are proved right."""
    plan = random_plan(seed)

    check_programs(plan, lower(plan)[0])


def test_state_stays_where_it_is_through_a_lane_and_in_others() -> None:
    """Every program of a microbatch finds the state where the one before left it, and nothing else there."""
    rng = random.Random(0)
    plan = made.plan_of([made.scattered(rng, [0, 1]), made.scattered(rng, [0, 1])], 2)
    for device in range(2):
        ground = ground_of(plan, device)
        seen: dict[str, int] = {}
        others: set[int] = set()
        for program in (p for lane in lower(plan) for p in lane):
            stand = ground.program_memory(0, program, ())
            buffers = plan.graphs[program.step].trace.buffers
            for index in {b for b, _ in touched(plan.graphs[program.step].trace, program, device)}:
                at = place_of(stand, index).data_ptr()
                if buffers[index].kind is BufferKind.STATE:
                    assert at == seen.setdefault(buffers[index].name, at)
                else:
                    others.add(at)
        assert not others & set(seen.values())


def test_peak_bytes_are_weights_and_microbatches() -> None:
    """Known from the plan alone: weights once, for each microbatch its state and what is alive at once."""
    plan = made.plan_of([made.scattered(random.Random(0), [0])], 1, microbatches=5)
    programs = ready_programs(plan)
    found = footprints([plan], [programs])[0]
    weights = sum(t.numel() * 4 for t in made.workloads()[0].weights().values())
    state = 4 * made.WIDTH * 4

    assert weights + 5 * (state + max(most_alive(plan, p) for p in programs[0])) == found.peak_bytes


def most_alive(plan: Plan, program: Program) -> int:
    """The most bytes besides state that device 0 needs at one time."""
    trace = plan.graphs[program.step].trace
    alive: set[int] = set()
    most = 0
    for buffer, is_needed in touched(trace, program, 0):
        (alive.add if is_needed else alive.discard)(buffer)
        sizes = [trace.buffers[b].size_bytes for b in alive if trace.buffers[b].kind is not BufferKind.STATE]
        most = max(most, sum(-(-size // ALIGN) * ALIGN for size in sizes))
    return most


@pytest.mark.parametrize(
    ("memory_bytes", "remedy"),
    [
        (20_000, r"Lower --microbatches to \d+, or capture with a smaller batch"),
        (4_400, r"Use one microbatch, and capture with a batch or context at least \d+% smaller"),
        (1_000, r"Put .* of its weights on another device"),
    ],
)
def test_too_little_memory_says_what_to_lower_and_by_how_much(memory_bytes: int, remedy: str) -> None:
    """The message names device, need and excess, and the first thing that would help."""
    plan = made.plan_of([made.scattered(random.Random(0), [0])], 1, microbatches=40)
    found = footprints([plan], [ready_programs(plan)])
    small = made.with_memory_of(plan, memory_bytes)

    with pytest.raises(DeviceMemoryError, match=rf"device d0: .*are needed .* more than its .*{remedy}"):
        check_fits([small], found)
