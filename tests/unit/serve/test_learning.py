"""A service that learns the lengths of its requests: planned in another process, adopted while it answers."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

import steps_factory
from own_code import reference
from serving_factory import GREEDY, Told, policies_of, read, until, wait_for
from steps_factory import built
from tessera.adapt import history
from tessera.adapt.drift import Factors
from tessera.errors import PlanInfeasible, TesseraError
from tessera.ir import Load
from tessera.serve import background
from tessera.serve.background import PlannerProcess
from tessera.serve.policies import ServicePlanner
from tessera.serve.records import Ask
from tessera.serve.service import Service
from tessera.serve.text import ByteText

LIMIT_S = 120.0
# Between requests of a client: others have the processor meanwhile.
PAUSE_S = 0.1
ASKS = [Ask(tuple(range(5, 8 + number % 3)), 27, GREEDY, ignores_end=True) for number in range(6)]


def planner_of_single() -> ServicePlanner:
    """Its service runs on one device, but data-parallel is allowed."""
    made = steps_factory.prepared("tiny-llama", "single")
    assert made.planner is not None
    return replace(made.planner, names=("data-parallel",))


@pytest.fixture(scope="module")
def process() -> Iterator[PlannerProcess]:
    with closing(PlannerProcess(planner_of_single())) as process:
        yield process


def test_another_process_plans_and_names_what_both_have(process: PlannerProcess) -> None:
    """The same plans come back as the same objects; errors come back as they were raised."""
    made = steps_factory.prepared("tiny-llama", "single")
    (same,), (rate,) = process.replan(made.policies, Factors({}))
    (other,), _ = process.replan(made.policies, Load(4, 28))

    assert same.plans[0].unit.graphs[0] is made.policies[0].plans[0].unit.graphs[0]
    assert ("data-parallel", Load(4, 28)) == (other.policy, other.load)
    assert other.expected is not None
    assert "single" == rate.name
    with pytest.raises(PlanInfeasible, match="no device is left"):
        process.replan(made.policies, frozenset(planner_of_single().cluster.names))


def test_costs_are_corrected_for_the_load_that_was_learned() -> None:
    """And not for the one at the start: rates of the two differ."""
    made = steps_factory.prepared("tiny-llama", "single")
    assert made.planner is not None
    (learned,) = made.planner.replan(made.policies, Load(4, 28)).plans
    (corrected,) = made.planner.replan((learned,), Factors({})).plans

    assert learned.expected == corrected.expected


def test_where_no_process_can_start_the_plans_stay(
    process: PlannerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service at its limit of open files says so; its thread goes on."""

    def refused(*what: object) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(background, "LocalProcess", refused)
    with pytest.raises(TesseraError, match=r"no planning process can be started \(Too many open files\)"):
        process.replan(steps_factory.prepared("tiny-llama", "single").policies, Factors({}))


def test_a_plan_that_takes_too_long_is_given_up(
    process: PlannerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its process ended; the next job has another one."""
    made = steps_factory.prepared("tiny-llama", "single")
    monkeypatch.setattr(background, "LIMIT_S", 0.0)
    with pytest.raises(TesseraError, match="took more than 0 s"):
        process.replan(made.policies, Factors({}))
    monkeypatch.undo()

    assert not process._processes
    assert len(process.replan(made.policies, Factors({})).plans) == 1


def test_lengths_are_learned_and_better_groups_adopted_while_requests_run(
    process: PlannerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers stay right."""
    monkeypatch.setattr(history, "MIN_REQUESTS", 8)
    made = steps_factory.prepared("tiny-llama", "single")
    model = built(made)
    with (
        reference(model, 1) as alone,
        Service(alone, policies_of(alone, model.shape), model.shape, ByteText()) as service,
    ):
        own = [wait_for(read(service, ask), LIMIT_S).numbers for ask in ASKS]

    async def load(service: Service) -> list[tuple[int, Told]]:
        found: list[tuple[int, Told]] = []

        async def client(number: int) -> None:
            while service.policy == "single" or len(found) < 24:
                found.append((number, await read(service, ASKS[number])))
                await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(client(number) for number in range(len(ASKS))))
        return found

    begun_s = time.monotonic()
    with (
        made.workers() as stepper,
        Service(
            stepper, made.policies, model.shape, ByteText(), planner=process, log=lambda line: None
        ) as service,
    ):
        found = wait_for(load(service), LIMIT_S)
        until(lambda: service.snapshot().last_switch_ms is not None)
        snapshot = service.snapshot()

    assert all(told.numbers == own[number] for number, told in found)
    assert ("data-parallel",) == snapshot.policies
    assert {"emu:a100", "emu:l40s"} == {name for group in snapshot.groups for name in group.devices}
    assert snapshot.load.output_tokens is not None
    assert (27.0, 27) == (snapshot.load.output_tokens.mean, snapshot.load.planned_output_tokens)
    assert {"replan", "adopt"} <= {decision.kind.value for decision in snapshot.decisions}
    assert time.monotonic() - begun_s < LIMIT_S
