"""Coarse policies and their registry."""

import numpy as np
import pytest

from plan_factories import (
    Draft,
    MiB,
    chain,
    layered,
    layered_case,
    make_cluster,
    make_costs,
    make_unit,
)
from tessera import ir
from tessera.errors import UnknownName
from tessera.plan.baselines import COARSE
from tessera.plan.constraints import attention_launches, layers_of
from tessera.plan.problem import Mix, build
from tessera.plan.search.task import Task
from tessera.plan.solve import PLANNERS, planner_named


def task_of(num_layers: int = 4) -> Task:
    """A decoder on two unlike devices."""
    return Task(build(*layered_case(num_layers)), 4)


def mixes_of(task: Task, name: str) -> tuple[Mix, ...]:
    """Mixes of a policy that applies."""
    found = planner_named(name)(task)
    assert found is not None
    return found


def plain_task(num_devices: int = 2) -> Task:
    """A chain without scopes, state or phases."""
    unit, cluster = make_unit(chain(4)), make_cluster(num_devices)
    rows = [[[10.0 + d for d in range(num_devices)]] * 4]
    return Task(build(unit, make_costs(unit, cluster, rows), cluster), 4)


def test_unknown_policy_is_answered_with_the_known_ones() -> None:
    """A wrong name lists the right ones."""
    with pytest.raises(UnknownName, match=r"unknown policy 'trouhgput'; known: .*layer-pipeline.*throughput"):
        planner_named("trouhgput")


def test_every_coarse_policy_is_registered() -> None:
    """Baselines come from the same registry as planners."""
    assert {*COARSE, "throughput", "latency", "cost", "energy"} <= set(PLANNERS)


def test_data_parallel_shares_are_in_proportion_to_speed() -> None:
    """Replicas are both fully busy."""
    (mix,) = mixes_of(task_of(), "data-parallel")

    assert mix.busy_us[0] == pytest.approx(mix.busy_us[1])
    assert 0.0 == mix.num_messages


def test_prefill_decode_puts_each_phase_on_one_device() -> None:
    """Both orientations, prefill wholly here and decode wholly there."""
    task = task_of()
    mixes = mixes_of(task, "prefill-decode")

    placed = [task.problem.placement(m.columns[0].labels).devices for m in mixes]
    assert {(0, 1), (1, 0)} == {(*set(prefill), *set(decode)) for prefill, decode in placed}


def test_fractional_split_is_no_worse_than_strict_split_and_replicas() -> None:
    """The mix of all four assignments contains both."""
    task = task_of()
    mix, *_ = mixes_of(task, "prefill-decode-fractional")
    others = [*mixes_of(task, "prefill-decode"), *mixes_of(task, "data-parallel")]

    assert mix.rate_per_s >= max(m.rate_per_s for m in others) * (1 - 1e-9)


def test_attention_scopes_follow_the_state() -> None:
    """Launches below the module that touches the cache are attention, and nothing else is."""
    unit = layered(3)
    marks = attention_launches(unit)

    assert marks is not None
    for graph, marked in zip(unit.graphs, marks, strict=True):
        assert [".attn" in x.scope for x in graph.trace.launches] == marked.tolist()


def test_state_that_all_layers_share_does_not_make_everything_attention() -> None:
    """The inner ones of nested scopes count."""
    draft = Draft(
        4,
        states={"kv": ((1,), 8), "position": ((0, 1, 3), 8)},
        scopes=["model.layers.0.norm", "model.layers.0.attn", "model.layers.0.mlp", "model.layers.1.mlp"],
    )
    marks = attention_launches(make_unit(draft))

    assert marks is not None
    assert [False, True, False, False] == marks[0].tolist()


def test_attention_kernels_mark_their_scope() -> None:
    """A step without state still has attention if it runs an attention kernel."""
    names = ["aten.mm.default", "aten._scaled_dot_product_attention.default", "aten.mm.default"]
    draft = Draft(3, names=names, scopes=["blocks.0.attn.q", "blocks.0.attn", "blocks.0.mlp"], kind="encode")
    marks = attention_launches(make_unit(draft))

    assert marks is not None
    assert [True, True, False] == marks[0].tolist()


def test_attention_ffn_separates_attention_from_the_rest() -> None:
    """One device runs all attention launches and no other."""
    task = task_of()
    marks = attention_launches(task.problem.unit)
    assert marks is not None
    for mix in mixes_of(task, "attention-ffn"):
        placed = task.problem.placement(mix.columns[0].labels).devices
        for devices, marked in zip(placed, marks, strict=True):
            assert 1 == len({d for d, m in zip(devices, marked, strict=True) if m})
            assert 1 == len({d for d, m in zip(devices, marked, strict=True) if not m})


def test_layer_pipeline_splits_both_steps_at_the_same_layer() -> None:
    """Layers are contiguous, and a layer's device is the same in prefill and decode."""
    task = task_of(6)
    found = layers_of(task.problem.unit)
    assert found is not None
    for mix in mixes_of(task, "layer-pipeline"):
        placed = task.problem.placement(mix.columns[0].labels).devices
        homes = [
            {int(layer): device for layer, device in zip(rank, devices, strict=True)}
            for rank, devices in zip(found[0], placed, strict=True)
        ]
        assert homes[0] == homes[1]
        assert 1 == int(np.abs(np.diff([homes[0][x] for x in range(6)])).sum())


def test_layer_pipeline_takes_the_best_split() -> None:
    """No other split point of two stages has a shorter period."""
    task = Task(build(*layered_case(5, gbps=2.0)), 4)
    assert task.problem.layer_of_node is not None
    layer, num = task.problem.layer_of_node
    labels = [np.where(layer < cut, a, 1 - a) for cut in range(1, num) for a in (0, 1)]
    periods = [float(task.problem.column(x).busy_us.max()) for x in labels]

    assert 1e6 / min(periods) == pytest.approx(mixes_of(task, "layer-pipeline")[0].rate_per_s)


def test_layer_pipeline_over_three_devices_balances_them() -> None:
    """Six equal layers on three equal devices are two each."""
    unit = layered(6, ("decode",), (1,))
    cluster = make_cluster(3)
    rows = [[[10.0] * 3] * len(unit.graphs[0].trace.launches)]
    task = Task(build(unit, make_costs(unit, cluster, rows), cluster), 4)
    busy = mixes_of(task, "layer-pipeline")[0].busy_us[:3]

    assert [120.0] * 3 == busy.tolist()


def test_layer_pipeline_respects_memory() -> None:
    """A small device gets only the layers that it can hold."""
    per_layer = 4 * 16 * MiB + 8 * MiB
    task = Task(build(*layered_case(4, memory=[per_layer + 24 * MiB, 100 * per_layer])), 1)
    mix = mixes_of(task, "layer-pipeline")[0]

    assert task.problem.fits(mix.columns, 1)
    assert 1 == len({*np.unique(np.flatnonzero(mix.columns[0].labels[:24] == 0) // 6)})


@pytest.mark.parametrize(
    "name", ["prefill-decode", "prefill-decode-fractional", "attention-ffn", "layer-pipeline"]
)
def test_policy_that_does_not_apply_says_so(name: str) -> None:
    """Work without phases, attention or layers has no such split."""
    assert planner_named(name)(plain_task()) is None


@pytest.mark.parametrize("name", [n for n in COARSE if n not in ("single", "data-parallel")])
def test_one_device_has_no_splits(name: str) -> None:
    """Splits need two devices."""
    unit, cluster = layered(2), make_cluster(1)
    rows = [[[10.0]] * len(g.trace.launches) for g in unit.graphs]
    task = Task(build(unit, make_costs(unit, cluster, rows), cluster), 4)

    assert planner_named(name)(task) is None


def test_immovable_launches_rule_out_a_strict_phase_split() -> None:
    """Launches of both phases that must stay together cannot be split by phase."""
    unit = make_unit(Draft(2, immovable=[0], kind="prefill"), Draft(2, immovable=[1], kind="decode"))
    cluster = make_cluster()
    costs = make_costs(unit, cluster, [[[1.0, 1.0]] * 2] * 2)

    assert planner_named("prefill-decode")(Task(build(unit, costs, cluster), 4)) is None


def test_step_kinds_are_those_of_the_trace() -> None:
    """The made-up decoder has the phases that the policies look for."""
    assert ["prefill", "decode"] == [g.trace.step.kind for g in layered(2).graphs]
    assert isinstance(layered(2), ir.WorkUnit)


def test_a_faster_placement_with_fewer_requests_in_flight_does_not_hide_one_that_holds_all() -> None:
    """Where all must be held, the best cuts are among those that hold them."""
    case = layered_case(8)
    free = build(*case)
    column = mixes_of(Task(free, 4), "layer-pipeline")[0].columns[0]
    weights, (each,) = free.footprints((column,))
    # The balanced cut holds three; a cut nearer the roomy card holds four.
    memory = [int((weights + 3.5 * each)[0]), 1 << 40]
    problem = build(*layered_case(8, memory=memory))
    some, every = (mixes_of(Task(problem, 4, fewest=n), "layer-pipeline") for n in (1, 4))

    assert all(sum(mix.microbatches) == 3 for mix in some)
    assert all(not mix.microbatches for mix in every)
