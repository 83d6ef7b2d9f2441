"""What each worker is born with, made from the plans: by the engine, or by a worker elsewhere for itself."""

from collections.abc import Sequence

from tessera.execute.flight import Routes, Tensors
from tessera.execute.footprint import Footprint, footprints, ready_programs
from tessera.execute.worker import Setup
from tessera.ir import Plan


def setups_of(plans: Sequence[Plan], weights: Tensors, is_plain: bool = False) -> list[Setup]:
    """One a device, from the plans alone."""
    programs = [ready_programs(plan) for plan in plans]
    return make_setups(
        plans, Routes(plans, programs), footprints(plans, programs), weights, is_plain=is_plain
    )


def make_setups(
    plans: Sequence[Plan],
    routes: Routes,
    found: Sequence[Footprint],
    weights: Tensors,
    num_threads: int = 1,
    is_plain: bool = False,
) -> list[Setup]:
    """One a device, with the weights that some lane reads there."""
    traces = tuple(g.trace for g in plans[0].graphs)
    lanes = [route.programs for route in routes.all]
    setups = []
    for device, footprint in enumerate(found):
        names = {traces[p.step].buffers[b].name for lane in lanes for p in lane for b in p.weights[device]}
        own = {name: tensor for name, tensor in weights.items() if name in names}
        slots, size = footprint.slots, footprint.slot_bytes
        us = tuple(tuple(row[device].us for row in costs.costs) for costs in plans[0].prices)
        setups.append(Setup(device, traces, lanes, own, slots, size, num_threads, is_plain, us=us))
    return setups
