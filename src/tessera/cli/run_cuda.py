"""tessera run for plans whose devices are GPUs of this machine, or parts of one: one process, CUDA graphs.

The timeline is that of a second, short run in which every launch is stamped. Compared with are the same
launches, undivided, on the first device's GPU. Not handled: traces whose kernels Inductor compiled in another
process (only their PTX is at hand), and devices on other machines.
"""

from collections.abc import Callable, Sequence

from tessera.cli.picking import Picked
from tessera.cli.ran import Ran
from tessera.errors import MismatchError
from tessera.ir import DeviceKind, Plan, need_one_batch


def is_for_gpus(plan: Plan, place: str) -> bool:
    """True if every device is a GPU's; refuses plans of both kinds."""
    gpus = [d.name for d in plan.cluster.devices if d.kind is DeviceKind.CUDA]
    if gpus and len(gpus) < len(plan.cluster.devices):
        message = f"{', '.join(gpus)} and the other devices cannot run together"
        raise MismatchError(message, "Plan for cuda: devices only, or for none.", place)
    return bool(gpus)


def check_gpus(plan: Plan, place: str) -> None:
    """Raises MismatchError if this machine lacks a GPU of the plan, or the plan has several batches."""
    import torch

    need_one_batch(plan, "a run on GPUs", place)
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = [d.name for d in plan.cluster.devices if d.ordinal >= have]
    if missing:
        made_for = ",".join(plan.cluster.names)
        message = f"the plan was made for {made_for}; this machine cannot run {', '.join(missing)}"
        raise MismatchError(message, "Plan again for emu: devices.", place)


def run_on_gpus(
    plans: Sequence[Plan],
    num: int,
    verify: bool,
    switch_every: int,
    is_picked: bool,
    advance: Callable[[str], None],
) -> tuple[Ran, bool | None]:
    """Runs the requests; every `switch_every`-th begins under the next plan, or all under the fastest."""
    from tessera.capture.inductor import on_device
    from tessera.execute.cuda.run import run_plans, try_out
    from tessera.execute.pick import pick
    from tessera.flow import UnitRequest, workloads_of

    first = f"cuda:{plans[0].cluster.devices[0].ordinal}"
    workloads = [on_device(workload, first) for workload in workloads_of(plans[0].unit)]
    weights = {name: tensor.to(first) for name, tensor in workloads[0].weights().items()}
    work = [UnitRequest(workloads, workloads[0].make_inputs(i), i) for i in range(num)]
    picked = None
    if is_picked:
        advance("trying the plans out")
        trials = try_out(plans, weights, work)
        picked = Picked(trials, pick(trials).plan)
        plans = [plans[picked.number]]
    advance("capturing graphs")
    ran = run_plans(
        plans, weights, work, switch_every, verify, on_done=lambda number: advance(f"ran request {number}")
    )
    if picked is not None:
        for result in ran.results:
            result.policy = picked.number
    found = Ran(ran.results, ran.timeline, ran.compute_us, ran.peak_bytes, ran.faults, picked)
    return found, ran.is_equal
