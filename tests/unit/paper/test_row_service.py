"""Serving under a virtual clock, checked where the answer is known."""

import math

import pytest
from benchmarks.row_service.machine import MemoMachine
from benchmarks.row_service.metrics import measured, poisson
from benchmarks.row_service.server import SimulatedServer, load_of

from factories import make_chain, make_cluster, make_plan, make_trace
from online_factory import RUN_US, alone_plan, at_us, serve, split_plan
from tessera.ir import Arrivals, BufferKind, Plan
from tessera.simulate import simulate
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.core import VirtualMachine


def mixed_plan() -> Plan:
    """Two lanes, one of which crosses three times, and three microbatches."""
    return make_plan([make_chain(6)], [[[0, 1, 0, 0, 1, 1]], [[1] * 6]], microbatches=3)


def stateful_plan() -> Plan:
    """Prefill and decode on different devices."""
    first = make_trace([[(0, 0, 64, "rw")], [(1, 0, 64, "w")]], {0: BufferKind.STATE}, kind="prefill")
    second = make_trace([[(0, 0, 64, "rw")], [(1, 0, 64, "w")]], {0: BufferKind.STATE})
    return make_plan([first, second], [[[0, 0], [1, 0]]], counts=[1, 3], microbatches=3)


@pytest.mark.parametrize("plan", [mixed_plan(), alone_plan(), split_plan(3), stateful_plan()])
def test_a_batch_ends_when_the_offline_simulation_says(plan: Plan) -> None:
    """With one request a microbatch, all waiting at the start, serving is `simulate`: no second scheduler."""
    served = serve(plan, at_us(*[0.0] * 40))

    assert served.ledger.done_us == pytest.approx([stop for _, _, stop in simulate(plan, 40).requests])


@pytest.mark.parametrize("plan", [mixed_plan(), split_plan(3), stateful_plan()])
@pytest.mark.parametrize("rows", [1, 4])
def test_remembering_changes_no_time(plan: Plan, rows: int) -> None:
    """A machine that follows known segments and one that works everything out agree on every request."""
    arrivals = make_arrivals("poisson:15000", 400, 3, "geometric:1,6")
    requests = load_of(plan.unit, arrivals, rows)
    quick, plain = (SimulatedServer([plan], requests) for _ in range(2))
    plain.stepper.machine = VirtualMachine(len(plan.cluster.devices), len(plan.cluster.links))

    first, second = quick.run(), plain.run()

    machine = quick.stepper.machine
    assert isinstance(machine, MemoMachine)
    assert machine.num_followed > 2 * machine.num_computed
    assert first.ledger.done_us == pytest.approx(second.ledger.done_us, abs=1e-3)
    assert first.ledger.first_us == pytest.approx(second.ledger.first_us, abs=1e-3)
    assert first.busy_us == pytest.approx(second.busy_us)


def test_fixed_service_on_one_device_is_an_md1_queue() -> None:
    """Poisson arrivals, one server, constant service D: the mean wait is D rho / (2 (1 - rho))."""
    rho = 0.6
    served = serve(alone_plan(microbatches=1), poisson(rho / RUN_US * 1e6, 10_000, seed=1))
    waits = measured(served)["latency"] * 1e6 - RUN_US

    assert waits.mean() == pytest.approx(RUN_US * rho / (2 * (1 - rho)), rel=0.05)


def test_geometric_answers_on_two_devices_are_an_mm2_queue() -> None:
    """Two lanes of one device each: the mean wait is Erlang's, less as answers spread less than his."""
    num, mean, load = 2, 6, 0.5
    plan = make_plan([make_chain(1)], [[[0]], [[1]]], us=1.0, microbatches=num)
    rate = load * num / mean * 1e6
    served = serve(plan, make_arrivals(f"poisson:{rate}", 8_000, 1, f"geometric:1,{mean}"))
    offered = load * num
    busy = offered**num / math.factorial(num) / (1 - load)
    waits = busy / (sum(offered**k / math.factorial(k) for k in range(num)) + busy)
    wait_us = measured(served)["ttft"] * 1e6 - 1.0

    spread = 1 - 0.5 / mean  # half of one and the squared variation of geometric lengths
    assert wait_us.mean() == pytest.approx(spread * waits * mean / (num * (1 - load)), rel=0.1)


def test_requests_that_share_a_microbatch_share_its_steps() -> None:
    """Two requests of three tokens in one microbatch take three runs, not six."""
    served = serve(alone_plan(), at_us(0.0, 0.0, outputs=[3, 3]), rows=2)

    assert [3 * RUN_US] * 2 == served.ledger.done_us


def test_a_request_joins_between_two_runs() -> None:
    """One that comes in the middle of a run begins with the next, and the other is not delayed."""
    served = serve(alone_plan(), at_us(0.0, 0.5 * RUN_US, outputs=[3, 1]), rows=2)

    assert [3 * RUN_US, 2 * RUN_US] == served.ledger.done_us


def test_a_second_microbatch_opens_when_the_first_is_full() -> None:
    """Without a free seat the third request takes a microbatch of its own, and shares the device."""
    served = serve(alone_plan(), at_us(0.0, 0.0, 0.0, outputs=[1, 1, 1]), rows=2)

    assert [RUN_US, RUN_US, 2 * RUN_US] == sorted(served.ledger.done_us)


def test_microbatches_close_when_the_load_falls() -> None:
    """Late requests take seats of the older microbatch, so the younger one empties and its runs end."""
    arrivals = at_us(*[0.0] * 4, *(RUN_US * 2.5 * n for n in range(1, 20)), outputs=[40, 1, 1, 4] + [1] * 19)
    served = serve(alone_plan(microbatches=2), arrivals, rows=2)

    assert served.busy_us[0] < RUN_US * (40 + 12)


def test_times_to_and_between_tokens() -> None:
    """A request of five tokens that comes at once has the first after one run and one each run after that."""
    found = measured(serve(alone_plan(), at_us(0.0, outputs=[5])))

    assert found["ttft"][0] == pytest.approx(RUN_US * 1e-6)
    assert found["tpot"][0] == pytest.approx(RUN_US * 1e-6)
    assert found["normalised"][0] == pytest.approx(RUN_US * 1e-6)


def test_a_prefill_gives_the_first_token() -> None:
    """With a prefill in the unit, the first token comes with it and an answer of three takes two decodes."""
    plan = stateful_plan()
    requests = load_of(plan.unit, at_us(0.0, outputs=[3]), 1)

    assert (3, 2) == (requests.tokens[0], requests.decodes[0])
    served = serve(plan, at_us(0.0, outputs=[3]))
    assert served.ledger.first_us[0] < served.ledger.done_us[0]


def test_a_short_prompt_takes_a_share_of_the_prefill() -> None:
    """Half the prompt tokens of the captured prefill take half its time (modelled)."""
    plan = make_plan([make_trace([[(0, 0, 64, "w")]], kind="prefill"), make_chain(1)], [[[0], [0]]])
    whole, half = (
        serve(plan, Arrivals("made", (0.0,), (tokens,), (1,))).ledger.done_us[0] for tokens in (8, 4)
    )

    assert (10.0, 5.0) == (whole, half)


def test_the_same_seed_gives_the_same_run() -> None:
    """Arrivals and lengths are drawn from the seed alone."""
    runs = [
        serve(split_plan(), make_arrivals("bursty:9000", 200, seed, "geometric:4,4"), 2) for seed in (1, 1, 2)
    ]

    assert runs[0].ledger == runs[1].ledger
    assert runs[0].ledger != runs[2].ledger


def test_links_of_one_group_are_shared_while_serving() -> None:
    """Wire time on a slow link bounds the rate: requests queue on the bus, first come first served."""
    plan = make_plan([make_chain(2, 100_000)], [[[0, 1]]], cluster=make_cluster(gbps=1.0), microbatches=4)
    served = serve(plan, at_us(*[0.0] * 50))

    assert served.duration_us == pytest.approx(50 * 100.0, rel=0.02)
    assert served.busy_us[2] == pytest.approx(50 * 100.0)


def test_requests_beyond_the_queue_are_turned_away() -> None:
    """With room for three to wait, what comes then is refused and counted, and the rest is served."""
    served = serve(alone_plan(1), at_us(*[0.0] * 10), max_waiting=3)

    assert 7 == served.ledger.num_refused
    assert 3 == sum(done >= 0.0 for done in served.ledger.done_us)
