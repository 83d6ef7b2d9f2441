"""What `tessera analyze` shows of a graph beside its edges."""

import dataclasses
import io

from rich.console import Console

from factories import make_trace
from tessera.analyze import build_graph
from tessera.ir import BufferKind, Trace
from tessera.report import graph_table


def shown(trace: Trace) -> list[list[str]]:
    """The cells of every row of the table."""
    out = io.StringIO()
    Console(file=out, width=160).print(graph_table(build_graph(trace)))
    return [[c.strip() for c in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]


def make_step() -> Trace:
    """Reads one state and changes another."""
    kinds = {0: BufferKind.STATE, 1: BufferKind.STATE}
    return make_trace([[(0, 0, 8, "r"), (1, 0, 8, "rw")]], kinds)


def test_state_that_the_step_changes_is_handed_on() -> None:
    """Of two state buffers, the one that is only read is not counted."""
    assert ["state handed on", "1", "64 B", "changed by this step"] in shown(make_step())


def test_undeclared_aliases_are_listed() -> None:
    """An operator that returns old memory without saying so is named with how often it did."""
    trace = dataclasses.replace(make_step(), aliases=(("aten._unsafe_view.default", 3),))
    rows = [row for row in shown(trace) if row[0].startswith("alias:")]

    assert [("3", "not in its schema")] == [(row[1], row[3]) for row in rows]
    assert "alias: aten._unsafe_view.default" == rows[0][0]
