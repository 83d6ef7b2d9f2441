"""Workers that call the engine, as from other machines: lost ones are done without."""

import multiprocessing
import os
import random
import signal

import engine_factory as made
from tessera.execute import Engine
from tessera.execute.calling import serve_and_exit
from tessera.execute.gate import Gate
from tessera.execute.handshake import LOOPBACK_SECRET, Call
from tessera.execute.remote import RemoteHub, start_here
from tessera.execute.setups import setups_of


def test_a_lost_machine_costs_no_request() -> None:
    """Its requests are finished on the lane that avoids it, with the same bits, and one message names it."""
    rng = random.Random(0)
    plan = made.plan_of([made.scattered(rng, [0]), made.scattered(rng, [0, 1])], 2)
    weights = made.workloads()[0].weights()
    gate = Gate("127.0.0.1", 0, LOOPBACK_SECRET)
    call = Call(gate.address, LOOPBACK_SECRET, "the same plan")
    context = multiprocessing.get_context("forkserver")
    arguments = (setups_of([plan], weights)[1], 2, call)
    other = context.Process(target=serve_and_exit, args=arguments, daemon=True)
    other.start()
    assert other.pid is not None
    victim, done = other.pid, 0

    def kill_at_five(number: int) -> None:
        nonlocal done
        done += 1
        if done == 5:
            os.kill(victim, signal.SIGKILL)

    names = plan.cluster.names
    starters = {0: start_here(call)}
    hub = lambda setups: RemoteHub(names, setups, gate, call.digest, starters)  # noqa: E731
    with Engine(plan, weights, hub=hub) as engine:
        assert {0, 1} == {r.lane for r in engine.run(made.make_requests(4))}
        results = engine.run(made.make_requests(12), kill_at_five)
        again = engine.run(made.make_requests(3))
    other.join()

    assert all(made.is_right(i, r) for i, r in enumerate(results))
    assert {0} == {r.lane for r in again}
    assert ["device d1"] == [fault.place for fault in engine.faults]
