"""Fetched weights: programs, their proof, memory and simulated time, of a chain with a weight per launch."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from factories import make_cluster, make_plan, make_trace
from tessera.errors import RuleBroken
from tessera.execute.lower import check_programs, fetched_by, lower
from tessera.execute.memory import footprints, ready_programs
from tessera.ir import SLOTS, BufferKind, Cluster, Fetch, Instruction, Plan, Program, Recv, Run, Send, verify
from tessera.simulate import SteadyRates, simulate

NUM, SIZE, US = 8, 1 << 16, 100.0


def beside_host(gbps: float = 1.0) -> Cluster:
    """A GPU and a CPU, whose link fetches at this speed."""
    made = make_cluster(2, latency_us=0.0)
    card, host = made.devices
    links = tuple(replace(link, fetch_gbps=gbps) for link in made.links)
    return Cluster((card, replace(host, gpu="cpu-xeon-8480")), links)


def made(fetched: range = range(NUM), gbps: float = 1.0) -> Plan:
    """Launch i reads weight i and a value; all on the GPU."""
    value = NUM
    touches = [[(i, 0, SIZE, "r"), (value + i, 0, 64, "r"), (value + i + 1, 0, 64, "w")] for i in range(NUM)]
    kinds = {**dict.fromkeys(range(NUM), BufferKind.WEIGHT), value: BufferKind.INPUT}
    trace = make_trace(touches, kinds, SIZE)
    plan = make_plan([trace], [[[0] * NUM]], cluster=beside_host(gbps), us=US, microbatches=1)
    placement = replace(plan.lanes[0].placement, fetched=tuple((f"b{i}", 1) for i in fetched))
    found = replace(plan, lanes=(replace(plan.lanes[0], placement=placement),))
    verify(found)
    return found


def test_weights_are_fetched_ahead_into_places_that_are_free() -> None:
    """The first before the step, each other one behind the launch that had its place."""
    plan = made(range(1, NUM))
    ((program,),) = lower(plan)
    check_programs(plan, [program])
    column = [x for x in program.instructions[0] if isinstance(x, Run | Fetch)]
    ahead = [Fetch(n) for n in range(1, 1 + SLOTS)]
    assert ahead == column[:SLOTS]
    for launch in range(1, NUM - SLOTS):
        assert column[column.index(Run(launch)) + 1] == Fetch(launch + SLOTS)
    assert [[0], list(range(1, NUM))] == [list(held) for held in program.weights]
    assert [3] == fetched_by(plan.graphs[0].trace, program, 0, 3)
    assert not program.transfers
    assert not [x for x in program.instructions[0] if isinstance(x, Send | Recv)]


def changed(program: Program, column: Sequence[Instruction]) -> Program:
    return replace(program, instructions=(tuple(column), *program.instructions[1:]))


def test_a_broken_fetch_is_named() -> None:
    plan = made()
    ((program,),) = lower(plan)
    column = list(program.instructions[0])
    without = [x for x in column if x != Fetch(4)]
    early = [Fetch(SLOTS), *(x for x in column if x != Fetch(SLOTS))]
    swapped = [Fetch(1) if x == Fetch(0) else Fetch(0) if x == Fetch(1) else x for x in column]
    for broken, rule in (
        (without, "every read finds the version it needs"),
        (early, "a place has been used when the next weights come"),
        (swapped, "weights are fetched in order"),
    ):
        with pytest.raises(RuleBroken, match=rule):
            check_programs(plan, [changed(program, broken)])


def test_places_count_as_the_gpus_memory_and_weights_as_the_hosts() -> None:
    plan, held = made(range(2)), made(range(0))
    card, host = footprints([plan], [ready_programs(plan)])
    whole, none = footprints([held], [ready_programs(held)])
    assert (2 * SIZE, 0) == (whole.weight_bytes - card.weight_bytes, none.weight_bytes)
    assert 2 * SIZE == host.weight_bytes
    assert SLOTS * SIZE == card.microbatch_bytes - whole.microbatch_bytes


@pytest.mark.parametrize("gbps", [0.1, 0.5, 2.0])
def test_a_simulated_step_takes_the_longer_of_link_and_launches(gbps: float) -> None:
    """The first copy begins with the step, and the last launch follows the last copy."""
    plan, fetch_us = made(gbps=gbps), SIZE / (gbps * 1e3)
    timeline = simulate(plan, 1)
    moved = [span for span in timeline.spans if span.is_transfer]
    assert [f"{SIZE} bytes"] * NUM == [span.label for span in moved]
    assert NUM * fetch_us == pytest.approx(sum(span.stop_us - span.start_us for span in moved))
    wanted = NUM * fetch_us + US if fetch_us > US else fetch_us + NUM * US
    assert wanted == pytest.approx(timeline.makespan_us)
    assert 1e6 / wanted == pytest.approx(SteadyRates()(plan), rel=0.01)
    assert NUM * US == pytest.approx(simulate(made(range(0)), 1).makespan_us)


def test_only_a_cpu_keeps_weights_that_are_fetched() -> None:
    plan = made()
    card = replace(plan.cluster.devices[1], gpu="a100")
    cluster = replace(plan.cluster, devices=(plan.cluster.devices[0], card))
    costs = tuple(replace(each, devices=cluster.devices) for each in plan.costs)
    with pytest.raises(RuleBroken, match="kept by a CPU"):
        verify(replace(plan, cluster=cluster, costs=costs))


def test_launches_of_the_host_take_longer_while_weights_are_fetched() -> None:
    """Both read its memory."""

    def host_us(fetched: range) -> float:
        plan = made(fetched)
        placement = plan.lanes[0].placement
        divided = replace(placement, devices=((*placement.devices[0][:-1], 1),))
        links = tuple(replace(link, fetch_slowdown=1.5) for link in plan.cluster.links)
        cluster = replace(plan.cluster, links=links)
        plan = replace(plan, cluster=cluster, lanes=(replace(plan.lanes[0], placement=divided),))
        spans = [x for x in simulate(plan, 1).spans if x.track == cluster.names[1]]
        return sum(x.stop_us - x.start_us for x in spans)

    assert pytest.approx(US) == host_us(range(0))
    assert pytest.approx(1.5 * US) == host_us(range(2))
