"""Random numbers: a generator is state of the step, so draws keep their order and give the same numbers."""

import dataclasses
import functools
import json
import random
from pathlib import Path

import pytest
import torch

import tessera
from drawing_model import Sampler
from factories import make_cluster, make_plan
from models import random_placement
from tessera.analyze import build_graph
from tessera.capture import Workload, build, record_step
from tessera.cli import _main
from tessera.errors import CaptureError
from tessera.execute.offline import run_offline
from tessera.execute.reference import Replay, differing
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import UnitRequest, make_unit, run_reference
from tessera.ir import BufferKind, Region, Step, Trace, save
from tessera.kernels.tensors import same_bits

STEP = Step("drawing_model:step", "decode", 3, 4)


@functools.cache
def trace() -> Trace:
    """Four draws among other launches."""
    return record_step(STEP)


def workload() -> Workload:
    """The step, with its generator among the state."""
    return build(STEP).drawing(trace())


def draws(found: Trace) -> list[int]:
    """Launches that draw."""
    generators = {i for i, b in enumerate(found.buffers) if b.is_generator}
    return [i for i, x in enumerate(found.launches) if generators & {a.buffer for a in x.accesses}]


def without_order(found: Trace) -> Trace:
    """The trace as if a draw only read its generator, so that nothing orders the draws."""
    launches = tuple(
        dataclasses.replace(
            x,
            accesses=tuple(
                dataclasses.replace(a, write=False) if found.buffers[a.buffer].is_generator else a
                for a in x.accesses
            ),
        )
        for x in found.launches
    )
    return dataclasses.replace(found, launches=launches)


def test_a_draw_reads_and_writes_all_of_its_generator() -> None:
    """rand, bernoulli_ of a dropout, rand again and multinomial."""
    index = next(i for i, b in enumerate(trace().buffers) if b.is_generator)
    whole = Region(0, torch.get_rng_state().numel())
    found = [a for i in draws(trace()) for a in trace().launches[i].accesses if a.buffer == index]

    assert ("rng:cpu", BufferKind.STATE) == (trace().buffers[index].name, trace().buffers[index].kind)
    assert [(whole, True, True)] * 4 == [(a.region, a.read, a.write) for a in found]


def test_draws_are_ordered_and_share_a_home() -> None:
    """They are one group; a draw that takes no result of the one before waits for it all the same."""
    graph = build_graph(trace())
    dropout, rounding = draws(trace())[1:3]

    assert any(set(draws(trace())) <= set(group) for group in graph.groups)
    assert (dropout, rounding) in {(e.src, e.dst) for e in graph.edges}


def test_verify_holds_for_a_step_that_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs, counts and the generator itself are equal in every legal order."""
    save(trace(), tmp_path / "draws.trace")
    code = _main(["verify", str(tmp_path / "draws.trace"), "--orders", "6", "--json"])
    found = json.loads(capsys.readouterr().out)

    legal = found["legal"]
    assert (0, True, 6, 6) == (code, found["verified"], legal["equal"], legal["renamed_equal"])


def test_another_order_of_draws_gives_other_numbers() -> None:
    """Without the generator's edges a draw may run first of all, and then the result differs."""
    found = without_order(trace())
    mine = workload()
    replay = Replay(found, mine.weights(), mine.make_inputs(0), mine.make_state(0))
    early = draws(found)[2]  # takes no result of another launch
    order = [early, *(i for i in range(len(found.launches)) if i != early)]

    assert not [e for e in build_graph(found).edges if e.dst == early]
    assert differing(replay.run_in_program_order(), replay.run(order))


def test_scattered_draws_give_the_reference_bits() -> None:
    """On two workers, two lanes, two microbatches: tokens, counts and generator are those of one process."""
    graph = build_graph(trace())
    placements = [random_placement(graph, random.Random(seed), 2) for seed in range(2)]
    for home, placement in enumerate(placements):
        for launch in draws(trace()):
            placement[launch] = home
    plan = make_plan([trace()], [[p] for p in placements], [3], make_cluster(2))
    requests = [UnitRequest([workload()], workload().make_inputs(i), i) for i in range(4)]
    with WorkerStepper([plan], workload().weights()) as stepper:
        results = run_offline(stepper, requests).results
    for request, result in zip(requests, results, strict=True):
        wanted = run_reference(make_unit([trace()], [3]), request)
        assert all(
            same_bits(one[name], other[name])
            for one, other in zip(wanted.outputs, result.outputs, strict=True)
            for name in one
        )
        assert all(same_bits(t, result.state[name]) for name, t in wanted.state.items())


def test_requests_draw_their_own_numbers() -> None:
    """A request's generator is seeded with the request's seed."""
    states = [workload().make_state(seed)["rng:cpu"] for seed in (0, 1)]

    assert not torch.equal(*states)


def test_capture_leaves_the_programs_generator_alone() -> None:
    """Neither learning what a call does nor recording it draws from the caller's generator."""
    model = Sampler()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    tessera.capture(model, torch.ones(2, 16), torch.zeros(2, 12))

    assert torch.equal(before, torch.get_rng_state())


def test_a_fake_capture_names_the_generator_without_a_state() -> None:
    """The launches of a GPU's step, with the 16 bytes of a CUDA generator."""
    found = record_step(STEP, "fake")

    assert [("rng:cuda:0", 16)] == [(b.name, b.size_bytes) for b in found.buffers if b.is_generator]
    assert "fake" == found.recorded_on


def test_a_generator_of_its_own_is_refused_with_its_line() -> None:
    """Nothing says where another generator's state lives."""
    own = torch.Generator()

    with pytest.raises(CaptureError, match=r"test_draws\.py:\d+: aten\.rand.*generator of its own"):
        tessera.capture(lambda x: x + torch.rand(4, generator=own), torch.ones(4))


def test_a_step_that_seeds_as_its_program_did_is_refused() -> None:
    """The state at the capture is the one that the step sets; at the next call it is not."""

    def seeding(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return x + torch.rand(4)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        with pytest.raises(CaptureError, match="seeds the generator rng:cpu"):
            tessera.capture(seeding, torch.ones(4))


def test_a_step_that_seeds_its_generator_is_refused() -> None:
    """A seed is no launch: a replay would draw other numbers."""

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return x + torch.rand(4)

    with pytest.raises(CaptureError, match="seeds the generator rng:cpu"):
        tessera.capture(step, torch.ones(4))
