"""Why a plan is what it is."""

import pytest

from plan_factories import chain, layered_case, make_cluster, make_costs, make_unit
from tessera import ir
from tessera.plan import PlanConfig, explain, latency_bound_us, solve

THROUGHPUT = PlanConfig(ir.Objective.THROUGHPUT)


def test_bottleneck_is_fully_busy() -> None:
    """At the plan's rate the busiest device or link has no time left, and none has less than none."""
    found = explain(solve(*layered_case(), THROUGHPUT))
    usages = (*found.devices, *found.links)

    assert 1.0 == pytest.approx(max(u.utilisation for u in usages))
    assert found.bottleneck in {u.name for u in usages}
    assert {"d0 -> d1", "d1 -> d0"} == {u.name for u in found.links}


def test_kernels_are_summed_over_layers() -> None:
    """One row per kernel and kind of module, with its cost on both devices and where it runs."""
    found = explain(solve(*layered_case(4), THROUGHPUT))
    up = next(k for k in found.kernels if k.kernel == "up")

    assert "model.layers.*.mlp.up" == up.scope
    assert 4 * (1 + 8) == up.num_runs
    assert (4 * (500 + 8 * 45), 4 * (300 + 8 * 30)) == pytest.approx(up.us)
    assert 1.0 == pytest.approx(sum(up.share))
    assert 6 == len(found.kernels)


def test_gain_above_the_error_is_a_gain() -> None:
    """With exact costs, a better plan is called better than the best coarse policy by name."""
    found = explain(solve(*layered_case(rel_error=0.01), THROUGHPUT))

    assert "No gain" not in found.verdict
    assert "the best coarser policy, attention-ffn" in found.verdict


def test_gain_below_the_error_is_no_gain() -> None:
    """With costs that may be half wrong, the same plan is not sold as a gain."""
    found = explain(solve(*layered_case(rel_error=0.5), THROUGHPUT))

    assert "No gain" in found.verdict
    assert found.verdict.startswith("No gain: use attention-ffn.")


def test_equal_devices_are_told_to_use_replicas() -> None:
    """Where nothing is gained the simplest way is named."""
    unit, cluster = make_unit(chain(6)), make_cluster()
    found = explain(solve(unit, make_costs(unit, cluster, [[[10.0, 10.0]] * 6]), cluster, THROUGHPUT))

    assert found.verdict.startswith("No gain: use data-parallel.")


def test_error_is_shared_within_a_kernel_and_independent_between() -> None:
    """Six kernels of like weight and 10 % error each leave less than 10 % and more than 10 % / 6."""
    found = explain(solve(*layered_case(rel_error=0.1), THROUGHPUT))

    assert 0.1 / 6 < found.error < 0.1


def test_transfers_are_counted() -> None:
    """A plan of replicas moves nothing; a kernel-level plan of unlike devices moves bytes."""
    replicas = explain(solve(*layered_case(), PlanConfig(ir.Objective.THROUGHPUT, policy="data-parallel")))
    kernels = explain(solve(*layered_case(), THROUGHPUT))

    assert 0.0 == replicas.num_transfers == replicas.transfer_bytes
    assert kernels.num_transfers > 0
    assert kernels.transfer_bytes > 0


def test_latency_plan_is_explained_by_latency() -> None:
    """Gains of a latency plan compare one request's time, and its bound is below its time."""
    plan = solve(*layered_case(), PlanConfig(ir.Objective.LATENCY))
    found = explain(plan)

    assert "as fast for one request as" in found.verdict
    assert latency_bound_us(plan) <= plan.latency_us
