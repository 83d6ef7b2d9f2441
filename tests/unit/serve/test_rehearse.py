"""Plans served in virtual time: what a service reaches, against what the plan says of itself."""

import functools

from tessera.capture import record
from tessera.flow import make_plan, make_unit, price
from tessera.ir import Objective, Plan, WorkUnit
from tessera.plan import QUICK
from tessera.profile import make_cluster, parse_devices
from tessera.serve.planning import counts_of
from tessera.serve.records import Average, ServeSpec
from tessera.serve.rehearse import best_served, rehearse
from tessera.serve.steps import ServedModel, served

AVERAGE = Average(prompt=16, output=8)
ROWS = 4


@functools.cache
def model(microbatches: int) -> ServedModel:
    """The tiny Llama."""
    return served(
        "tiny-llama", ServeSpec(microbatches=microbatches, rows=ROWS, capacity=32, max_batch_tokens=8)
    )


@functools.cache
def unit() -> WorkUnit:
    """Its steps, as often as four average requests need them."""
    return make_unit([record(w) for w in model(1).workloads], counts_of(model(1).shape, AVERAGE))


@functools.cache
def plan(policy: str, microbatches: int, devices: str = "emu:a100,emu:l40s") -> Plan:
    """One policy for so many microbatches."""
    cluster = make_cluster(parse_devices(devices), "pcie4")
    costs = price(unit(), cluster)
    return make_plan(unit(), costs, cluster, Objective.THROUGHPUT, microbatches, policy, search=QUICK)


def tokens_per_s(policy: str, microbatches: int, devices: str = "emu:a100,emu:l40s") -> float:
    """Of a service."""
    (rate,) = rehearse([plan(policy, microbatches, devices)], model(microbatches).shape, AVERAGE)
    return rate


def predicted(made: Plan) -> float:
    """What the plan says of itself, in tokens."""
    return made.throughput_per_s * ROWS * AVERAGE.output


def test_one_device_is_served_at_nearly_the_plans_own_rate() -> None:
    """Prompts and answers share steps, which the plan counts one by one."""
    found = tokens_per_s("single", 2, "emu:a100")

    assert 0.75 < found / predicted(plan("single", 2, "emu:a100")) <= 1.25


def test_two_devices_side_by_side_serve_more_than_one() -> None:
    """Requests that stay on one device each add up."""
    assert tokens_per_s("data-parallel", 4) > 1.3 * tokens_per_s("single", 4)


def test_a_divided_plan_needs_microbatches() -> None:
    """With one the devices wait for one another, which the plan's own figure does not know."""
    one, many = (tokens_per_s("layer-pipeline", microbatches) for microbatches in (1, 6))

    assert many > 1.2 * one
    assert one < 0.9 * predicted(plan("layer-pipeline", 6))


def test_the_best_plan_is_kept() -> None:
    """The first stays unless another is clearly better, and every rate is told."""
    single, parallel = plan("single", 4), plan("data-parallel", 4)
    shape = model(4).shape

    best, rates = best_served([single, parallel], shape, AVERAGE)
    assert best is parallel
    assert {"single", "data-parallel"} == set(rates)
    assert best_served([parallel, single], shape, AVERAGE)[0] is parallel


def test_one_client_is_served_by_one_lane() -> None:
    """With nobody beside it, a request gets less than the service gives to many."""
    found = plan("data-parallel", 4)
    (alone,), (many,) = (rehearse([found], model(4).shape, AVERAGE, clients) for clients in (1, None))

    assert 0.0 < alone < many
