"""The machine: a run that ends while another begins is told when the loop goes on, not before."""

from factories import make_chain, make_plan
from tessera.ir import Recv
from tessera.simulate.columns import Script, Stretch, Wire, make_column
from tessera.simulate.machine import Machine, Work


def script(*columns: list[Recv | Stretch]) -> Script:
    """What each device does in one run."""
    return Script(tuple(make_column(c) for c in columns), 1, 0.0, 0)


def test_a_run_that_only_receives_ends_after_one_that_begins_at_the_same_time() -> None:
    """A device frees up with a finished hand-over in its queue; beginning the next run there ends nothing."""
    machine = Machine(make_plan([make_chain(1)], [[[0]]]), num_buses=1)
    long = Work(0, script([], [Stretch([0.0, 10.0], 0, 1, ())]))
    wire = Wire(0, 0, 1, 8, 0, 1.0, 1.0)
    move = Work(1, script([Stretch([0.0, 1.0], 0, 1, (wire,))], [Recv(0)]))
    machine.start(0, long)
    machine.start(1, move)

    assert 0 == machine.run_until(None)
    machine.start(0, long)
    assert (1, 10.0) == (machine.run_until(None), machine.now_us)
    assert (0, 20.0) == (machine.run_until(None), machine.now_us)
