"""Lowering: a placement becomes instruction lists that move each value once per reader's device."""

import random

import pytest

from factories import make_chain, make_cluster, make_plan, make_trace
from tessera.execute import lower
from tessera.execute.schedule import Job, Queue
from tessera.ir import BufferKind, Free, Program, Recv, Run, Send


def test_one_device_needs_no_transfer() -> None:
    """A lane that stays on one device only runs and frees."""
    program = lower(make_plan([make_chain(3)], [[[0, 0, 0]]]))[0][0]

    assert () == program.transfers
    assert () == program.instructions[1]


def test_a_value_is_sent_once_to_two_readers_on_one_device() -> None:
    """A tensor is paid once per destination, however many launches read it there."""
    trace = make_trace([[(0, 0, 64, "w")], [(0, 0, 64, "r")], [(0, 0, 64, "r")]])
    program = lower(make_plan([trace], [[[0, 1, 1]]]))[0][0]

    assert [(0, 1)] == [(t.src, t.dst) for t in program.transfers]


def test_a_value_is_sent_once_to_each_reading_device() -> None:
    """Readers on two other devices make two transfers."""
    trace = make_trace([[(0, 0, 64, "w")], [(0, 0, 64, "r")], [(0, 0, 64, "r")]])
    program = lower(make_plan([trace], [[[0, 1, 2]]], cluster=make_cluster(3)))[0][0]

    assert [(0, 1), (0, 2)] == [(t.src, t.dst) for t in program.transfers]


def test_a_send_follows_its_producer_and_a_receive_precedes_its_reader() -> None:
    """Instructions of a chain cut in the middle."""
    program = lower(make_plan([make_chain(2)], [[[0, 1]]]))[0][0]

    assert (Run(0), Send(0)) == program.instructions[0][:2]
    assert (Recv(0), Run(1)) == program.instructions[1][:2]


def test_a_temporary_is_freed_after_its_last_use() -> None:
    """The middle buffer of a chain is freed by the launch that reads it last."""
    program = lower(make_plan([make_chain(3)], [[[0, 0, 0]]]))[0][0]
    column = program.instructions[0]

    assert column.index(Run(1)) < column.index(Free(1)) < column.index(Run(2))


def test_weights_are_resident_only_where_they_are_read() -> None:
    """A device holds the weights of its own launches and no others."""
    trace = make_trace(
        [[(0, 0, 64, "r"), (2, 0, 64, "w")], [(1, 0, 64, "r"), (2, 0, 64, "r"), (3, 0, 64, "w")]],
        {0: BufferKind.WEIGHT, 1: BufferKind.WEIGHT},
    )
    program = lower(make_plan([trace], [[[0, 1]]]))[0][0]

    assert ((0,), (1,)) == program.weights


def test_state_that_changes_home_moves_between_the_steps() -> None:
    """Prefill on one device and decode on another are joined by a program that only moves state."""
    first = make_trace([[(0, 0, 64, "rw")]], {0: BufferKind.STATE}, kind="prefill")
    second = make_trace([[(0, 0, 64, "rw")]], {0: BufferKind.STATE})
    programs = lower(make_plan([first, second], [[[0], [1]]], counts=[1, 5]))[0]

    assert [1, 1, 5] == [p.count for p in programs]
    assert ((Send(0),), (Recv(0),)) == programs[1].instructions


def run_all(program: Program, rng: random.Random) -> list[int]:
    """Runs a program's devices in a random interleaving; returns the launches that ran."""
    queues = [Queue() for _ in program.instructions]
    for queue, column in zip(queues, program.instructions, strict=True):
        if column:
            queue.add(Job(0, 0, column))
    ran: list[int] = []
    while any(len(q) for q in queues):
        ready = [d for d, q in enumerate(queues) if q.pick() is not None]
        assert ready, "deadlock"
        device = rng.choice(ready)
        job = queues[device].pick()
        assert job is not None
        instruction = job.issue()
        if isinstance(instruction, Run):
            ran.append(instruction.launch)
        elif isinstance(instruction, Send):
            transfer = program.transfers[instruction.transfer]
            queues[transfer.dst].deliver(0, instruction.transfer)
        if job.is_done:
            queues[device].drop(0)
    return ran


@pytest.mark.parametrize("seed", range(20))
def test_random_placements_never_deadlock_and_run_everything(seed: int) -> None:
    """Whatever the placement and the order of the devices, every launch runs once after what it needs."""
    rng = random.Random(seed)
    touches = [
        [(rng.randrange(6), 0, 8, "r"), (rng.randrange(6), 0, 8, rng.choice(["w", "rw"]))] for _ in range(30)
    ]
    trace = make_trace(touches, {0: BufferKind.INPUT})
    placement = [rng.randrange(3) for _ in touches]
    plan = make_plan([trace], [[placement]], cluster=make_cluster(3))

    ran = run_all(lower(plan)[0][0], rng)

    assert list(range(30)) == sorted(ran)
    position = {launch: i for i, launch in enumerate(ran)}
    raw = [(v.producer, r) for v in plan.unit.graphs[0].values for r in v.readers if v.producer is not None]
    assert all(position[a] < position[b] for a, b in raw)
