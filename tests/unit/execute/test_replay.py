"""Replay: any order of a trace's launches, on shared and on renamed memory."""

import dataclasses
import functools
import random

import pytest
import torch

import slices_model
from tessera.analyze import build_graph
from tessera.capture import record
from tessera.cli.trials import Trials, edge_pairs, legal_order, value_pairs
from tessera.errors import MismatchError, WorkerError
from tessera.execute.reference import POISON, InOrder, Replay, differing, differing_buffers
from tessera.ir import Graph, Hazard, Kernel, Origin, Step
from tessera.kernels.tensors import same_bits

STEP = Step("slices_model:step", "decode", 1, 1)


@functools.cache
def graph() -> Graph:
    """The graph of the hand-written step."""
    return build_graph(record(slices_model.step(STEP)))


def replay(of: Graph) -> Replay:
    """A replay of the request that was recorded."""
    workload = slices_model.step(STEP)
    return Replay(of.trace, workload.weights(), workload.make_inputs(0), workload.make_state(0))


def launch_of(name: str, number: int = 0) -> int:
    """The number-th launch of a kernel."""
    trace = graph().trace
    return [i for i in range(len(trace.launches)) if name in trace.kernel_of(i).name][number]


def without_edges(dropped: Hazard) -> Graph:
    """The graph as a wrong analysis would give it."""
    return dataclasses.replace(graph(), edges=tuple(e for e in graph().edges if e.hazard is not dropped))


def test_program_order_gives_what_the_model_gives() -> None:
    """Outputs and state equal the model's own run bit for bit."""
    workload = slices_model.step(STEP)
    state = workload.make_state(0)
    outputs = workload.run(workload.make_inputs(0), state)
    found = replay(graph()).run_in_program_order()

    assert all(same_bits(outputs[name], found.outputs[name]) for name in outputs)
    assert same_bits(state["kept"], found.state["kept"])


def test_launches_in_order_give_what_the_model_gives() -> None:
    """What divided runs on GPUs are compared with: outputs, and state that it changes in place."""
    workload = slices_model.step(STEP)
    wanted_state, state = workload.make_state(0), dict(workload.make_state(0))
    wanted = workload.run(workload.make_inputs(0), wanted_state)
    run = InOrder([graph().trace], workload.weights(), torch.device("cpu"))
    found = run(0, workload.make_inputs(0), state)

    assert all(same_bits(wanted[name], found[name]) for name in wanted)
    assert same_bits(wanted_state["kept"], state["kept"])


def test_legal_orders_agree_on_shared_memory() -> None:
    """Thirty random orders along the edges leave the same outputs, state and memory."""
    runs, rng = replay(graph()), random.Random(0)
    first = runs.run_in_program_order()
    for number in range(30):
        found = runs.run(legal_order(len(graph().trace.launches), edge_pairs(graph()), rng, number))

        assert [] == differing(first, found)
        assert set() == differing_buffers(first, found)


def test_orders_of_versions_agree_on_renamed_memory() -> None:
    """Makers before readers is enough where every version has its own memory."""
    runs, rng = replay(graph()), random.Random(0)
    first = runs.run_in_program_order()
    for number in range(30):
        order = legal_order(len(graph().trace.launches), value_pairs(graph()), rng, number)

        assert [] == differing(first, runs.run_renamed(order, graph().values))


def test_an_order_of_versions_is_wrong_on_shared_memory() -> None:
    """WAR and WAW matter as soon as memory is shared: the two kinds of memory are not the same test."""
    runs, rng = replay(graph()), random.Random(0)
    first = runs.run_in_program_order()
    orders = [legal_order(len(graph().trace.launches), value_pairs(graph()), rng, n) for n in range(10)]

    assert any(differing(first, runs.run(order)) for order in orders)


def test_a_version_read_before_it_is_made_is_wrong_on_renamed_memory() -> None:
    """The renamed replay can fail: the reader sees nothing but poison."""
    runs = replay(graph())
    num = len(graph().trace.launches)
    late = launch_of("mul")
    order = [i for i in range(num) if i != late] + [late]

    assert differing(runs.run_in_program_order(), runs.run_renamed(order, graph().values))


def test_runs_do_not_leak_into_each_other() -> None:
    """State, inputs and temporaries are as before the first launch at the start of every run."""
    runs = replay(graph())
    first, again = runs.run_in_program_order(), runs.run_in_program_order()

    assert [] == differing(first, again)
    assert set() == differing_buffers(first, again)


def test_the_caller_keeps_its_state() -> None:
    """A replay works on copies of what it was given."""
    workload = slices_model.step(STEP)
    state = workload.make_state(0)
    Replay(graph().trace, {}, workload.make_inputs(0), state).run_in_program_order()

    assert same_bits(workload.make_state(0)["kept"], state["kept"])


def test_memory_that_nobody_wrote_is_poisoned() -> None:
    """A launch that runs too early reads the same wrong values every time."""
    found = replay(graph()).run([])

    assert {POISON} == {b for tensor in found.memory.values() for b in tensor.tolist()}


def test_what_empty_returns_is_poisoned() -> None:
    """Uninitialised memory is wrong by rule, not by luck."""
    made = launch_of("empty")
    found = replay(graph()).run([made, made])
    view = graph().trace.launches[made].outputs[0]
    assert view is not None

    assert {POISON} == set(found.memory[view.buffer].tolist())


@pytest.mark.parametrize("hazard", list(Hazard))
def test_the_check_fails_for_a_graph_without_a_class_of_edges(hazard: Hazard) -> None:
    """Were the analysis to miss a class, some order that it calls legal would come out different."""
    found = Trials(without_edges(hazard), 30, 0, lambda what: None).legal()

    assert found.equal < found.orders


def test_every_class_of_the_slices_is_shown_necessary() -> None:
    """The hand-written step has all three, and none is implied."""
    trials = Trials(graph(), 10, 0, lambda what: None)
    trials.legal()

    assert {"RAW": "yes", "WAR": "yes", "WAW": "yes"} == {
        trial.hazard: trial.necessary.value for trial in trials.classes()
    }


def test_a_launch_that_raises_on_garbage_counts_as_different() -> None:
    """An index out of range is a wrong result, not a crash."""

    def call(inputs: slices_model.Tensors, state: slices_model.Tensors) -> dict[str, torch.Tensor]:
        return {"y": inputs["x"][inputs["x"].argmax(1)]}

    workload = dataclasses.replace(slices_model.step(STEP), call=call)
    runs = Replay(record(workload), {}, workload.make_inputs(0), workload.make_state(0))

    with pytest.raises(IndexError):
        runs.run([1, 0])


def test_missing_state_is_a_mismatch() -> None:
    """A trace of another model is refused by the name of what is missing."""
    with pytest.raises(MismatchError, match="no state 'kept'"):
        Replay(graph().trace, {}, {"x": torch.zeros(8, 8)}, {})


def test_state_of_another_size_is_a_mismatch() -> None:
    """Both sizes are named."""
    with pytest.raises(MismatchError, match="4 bytes, but 256 in the trace"):
        Replay(graph().trace, {}, {"x": torch.zeros(8, 8)}, {"kept": torch.zeros(1)})


def test_a_kernel_that_is_no_operator_is_refused() -> None:
    """A PTX launch cannot be replayed on a CPU."""
    trace = graph().trace
    foreign = dataclasses.replace(trace, kernels=tuple(Kernel(k.name, Origin.PTX) for k in trace.kernels))

    with pytest.raises(WorkerError, match="is not an operator"):
        replay(dataclasses.replace(graph(), trace=foreign)).run_in_program_order()


def test_an_operator_that_the_cpu_lacks_is_named() -> None:
    """The launch, the operator and what to do instead."""
    trace = graph().trace
    kernels = tuple(
        dataclasses.replace(k, name="aten._cudnn_init_dropout_state.default") for k in trace.kernels
    )
    launches = tuple(dataclasses.replace(x, args=(0.0, False, 0), kwargs=()) for x in trace.launches)
    foreign = dataclasses.replace(trace, kernels=kernels, launches=launches)

    with pytest.raises(WorkerError, match="cannot be run on this machine's CPU"):
        replay(dataclasses.replace(graph(), trace=foreign)).run_in_program_order()
