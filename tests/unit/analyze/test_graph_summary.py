"""What `tessera analyze` says of a graph."""

import dataclasses

from factories import make_trace
from report_factory import make_graph
from tessera.analyze import build_graph
from tessera.cli.analyze import ImmovableLaunch, summary
from tessera.ir import BufferKind, Trace


def make_step() -> Trace:
    """Reads one state and changes another."""
    kinds = {0: BufferKind.STATE, 1: BufferKind.STATE}
    return make_trace([[(0, 0, 8, "r"), (1, 0, 8, "rw")]], kinds)


def test_only_state_that_the_step_changes_is_counted_as_changed() -> None:
    trace = make_step()

    assert trace.buffers[1].size_bytes == summary(build_graph(trace)).changed_state_bytes


def test_undeclared_aliases_are_listed_with_their_number() -> None:
    trace = dataclasses.replace(make_step(), aliases=(("aten._unsafe_view.default", 3),))

    assert {"aten._unsafe_view.default": 3} == summary(build_graph(trace)).undeclared_aliases


def test_immovable_launches_are_named_with_the_reason() -> None:
    launches = summary(make_graph(immovable="reads [pointers] from memory")).immovable

    assert ("reads [pointers] from memory", ImmovableLaunch) == (launches[0].why, type(launches[0]))


def test_a_graph_without_immovable_launches_says_so() -> None:
    assert ("Every launch may run on any device.",) == summary(make_graph()).notes
