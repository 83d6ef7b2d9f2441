"""Pairs of devices on one card: plans of every policy on worker processes; used by gpu_execute.py."""

import itertools
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tessera.analyze import build_graph
from tessera.errors import PlanInfeasible
from tessera.execute import driver
from tessera.execute.cuda.measure import measure
from tessera.execute.cuda.pace import TimeScale, choose_scale
from tessera.execute.link_times import time_transfers
from tessera.execute.offline import RunResult, run_offline
from tessera.execute.processes import FORKSERVER
from tessera.execute.reference import InOrder
from tessera.execute.stepper import SpanLog
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import ReferenceRun, make_plan, run_reference
from tessera.ir import Cluster, Costs, Device, Link, Objective, Plan, Timeline, load, save
from tessera.kernels.tensors import same_bits
from tessera.plan import PlanConfig
from tessera.profile import parse_devices, wire
from tessera.profile.measured import combine
from tessera.profile.store import fit_link

# Requests that are compared bit by bit.
COMPARED = 2
# What nobody asks for while rates are measured: the next step is fed with other outputs.
SKIPPED = ("logits",)
TIMEOUT_S = 60.0
# Requests of a round, for each microbatch: they start together and fall out of step over some of them.
EACH = 30
# Bytes of the transfers by which a link is known.
SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 24)


def own_times(built: Any, cluster: Cluster) -> dict[str, Any]:
    """What launches take on the whole card."""
    costs, times = measure(built.unit, cluster, built.weights, built.request(0))
    return {
        "steps us": [round(t.whole_us, 1) for t in times[0]],
        "stamps us": [round(t.stamp_us, 2) for t in times[0]],
        "launches": [[round(row[0].us, 3) for row in c.costs] for c in costs],
    }


def card_link(a: Device, b: Device) -> tuple[Link, ...]:
    """What copies between two parts of one card take: latency and rate through two sizes, in a graph."""
    times = {}
    for size in (1 << 14, 1 << 27):
        source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                target.copy_(source)
        graph.replay()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times[size] = start.elapsed_time(stop) * 1e3 / 10
    gbps = (1 << 27) / max(times[1 << 27] - times[1 << 14], 1.0) / 1e3
    return tuple(Link(x.name, y.name, "card", round(times[1 << 14], 2), gbps) for x, y in ((a, b), (b, a)))


def priced(
    built: Any, text: str, link: str, own: Sequence[Sequence[float]]
) -> tuple[Cluster, tuple[Costs, ...], TimeScale]:
    """The pair's cluster, costs (measured for parts, modelled for dilated devices) and time scale."""
    devices = parse_devices(text)
    if not devices[0].is_dilated:
        cluster = Cluster(devices, card_link(*devices))
        costs, _ = measure(built.unit, cluster, built.weights, built.request(0))
        return cluster, costs, TimeScale(1.0, 1.0)
    emulated = parse_devices(",".join(f"emu:{d.gpu}" for d in devices))
    costs = tuple(replace(combine(g.trace, emulated, {})[0], devices=devices) for g in built.unit.graphs)
    targets = [[c.us for c in row] for cost in costs for row in cost.costs]
    scale = choose_scale(targets, [us for step in own for us in step], len(devices))
    return wire(devices, [link]), costs, scale


def make_plans(
    built: Any, costs: tuple[Costs, ...], cluster: Cluster, policies: Sequence[str], microbatches: int
) -> dict[str, Plan]:
    """The plans of the policies that apply."""
    plans = {}
    for policy in policies:
        try:
            config = PlanConfig(Objective.THROUGHPUT, microbatches, policy)
            plans[policy] = make_plan(built.unit, costs, cluster, config)
        except PlanInfeasible:
            continue
    return plans


def keep_plans(folder: Path, name: str, plans: dict[str, Plan], scale: TimeScale) -> None:
    """For another run of the same plans, by other transports or another executor."""
    folder.mkdir(parents=True, exist_ok=True)
    for policy, plan in plans.items():
        save(plan, folder / f"{name}.{policy}.plan")
    (folder / f"{name}.scale").write_text(repr(scale.factor))


def kept_plans(folder: Path, name: str, policies: Sequence[str]) -> tuple[dict[str, Plan], float]:
    """What `keep_plans` kept, and the time scale."""
    paths = {policy: folder / f"{name}.{policy}.plan" for policy in policies}
    plans = {policy: load(Plan, path) for policy, path in paths.items() if path.exists()}
    return plans, float((folder / f"{name}.scale").read_text())


def wanted(built: Any, num: int) -> list[ReferenceRun]:
    """What the launches give one by one on one device."""
    run = InOrder([g.trace for g in built.unit.graphs], built.weights, driver.card(0))
    return [run_reference(built.unit, built.request(seed), run) for seed in range(num)]


def differing(one: ReferenceRun | RunResult, other: RunResult) -> list[str]:
    """Names of outputs (with their run) and state whose bits differ."""
    if other.error:
        return [other.error]
    found = [
        f"{name} of run {run}"
        for run, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True))
        for name in a
        if not same_bits(a[name].cpu(), b[name].cpu())
    ]
    return found + [
        f"state {n}" for n, t in one.state.items() if not same_bits(t.cpu(), other.state[n].cpu())
    ]


def rate_per_s(results: Sequence[RunResult]) -> float:
    """While all microbatches were full, else over the whole list."""
    stops = sorted(result.stop_s for result in results)
    num = len({result.microbatch for result in results})
    full_s, last_s = stops[min(num, len(stops)) - 1], max(result.start_s for result in results)
    ended = [stop for stop in stops[num:] if stop <= last_s]
    if not ended:
        return len(stops) / (stops[-1] - min(result.start_s for result in results))
    return len(ended) / (ended[-1] - full_s)


def opened(built: Any, plans: dict[str, Plan], scale: float, transport: str, **more: Any) -> WorkerStepper:
    """Workers with these plans; to be used in a `with` statement."""
    options = {"transport": transport, "scale": scale, "timeout_s": TIMEOUT_S, "method": FORKSERVER, **more}
    return WorkerStepper(list(plans.values()), built.weights, **options)


def rates(
    built: Any,
    plans: dict[str, Plan],
    scale: float,
    transport: str,
    seconds: float,
    expected: Sequence[ReferenceRun | RunResult] | None,
    method: str = FORKSERVER,
) -> dict[str, Any]:
    """Every plan's rate on worker processes over one transport, and whether its bits are right.

    Without `expected`, the first plan has everything on one device, and its bits are the right ones.
    """
    names, found = list(plans), dict[str, Any]()
    began = time.monotonic()
    with opened(built, plans, scale, transport, method=method) as stepper:
        found["start s"] = round(time.monotonic() - began, 1)
        for number, name in enumerate(names):
            num = 2 * len(plans[name].lanes)
            requests = [built.request(i % COMPARED) for i in range(num)]
            results = run_offline(stepper, requests, policy=number).results
            expected = results[:COMPARED] if expected is None else expected
            wrong = [differing(expected[i % COMPARED], r)[:2] for i, r in enumerate(results)]
            found[name] = {"equal": not any(wrong), "differing": [w for w in wrong if w][:2]}
        for number, name in enumerate(names):
            microbatches = plans[name].microbatches
            first = timed(stepper, built, number, 2 * microbatches)
            per_s = timed(stepper, built, number, max(EACH * microbatches, min(240, round(first * seconds))))
            found[name] |= figures(plans[name], per_s * scale)
    return found


def slower_rates(
    built: Any, plans: dict[str, Plan], scales: Sequence[float], seconds: float
) -> dict[str, Any]:
    """Measured over simulated at other time scales: the slower, the less two devices on one card meet."""
    found: dict[str, Any] = {}
    for scale in scales:
        with opened(built, plans, scale, "ipc") as stepper:
            for number, (name, plan) in enumerate(plans.items()):
                first = timed(stepper, built, number, 2 * plan.microbatches)
                num = max(EACH * plan.microbatches, min(240, round(first * seconds)))
                per_s = timed(stepper, built, number, num) * scale
                found.setdefault(f"{scale:.2f}", {})[name] = round(per_s / plan.simulated_per_s, 4)
    return found


def best_coarse(plans: dict[str, Plan]) -> str:
    """The coarser policy with the best simulated rate."""
    coarse = {name: plan.simulated_per_s for name, plan in plans.items() if name != "throughput"}
    return max(coarse, key=lambda name: coarse[name])


def half_rates(built: Any, plan: Plan, single: Plan, scale: float, seconds: float) -> dict[str, Any]:
    """The plan over `ipc` and `nvshmem`, each worker with half of the card, under CUDA MPS.

    Libraries choose other kernels for half a card, so that what is right is what a worker gives with all
    launches on it (`single`).
    """
    share, found = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", dict[str, Any]()
    os.environ[share] = "50"
    try:
        for transport in ("ipc", "nvshmem"):
            plans = {"single": single, "throughput": plan}
            found[transport] = rates(built, plans, scale, transport, seconds, None, method="spawn")
    finally:
        del os.environ[share]
    one, other = (found[t]["throughput"]["measured per s"] for t in ("nvshmem", "ipc"))
    return found | {"nvshmem / ipc": round(one / other, 4)}


def host_rates(
    built: Any,
    costs: tuple[Costs, ...],
    cluster: Cluster,
    scale: float,
    microbatches: int,
    seconds: float,
    expected: list[RunResult],
) -> dict[str, Any]:
    """The throughput plan for links as the host transport has them, over that transport.

    A link is what it is, while devices are dilated: in the plan's time it is so many times as fast.
    """
    a, b = cluster.devices
    times = time_transfers(a, b, "host", SIZES, build_graph)
    fit = fit_link(a.name, b.name, "host", times.alone, times.both)
    links = tuple(
        replace(x, name="host", latency_us=fit.latency_us / scale, gbps=fit.gbps * scale)
        for x in cluster.links
    )
    plans = make_plans(
        built, costs, Cluster(cluster.devices, links), ("throughput", "data-parallel"), microbatches
    )
    found = rates(built, plans, scale, "host", seconds, expected)
    return found | {"link": [round(fit.latency_us, 1), round(fit.gbps, 3)]}


def timed(stepper: WorkerStepper, built: Any, policy: int, num: int) -> float:
    """Requests a second, by this machine's clock."""
    requests = [built.request(i % COMPARED) for i in range(num)]
    ran = run_offline(stepper, requests, policy=policy, is_timed=True, skips=SKIPPED)
    ran.raise_failures()
    return rate_per_s(ran.results)


def figures(plan: Plan, per_s: float) -> dict[str, Any]:
    """A measured rate beside what was predicted."""
    return {
        "measured per s": round(per_s, 3), "LP per s": round(plan.throughput_per_s, 3),
        "simulated per s": round(plan.simulated_per_s, 3), "bound per s": round(plan.bound_per_s, 3),
        "measured / simulated": round(per_s / plan.simulated_per_s, 4), "lanes": len(plan.lanes),
    }  # fmt: skip


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """The plan over the coarser policies, of one table of rates."""
    plan = found["throughput"]["measured per s"]
    coarse = {k: v["measured per s"] for k, v in found.items() if isinstance(v, dict) and k != "throughput"}
    best = max(coarse, key=lambda k: coarse[k])
    return {
        "throughput / best coarse": round(plan / coarse[best], 4), "best coarse": best,
        "throughput / data-parallel": round(plan / coarse["data-parallel"], 4),
        "throughput / its simulation": found["throughput"]["measured / simulated"],
    }  # fmt: skip


def hidden(built: Any, plan: Plan, scale: float) -> dict[str, Any]:
    """How much of the time in which bytes moved, the device that waited for them had other work."""
    with opened(built, {"p": plan}, scale, "ipc", is_profiled=True) as stepper:
        stepper.spans = SpanLog(plan)
        requests = [built.request(0) for _ in range(2 * plan.microbatches)]
        run_offline(stepper, requests, is_timed=True, skips=SKIPPED, spans=stepper.spans)
        timeline = stepper.spans.timeline()
    total, covered = timeline.transfer_us()
    busy = timeline.busy_us()
    return {
        "spans": len(timeline.spans), "transfer us": round(total / scale, 1),
        "hidden": round(covered / total, 4) if total else None,
        "busy": {k: round(v / timeline.makespan_us, 3) for k, v in busy.items()},
        "idle between requests of a microbatch, us": gaps_us(timeline, scale),
    }  # fmt: skip


def gaps_us(timeline: Timeline, scale: float) -> list[float]:
    """From the last span of a request to the first of the next in its microbatch: median and longest."""
    ends: dict[tuple[int, int], tuple[float, float]] = {}
    for s in timeline.spans:
        start, stop = ends.get((s.microbatch, s.request), (s.start_us, s.stop_us))
        ends[s.microbatch, s.request] = (min(start, s.start_us), max(stop, s.stop_us))
    rows = sorted((microbatch, *times) for (microbatch, _), times in ends.items())
    gaps = [b[1] - a[2] for a, b in itertools.pairwise(rows) if a[0] == b[0]]
    return [round(statistics.median(gaps) / scale, 1), round(max(gaps) / scale, 1)] if gaps else []


def run_soak(
    built: Any,
    text: str,
    link: str,
    microbatches: int,
    num: int,
    kills: int,
    tell: Callable[[str, Any], None],
) -> dict[str, Any]:
    """Requests in a row, each by a policy drawn at random, while workers are killed at random.

    Kills are SIGKILL at random moments: while runs are under way, and every second time the worker that takes
    the place of a killed one too, while it starts and captures.
    Every result is compared; memory in use on the card is looked at after every fifty requests.
    """
    own = own_times(built, Cluster(parse_devices("cuda:0"), ()))["launches"]
    cluster, costs, scale = priced(built, text, link, own)
    plans = make_plans(built, costs, cluster, ("throughput", "data-parallel", "layer-pipeline"), microbatches)
    rng, seeds = random.Random(0), 4
    expected = wanted(built, seeds)
    found: dict[str, Any] = {"policies": list(plans), "scale": round(scale.factor, 3)}
    wrong = lost = restarted = switches = 0
    used: list[int] = []
    with opened(built, plans, scale.factor, "ipc") as stepper:
        over = threading.Event()
        killed: list[str] = []

        def strike(wanted: str) -> None:
            """Kills a worker in this state, once there is one; a device that is lost has none."""
            while not over.wait(0.01):
                found = [s.pid for s in stepper.use().devices.values() if s.pid and s.state == wanted]
                if found:
                    if wanted == "starting":
                        over.wait(rng.uniform(0.0, 4.0))
                    os.kill(rng.choice(found), signal.SIGKILL)
                    killed.append(wanted)
                    return

        def killer() -> None:
            while len(killed) < kills:
                if over.wait(rng.uniform(0.2, 1.0)):
                    return
                if all(s.state == "ready" for s in stepper.use().devices.values()):
                    strike("ready")
                    if len(killed) < kills and rng.random() < 0.5:  # and the one in its place
                        strike("starting")

        thread = threading.Thread(target=killer, daemon=True)
        began, last, first = time.monotonic(), 0, 0
        while first < num or (thread.is_alive() and len(killed) < kills):
            if first == 50:
                thread.start()
            batch = [built.request(i % seeds) for i in range(first, first + 50)]
            policy = [rng.randrange(len(plans)) for _ in range(51)]
            switches += sum(a != b for a, b in itertools.pairwise([last, *policy[:50]]))
            last = policy[49]
            results = run_offline(stepper, batch, policy=policy.__getitem__).results
            lost += sum(bool(r.error) for r in results)
            restarted += sum(r.restarts for r in results)
            wrong += sum(bool(differing(expected[i % seeds], r)) for i, r in enumerate(results, first))
            first += 50
            used.append(torch.cuda.mem_get_info(0)[1] - torch.cuda.mem_get_info(0)[0])
            tell("so far", {"requests": first, "kills": len(killed), "different": wrong, "lost": lost})
        over.set()
        devices = {name: [s.state, s.restarts] for name, s in stepper.use().devices.items()}
    return found | {
        "requests": first, "switches": switches, "kills": len(killed), "killed while": sorted(killed),
        "different": wrong, "lost": lost, "started again": restarted, "devices at the end": devices,
        "bytes in use on the card after each 50": used, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
