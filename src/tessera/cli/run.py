"""tessera run: plans on worker processes, compared with the model itself.

With --verify every request has inputs of its own and is compared with the model, called in this process; on
GPUs with the recorded launches one by one. A plan over GPUs and CPUs is not compared: their bits differ.
Emulated devices compute on this machine's CPU: only their shares of all computing can be compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera.cli.output import HIDDEN, Record, info, option, progress, say, shown
from tessera.cli.remote import MeetingOptions, gathered, plans_digest, serve_rank
from tessera.errors import MismatchError, TesseraError
from tessera.ir import BufferKind, DeviceKind, Plan, Timeline, Trace, load, units
from tessera.profile import parse_devices
from tessera.report import utilisation, write_perfetto
from tessera.simulate import simulate

if TYPE_CHECKING:
    from tessera.execute.offline import RunResult
    from tessera.execute.stepper import Tensors
    from tessera.flow import ReferenceRun, RunStep

# Enough for a share, few enough to be quick.
PREDICTED_REQUESTS = 32
# Default timeout on GPUs: a CUDA graph waits for ever.
GPU_TIMEOUT_S = 60.0
# Failures in a row after which a device is given up.
MAX_FAILURES = 3
MODEL_ITSELF = "the model itself"
LAUNCHES = "the recorded launches one by one; the model itself was not called"
MAX_BYTES = 4 << 30


class DeviceRun(Record, frozen=True):
    """One device: measured on this machine, beside what the plan predicts (modelled)."""

    device: str
    busy_us: Annotated[float, HIDDEN]
    utilisation: Annotated[float, shown("busy")]
    compute_us: Annotated[float, HIDDEN]
    share: float
    predicted_share: float
    difference: Annotated[float, HIDDEN]
    peak_bytes: int


class RunReport(Record, frozen=True):
    """Requests that went through a plan on worker processes."""

    headline: str
    # None: nothing was compared.
    verified: Annotated[bool | None, HIDDEN]
    reference: Annotated[str | None, shown("compared with")]
    inputs: str
    requests: int
    lost: int
    restarted: int
    overlap: Annotated[float, shown("transfers hidden (measured)", "share")]
    per_device: Annotated[tuple[DeviceRun, ...], shown("devices (measured here; predictions modelled)")]
    lanes: Annotated[tuple[int, ...], HIDDEN]
    policies: Annotated[dict[str, int], HIDDEN]
    faults: tuple[str, ...]
    trace: str | None
    place: Annotated[str, HIDDEN]
    seconds: Annotated[float, HIDDEN] = 0.0

    def problem(self) -> TesseraError | None:
        if self.verified is False:
            return TesseraError(
                f"the divided run differs from {(self.reference or '').partition(';')[0]}",
                "Capture and plan again; if it still differs, please report this plan.",
                self.place,
            )
        if self.lost:
            message = f"{self.lost} of {self.requests} requests failed: {self.faults[-1]}"
            return TesseraError(message, place=self.place)
        return None


@dataclass(frozen=True)
class Ran:
    results: "list[RunResult]"
    timeline: Timeline
    compute_us: dict[str, float]
    peak_bytes: tuple[int, ...]
    faults: tuple[str, ...]
    inputs: str
    reference: str | None
    # None: nothing was compared.
    verified: bool | None


TransportOption = Annotated[
    str, info("Transport of tensors between devices: auto, shm, ipc, nvshmem or host.")
]


def run(
    plan: Annotated[
        list[Path], typer.Argument(help="The plan to run; several are policies to switch between.")
    ],
    remote: MeetingOptions,
    requests: int = option(8, "Number of requests to run.", min=1),
    verify: bool = option(
        False, "Compare with the model itself, bit by bit, on inputs drawn afresh.", "--verify"
    ),
    devices: str | None = option(None, "Check that the plan was made for these devices."),
    trace: Path | None = option(
        None, "Write a Perfetto trace here: what happened beside what was predicted."
    ),
    plain: bool = option(False, "One request at a time, so that nothing overlaps.", "--plain"),
    transport: TransportOption = "auto",
    timeout: float | None = option(
        None, "Seconds until a worker that blocks a step is lost.", shown="none; on GPUs 60", min=0.001
    ),
    switch_every: int = option(8, "Requests between two switches of the policy.", min=1),
) -> RunReport | None:
    """Run requests through a plan, one worker process per device."""
    plans, place = [load(Plan, path) for path in plan], str(plan[0])
    if devices is not None and parse_devices(devices) != plans[0].cluster.devices:
        message = f"the plan was made for {','.join(plans[0].cluster.names)}, not for {devices}"
        raise MismatchError(message, f"Plan again with --devices {devices}.", place)
    total = requests * (2 if verify else 1) + 1
    options: dict[str, Any] = {"transport": transport, "timeout_s": timeout}
    meeting = remote.meeting
    if meeting is not None and meeting.rank > 0:
        serve_rank(plans, meeting)
        return None
    if has_gpus(plans[0]):
        check_gpus(plans[0], verify, place)
    else:
        for graph in plans[0].graphs:
            check_runnable(graph.trace, place)
    with (
        gathered(plans[0].cluster.devices, meeting, remote.ray, digest=plans_digest(plans)) as (_, hub),
        progress("building the model", total) as advance,
    ):
        options["hub"] = hub
        depth = 1 if plain else None
        ran = run_plans(plans, requests, verify, switch_every, depth, options, advance)
    return _report(plans, place, ran, trace)


def run_plans(
    plans: Sequence[Plan],
    num: int,
    verify: bool,
    switch_every: int,
    depth: int | None,
    options: dict[str, Any],
    advance: Callable[[str], None],
) -> Ran:
    """Every `switch_every`-th request begins under the next plan."""
    from tessera.execute.offline import QUIET_S, run_offline
    from tessera.execute.stepper import SpanLog
    from tessera.execute.worker_stepper import WorkerStepper
    from tessera.flow import requests_of, run_reference

    on_gpus, scale = has_gpus(plans[0]), 1.0
    requests = requests_of(plans[0], num, is_fresh=verify and not on_gpus)
    weights, work = requests.weights, requests.work
    if on_gpus:
        from tessera.execute.cuda.measure import scale_of

        scale = scale_of(plans[0], weights, work[0]).factor
        options |= {"scale": scale, "is_profiled": True}
        options["timeout_s"] = options["timeout_s"] or GPU_TIMEOUT_S * scale
    advance("starting workers")
    with WorkerStepper(plans, weights, max_failures=MAX_FAILURES, **options) as stepper:
        log = stepper.spans = SpanLog(plans[0], scale)

        def tell() -> None:
            late = sorted({device for running in stepper.running.values() for device in running.missing})
            names = ", ".join(plans[0].cluster.names[device] for device in late)
            say(f"note: no step has ended for {QUIET_S:g} s on {names}; --timeout gives up a frozen worker")

        run = run_offline(
            stepper,
            work,
            policy=lambda num_done: num_done // switch_every % len(plans),
            on_done=lambda number: advance(f"ran request {number}"),
            spans=log,
            depth=depth,
            on_wait=tell,
        )
        peaks = tuple(f.peak_bytes for f in stepper.footprints)
    reference, verified = None, None
    if verify:
        in_order = launches_of(plans[0], weights) if on_gpus else None
        reference = LAUNCHES if on_gpus else MODEL_ITSELF
        verified = True
        for request, result in zip(work, run.results, strict=True):
            if not result.error:
                verified &= is_equal(run_reference(plans[0].unit, request, in_order), result)
            advance(f"compared request {request.seed}")
    timeline, faults = log.timeline(), tuple(run.faults)
    return Ran(run.results, timeline, log.cpu_us, peaks, faults, requests.inputs, reference, verified)


def _report(plans: Sequence[Plan], place: str, ran: Ran, trace: Path | None) -> RunReport:
    plan, num = plans[0], len(ran.results)
    if trace is not None:
        write_perfetto(ran.timeline, trace, simulate(plan, num))
    predicted = simulate(plan, min(num, PREDICTED_REQUESTS), is_detailed=False)
    lost = sum(bool(r.error) for r in ran.results)
    outcome = {True: "every output and state equal bit for bit", False: "DIFFERENT", None: "not compared"}
    return RunReport.of(
        ran,
        headline=f"{num} requests, {lost} lost: {outcome[ran.verified]}",
        requests=num,
        lost=lost,
        restarted=sum(bool(r.restarts) for r in ran.results),
        overlap=overlap(ran.timeline),
        per_device=compared(plan, ran, predicted),
        lanes=tuple(sum(r.lane == i and r.policy == 0 for r in ran.results) for i in range(len(plan.lanes))),
        policies={
            f"{n} {p.policy}": sum(r.policy == n and not r.error for r in ran.results)
            for n, p in enumerate(plans)
        },
        trace=str(trace) if trace else None,
        place=place,
    )


def is_equal(reference: "ReferenceRun", result: "RunResult") -> bool:
    """True iff every output of every run and the final state hold the same bytes."""
    from tessera.kernels.tensors import same_bits

    outputs = len(reference.outputs) == len(result.outputs) and all(
        same_bits(one[name].cpu(), other[name])
        for one, other in zip(reference.outputs, result.outputs, strict=True)
        for name in one
    )
    return outputs and all(same_bits(t.cpu(), result.state[name]) for name, t in reference.state.items())


def overlap(timeline: Timeline) -> float:
    """Share of the transfers' time during which their destination computed; 1 if there were none."""
    total, hidden = timeline.transfer_us()
    return hidden / total if total else 1.0


def shares(names: Sequence[str], busy_us: Mapping[str, float]) -> list[float]:
    total = sum(busy_us.get(name, 0.0) for name in names) or 1.0
    return [busy_us.get(name, 0.0) / total for name in names]


def compared(plan: Plan, ran: Ran, predicted: Timeline) -> tuple[DeviceRun, ...]:
    names, busy, used = plan.cluster.names, ran.timeline.busy_us(), utilisation(ran.timeline)
    measured, modelled = shares(names, ran.compute_us), shares(names, predicted.busy_us())
    return tuple(
        DeviceRun(
            device=name,
            busy_us=busy.get(name, 0.0),
            utilisation=used.get(name, 0.0),
            compute_us=ran.compute_us.get(name, 0.0),
            share=share,
            predicted_share=predicted_share,
            difference=share - predicted_share,
            peak_bytes=peak,
        )
        for name, share, predicted_share, peak in zip(names, measured, modelled, ran.peak_bytes, strict=True)
    )


def has_gpus(plan: Plan) -> bool:
    return any(d.kind is DeviceKind.CUDA for d in plan.cluster.devices)


def check_gpus(plan: Plan, is_verified: bool, place: str) -> None:
    """Refuses a plan whose GPUs this machine lacks, or that cannot be compared."""
    import torch

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


def launches_of(plan: Plan, weights: "Tensors") -> "RunStep":
    """The plan's launches one by one, on the first device's GPU."""
    from tessera.execute import driver
    from tessera.execute.cuda.graphs import refuse_generators
    from tessera.execute.reference import InOrder

    traces = [graph.trace for graph in plan.graphs]
    for trace in traces:
        refuse_generators(trace)
    return InOrder(traces, weights, driver.card(plan.cluster.devices[0].ordinal))


def check_runnable(trace: Trace, place: str) -> None:
    size = trace.bytes_of(BufferKind.WEIGHT)
    if size > MAX_BYTES:
        message = f"{trace.step.model} has {units.size(size)} of weights; this command runs the whole model"
        remedy = "Verify the tiny model of the same family: tessera capture tiny-... --device cpu."
        raise TesseraError(message, remedy, place)
    if trace.recorded_on != "cpu":
        message = f"the trace was captured on {trace.recorded_on}; this command runs on the CPU"
        raise TesseraError(message, "Capture the tiny model of the same family with --device cpu.", place)
