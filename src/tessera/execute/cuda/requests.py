"""Small questions the engine asks of plans, programs and tensors."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tessera.errors import MismatchError, WorkerError
from tessera.execute.cuda.launches import bytes_of
from tessera.execute.flight import RunResult
from tessera.ir import Plan, Program, need_one_batch


class TimedOut(Exception):
    """A request did not end in time."""


def check_same(plans: Sequence[Plan]) -> None:
    """Plans that are run together are of the same work on the same devices."""
    if not plans:
        raise MismatchError("no plan to run", "Give at least one.")
    first = plans[0]
    for plan in plans:
        need_one_batch(plan, "a run on GPUs")
    for plan in plans[1:]:
        if plan.cluster.devices != first.cluster.devices:
            raise MismatchError("the plans are for different devices", "Make them for the same ones.")
        if plan.unit.counts != first.unit.counts or any(
            a.trace.digest != b.trace.digest for a, b in zip(plan.unit.graphs, first.unit.graphs, strict=True)
        ):
            raise MismatchError("the plans are of different work", "Make them from the same traces.")


def key_of(program: Program) -> Program:
    """What a graph is made of: equal for programs of different lanes and plans that do the same."""
    return replace(program, lane=0, count=1)


def is_short(plan: Plan, step: int) -> bool:
    """True of a step that takes less than half as long as the longest of the work unit."""
    if not plan.costs:
        return False
    times = [min(c.total_us(d) for d in range(len(plan.cluster.devices))) for c in plan.costs]
    return 2 * times[step] < max(times)


def fill(storage: torch.UntypedStorage, tensor: torch.Tensor, what: str) -> None:
    """Copies a tensor's memory into a storage of the same size, on the current stream.

    Memory of the host is pinned first: the CPU would otherwise wait until the stream has come to the copy,
    which is behind everything that was launched before, and start no request in another slot meanwhile.
    """
    source = tensor.untyped_storage()
    if source.nbytes() != storage.nbytes():
        source = tensor.contiguous().clone().untyped_storage()
    if source.nbytes() != storage.nbytes():
        raise WorkerError(
            f"{what} has {source.nbytes()} bytes, the trace {storage.nbytes()}",
            "Give tensors of the shapes that were captured.",
        )
    size = storage.nbytes()
    given = bytes_of(source, 0, size)
    if storage.device.type == "cuda" and given.device.type == "cpu" and size:
        given = given.pin_memory()  # torch keeps it until the copy is done
    bytes_of(storage, 0, size).copy_(given, non_blocking=True)


def first_line(error: BaseException) -> str:
    """The first line of a message that may be long."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def rescue(result: RunResult, why: str) -> RunResult:
    """A result brought to the host, since its GPU has failed; without contents where that is too late."""
    try:
        outputs = [{name: t.cpu() for name, t in run.items()} for run in result.outputs]
        return replace(result, outputs=outputs, state={name: t.cpu() for name, t in result.state.items()})
    except RuntimeError:
        return replace(result, outputs=[], state={}, error=why)
