"""Crew: what an engine or a stepper needs of its plans: lanes, memory counted, and the way to the workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.execute import worker
from tessera.execute.flight import Routes, Tensors
from tessera.execute.footprint import Footprint, check_fits, footprints, ready_programs
from tessera.execute.hub import Hub, LocalHub
from tessera.execute.setups import make_setups
from tessera.execute.transport import check_name
from tessera.ir import Plan

# Makes the way to workers that are not processes of this machine.
MakeHub = Callable[[Sequence[worker.Setup]], Hub]


@dataclass(frozen=True)
class Crew:
    """Plans that are loaded together, ready to start."""

    plans: tuple[Plan, ...]
    routes: Routes
    footprints: tuple[Footprint, ...]
    hub: Hub


def make_crew(
    plans: Sequence[Plan],
    weights: Tensors,
    num_threads: int = 1,
    transport: str = "shm",
    is_plain: bool = False,
    method: str = "spawn",
    hub: MakeHub | None = None,
) -> Crew:
    """Lowers and checks the plans, counts memory, shares the weights; starts nothing."""
    check_name(transport)
    programs = [ready_programs(plan) for plan in plans]
    found = footprints(plans, programs)
    check_fits(plans, found)
    routes = Routes(plans, programs)
    shared = {name: tensor.detach().share_memory_() for name, tensor in weights.items()}
    setups = make_setups(plans, routes, found, shared, num_threads, is_plain)
    if hub is not None:
        return Crew(tuple(plans), routes, found, hub(setups))
    lanes = [route.programs for route in routes.all]
    local = LocalHub(plans[0].cluster.names, setups, lanes, transport, method)
    return Crew(tuple(plans), routes, found, local)
