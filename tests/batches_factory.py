"""The same made-up work at several batches, and plans with lanes of unlike batches."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plan_factories import Draft, Named, make_cluster, make_costs, make_unit
from tessera import ir

MB = 1 << 20


def at_batch(unit: ir.WorkUnit, batch: int) -> ir.WorkUnit:
    """The unit as if it had been captured at another batch."""
    graphs = (
        replace(g, trace=replace(g.trace, step=replace(g.trace.step, batch=batch))) for g in unit.graphs
    )
    return replace(unit, graphs=tuple(graphs))


def random_variants(
    seed: int, batches: Sequence[int] = (2, 3), num: int = 5
) -> tuple[list[ir.Variant], ir.Cluster]:
    """A small random graph whose costs grow with the batch, unlike from launch to launch."""
    rng = np.random.default_rng(seed)
    flows = [
        (i, tuple(sorted({i + 1, int(rng.integers(i + 1, num))})), int(rng.integers(1, 200_000)))
        for i in range(num - 1)
    ]
    unit = make_unit(Draft(num, flows))
    cluster = make_cluster(2, gbps=float(rng.uniform(5, 50)), latency_us=1.0)
    fixed, per_row = rng.uniform(1, 40, (2, num, 2))
    found = []
    for batch in batches:
        own = at_batch(unit, batch)
        found.append(ir.Variant(own, make_costs(own, cluster, [(fixed + batch * per_row).tolist()])))
    return found, cluster


def unlike_memory(
    batches: Sequence[int] = (2, 8), microbatches: int = 4, large: int = 4096, rel_error: float = 0.0
) -> tuple[list[ir.Variant], ir.Cluster]:
    """Two devices far apart; a row's state is 16 MB, and the second device holds six rows of it at most.

    A launch takes 100 us and 5 us a row on either, so that large batches pay.
    """
    memory = (large * MB, (64 + 16 * 2 * min(microbatches, 3) + 8) * MB)
    cluster = make_cluster(2, gbps=0.1, latency_us=20_000.0, memory=memory)
    found = []
    for batch in batches:
        states: Named = {"kv": ((0, 1, 2), 16 * batch * MB)}
        unit = make_unit(Draft(4, [(i, (i + 1,), MB) for i in range(3)], states, {"w": ((0, 3), 64 * MB)}))
        own = at_batch(unit, batch)
        us = [[[100.0 + 5.0 * batch] * 2] * 4]
        found.append(ir.Variant(own, make_costs(own, cluster, us, rel_error)))
    return found, cluster


def mixed_plan(microbatches: int = 4) -> ir.Plan:
    """Each device by itself, the first at batch 8 and the second at batch 2; rates count batch 8."""
    (small, big), cluster = unlike_memory(microbatches=microbatches)
    lanes = (
        ir.Lane(ir.Placement(((0,) * 4,)), 1e6 / 560, 0),
        ir.Lane(ir.Placement(((1,) * 4,)), 1e6 / 440, 1),
    )
    rate = lanes[0].rate_per_s + lanes[1].rate_per_s / 4
    figures = (rate, rate, rate, 500.0)
    plan = ir.Plan(
        big.unit,
        cluster,
        big.costs,
        ir.Objective.THROUGHPUT,
        "made",
        lanes,
        microbatches,
        *figures,
        variants=(small,),
    )
    ir.verify(plan)
    return plan
