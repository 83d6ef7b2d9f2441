"""Verifiers: each rule is a sentence, and breaking it names that sentence."""

import importlib
import pickle
from dataclasses import replace

import pytest

from factories import make_chain, make_cluster, make_plan, make_trace
from tessera.analyze import build_graph
from tessera.errors import RuleBroken
from tessera.execute import lower
from tessera.ir import (
    BufferKind,
    Cost,
    Edge,
    Hazard,
    Lane,
    Link,
    Placement,
    Region,
    Send,
    Source,
    Trace,
    verify,
)


def test_an_access_outside_its_buffer_is_refused() -> None:
    """Byte ranges are half-open and end inside the buffer."""
    trace = make_chain(1)
    access = replace(trace.launches[0].accesses[0], region=Region(60, 8))
    launch = replace(trace.launches[0], accesses=(access,))

    with pytest.raises(RuleBroken, match="every access lies inside its buffer"):
        verify(replace(trace, launches=(launch,)))


def test_a_written_weight_is_refused() -> None:
    """A weight is the same for all requests, so no launch may write one."""
    with pytest.raises(RuleBroken, match="weights are never written"):
        verify(make_trace([[(0, 0, 64, "w")]], {0: BufferKind.WEIGHT}))


def test_an_edge_that_points_back_is_refused() -> None:
    """A launch cannot wait for a later one."""
    graph = build_graph(make_chain(2))

    with pytest.raises(RuleBroken, match="every edge points forward"):
        verify(replace(graph, edges=(Edge(1, 0, Hazard.RAW, 1),)))


def test_a_plan_that_forgets_a_launch_is_refused() -> None:
    """Every launch is placed in every lane."""
    plan = make_plan([make_chain(3)], [[[0, 0, 0]]])

    with pytest.raises(RuleBroken, match="every launch of every step is placed"):
        verify(replace(plan, lanes=(Lane(Placement(((0, 0),)), 1.0),)))


def test_a_plan_that_splits_state_is_refused() -> None:
    """Launches that touch the same state share a device."""
    touches = [[(0, 0, 64, "rw")], [(0, 0, 64, "r"), (1, 0, 64, "w")]]
    trace = make_trace(touches, {0: BufferKind.STATE})

    with pytest.raises(RuleBroken, match="launches that share state share a device"):
        make_plan([trace], [[[0, 1]]])


def test_costs_of_another_trace_are_refused() -> None:
    """A plan's price list must be for the plan's own trace."""
    plan = make_plan([make_chain(3)], [[[0, 0, 0]]])
    other = make_plan([make_chain(3, size_bytes=32)], [[[0, 0, 0]]])

    with pytest.raises(RuleBroken, match="made for that step's trace"):
        verify(replace(plan, costs=other.costs))


@pytest.mark.parametrize("us", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_cost_that_is_no_time_is_refused(us: float) -> None:
    """Times are finite, not negative and at most a day; the launch and the device are named."""
    costs = make_plan([make_chain(1)], [[[0]]]).costs[0]

    with pytest.raises(RuleBroken, match=r"every time is finite.*launch 0 on d0"):
        verify(replace(costs, costs=((Cost(us, Source.FITTED, 0.1),) * 2,)))


def test_a_link_without_bandwidth_is_refused() -> None:
    """A zero-bandwidth link would take forever."""
    cluster = make_cluster()
    dead = replace(cluster.links[0], gbps=0.0)

    with pytest.raises(RuleBroken, match="positive bandwidth"):
        verify(replace(cluster, links=(dead, *cluster.links[1:])))


def test_a_disconnected_cluster_is_refused() -> None:
    """Every two devices are joined in both directions."""
    cluster = make_cluster(3)
    kept: tuple[Link, ...] = cluster.links[1:]

    with pytest.raises(RuleBroken, match="joined in both directions"):
        verify(replace(cluster, links=kept))


def test_a_transfer_without_a_sender_is_refused() -> None:
    """Every transfer has one sender and one receiver."""
    program = lower(make_plan([make_chain(2)], [[[0, 1]]]))[0][0]
    silent = tuple(tuple(i for i in column if not isinstance(i, Send)) for column in program.instructions)

    with pytest.raises(RuleBroken, match="one sender and one receiver"):
        verify(replace(program, instructions=silent))


def test_a_record_that_passed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one model share its traces; a copy with other fields is read."""
    trace = make_trace([[(0, 0, 64, "w")]])
    read: list[Trace] = []

    def note(given: Trace) -> bool:
        read.append(given)
        return True

    rules = {"a trace is read": note}
    monkeypatch.setitem(importlib.import_module("tessera.ir.verify").RULES, Trace, rules)
    verify(trace)
    verify(trace)
    other = replace(trace, aliases=())
    verify(other)

    assert [id(trace), id(other)] == [id(t) for t in read]
    assert pickle.loads(pickle.dumps(trace)) == trace
