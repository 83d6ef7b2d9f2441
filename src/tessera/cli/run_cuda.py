"""What `tessera run` does more for plans with GPUs: the time scale, and what their results are compared with.

Compared with are the same launches, one by one, on the first device's GPU. Bits of unlike kinds of device are
not to be expected equal, so a plan over both is run and not compared.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.errors import MismatchError
from tessera.ir import DeviceKind, Plan, need_one_batch

if TYPE_CHECKING:
    from tessera.execute.offline import Request, RunResult
    from tessera.execute.stepper import Tensors


def has_gpus(plan: Plan) -> bool:
    """True if some device is a GPU's."""
    return any(d.kind is DeviceKind.CUDA for d in plan.cluster.devices)


def check_gpus(plan: Plan, is_verified: bool, place: str) -> None:
    """Raises MismatchError if this machine lacks a GPU of the plan, or the plan cannot be compared."""
    import torch

    need_one_batch(plan, "a run on GPUs", place)
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [d for d in plan.cluster.devices if d.kind is DeviceKind.CUDA]
    missing = [d.name for d in gpus if d.ordinal >= have]
    if missing:
        made_for = ",".join(plan.cluster.names)
        message = f"the plan was made for {made_for}; this machine cannot run {', '.join(missing)}"
        raise MismatchError(message, "Plan again for emu: devices.", place)
    if is_verified and len(gpus) < len(plan.cluster.devices):
        message = "GPUs and CPUs do not give the same bits, so this plan has nothing to be compared with"
        raise MismatchError(message, "Leave --verify out, or plan for cuda: devices only.", place)


def time_scale(plan: Plan, weights: "Tensors", request: "Request") -> float:
    """How many times longer than modelled everything takes on dilated devices; 1 where none is."""
    from tessera.execute.cuda.measure import scale_of

    return scale_of(plan, weights, request).factor


def in_order(plan: Plan, weights: "Tensors", requests: "Sequence[Request]") -> "list[RunResult]":
    """What the plan's launches give one by one on the first device's GPU."""
    from tessera.execute import driver
    from tessera.execute.cuda.graphs import refuse_generators
    from tessera.execute.cuda.measure import whole_plan
    from tessera.execute.offline import run_offline
    from tessera.execute.reference import InOrder, ReferenceStepper

    traces = [graph.trace for graph in plan.unit.graphs]
    for trace in traces:
        refuse_generators(trace)
    run = InOrder(traces, weights, driver.card(plan.cluster.devices[0].ordinal))
    with ReferenceStepper(whole_plan(plan.unit, plan.cluster, 0), run, dict) as stepper:
        return run_offline(stepper, requests).results
