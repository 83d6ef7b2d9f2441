"""Pairs of devices on one card: plans of every policy by the same executor; used by gpu_execute.py."""

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tessera.errors import PlanInfeasible
from tessera.execute.cuda import driver
from tessera.execute.cuda.captured import Captured
from tessera.execute.cuda.engine import CudaEngine
from tessera.execute.cuda.measure import always, measure, whole_plan
from tessera.execute.cuda.pick import try_plans
from tessera.execute.cuda.stretch import Scale, choose_scale
from tessera.execute.cuda.undivided import Undivided, differing
from tessera.execute.engine import RunResult
from tessera.execute.pick import Trial, pick, rate_per_s
from tessera.flow import make_plan
from tessera.ir import Cluster, Costs, Device, Link, Objective, Plan, Timeline
from tessera.profile import estimate, make_cluster, parse_devices

# Requests of each lane that are compared bit by bit.
COMPARED = 2


def own_times(built: Any, cluster: Cluster) -> dict[str, Any]:
    """What launches take on the whole card, and that a divided run can be compared with an undivided one."""
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
) -> tuple[Cluster, tuple[Costs, ...], Scale, Any]:
    """The pair's cluster, costs (measured for parts, modelled for stretched devices), time scale, and what
    the steps of parts take while the other part is idle."""
    devices = parse_devices(text)
    if not devices[0].is_stretched:
        cluster = Cluster(devices, card_link(*devices))
        costs, times = measure(built.unit, cluster, built.weights, built.request(0))
        alone = [[round(t[step].alone_us, 1) for t in times] for step in range(len(costs))]
        return cluster, costs, Scale(1.0, 1.0, 0, 0), alone
    emulated = parse_devices(",".join(f"emu:{d.gpu}" for d in devices))
    costs = tuple(
        replace(estimate(g.trace, emulated, tables=False), devices=devices) for g in built.unit.graphs
    )
    targets = [[c.us for c in row] for cost in costs for row in cost.costs]
    scale = choose_scale(targets, [us for step in own for us in step], len(devices))
    return make_cluster(devices, link), costs, scale, None


def make_plans(
    built: Any, costs: tuple[Costs, ...], cluster: Cluster, policies: Sequence[str], slots: int
) -> dict[str, Plan]:
    """The plans of the policies that apply."""
    plans = {}
    for policy in policies:
        try:
            plans[policy] = make_plan(built.unit, costs, cluster, Objective.THROUGHPUT, slots, policy)
        except PlanInfeasible:
            continue
    return plans


def run_pair(
    log: Any,
    built: Any,
    text: str,
    link: str,
    own: Sequence[Sequence[float]],
    policies: Sequence[str],
    slots: int,
    seconds: float,
) -> None:
    """Every policy on one pair of devices."""
    found: dict[str, Any] = {}
    began = time.monotonic()

    def prepare() -> dict[str, Any]:
        cluster, costs, scale, alone = priced(built, text, link, own)
        plans = make_plans(built, costs, cluster, policies, slots)
        found["plans"] = (plans, scale, cluster)
        return {
            "scale": round(scale.factor, 3), "covered": round(scale.covered, 4),
            "missed": [scale.num_missed, scale.num_launches],
            "whole step us": [[round(c.total_us(d), 1) for d in range(2)] for c in costs],
            "whole step us, other device idle": alone,
            "link": [cluster.links[0].name, cluster.links[0].latency_us, round(cluster.links[0].gbps, 1)],
            "plan s": round(time.monotonic() - began, 1),
        }  # fmt: skip

    if log.attempt(f"{text} priced", prepare) and "plans" in found:
        plans, scale, _ = found["plans"]
        log.attempt(f"{text} rates", lambda: rates(built, plans, scale, seconds))
        log.attempt(f"{text} hidden", lambda: hidden(built, plans["throughput"], scale))
    torch.cuda.empty_cache()


def rates(built: Any, plans: dict[str, Plan], scale: Scale, seconds: float) -> dict[str, Any]:
    """Every policy's rate, in one process over the same weights and state, and whether its bits are right.

    First all are tried once and one is picked, as a user would; the rates are of a second, equal round.
    """
    names, found = list(plans), dict[str, Any]()
    began = time.monotonic()
    reference = Undivided(built.unit, built.weights, driver.card(0))
    wanted = [reference.run(built.request(seed)) for seed in range(COMPARED)]
    with Captured(list(plans.values()), built.weights, scale=scale.factor) as captured:
        found["graphs"], found["capture s"] = captured.num_graphs, round(time.monotonic() - began, 1)
        checks = {name: check(built, captured, number, wanted) for number, name in enumerate(names)}
        num = how_many(built, captured, seconds)
        requests = [built.request(i % COMPARED) for i in range(num)]
        trials = try_plans(captured, requests, 1)
        chosen = names[pick(trials).plan]
        found["tried per s"] = {names[t.plan]: _modelled(t, scale) for t in trials}
        measured = try_plans(captured, requests, 1)
        found["starting a request, us of CPU"] = submit_us(captured, requests)
        for trial in measured:
            name, plan = names[trial.plan], plans[names[trial.plan]]
            rate = trial.per_s * scale.factor
            found[name] = {
                "measured per s": round(rate, 3), "LP per s": round(plan.throughput_per_s, 3),
                "simulated per s": round(plan.simulated_per_s, 3), "bound per s": round(plan.bound_per_s, 3),
                "measured / LP": round(rate / plan.throughput_per_s, 4), "lanes": len(plan.lanes),
                "transfers": sum(len(p.transfers) * p.count for p in captured.programs[trial.plan][0]),
                "equal": not any(checks[name]), "differing": [w for w in checks[name] if w][:2],
            }  # fmt: skip
    best = max(v["measured per s"] for k, v in found.items() if k in names[1:])
    found["requests"], found["slots"], found["chosen"] = num, captured.num_slots, chosen
    found["throughput / best coarse"] = round(found["throughput"]["measured per s"] / best, 4)
    found["chosen / best coarse"] = round(found[chosen]["measured per s"] / best, 4)
    found["chosen / LP"] = found[chosen]["measured / LP"]
    return found


def check(built: Any, captured: Captured, number: int, wanted: Sequence[RunResult]) -> list[list[str]]:
    """What differs from the undivided run, for each of a few requests of a plan."""
    num = 2 * len(captured.plans[number].lanes)
    requests = [built.request(i % COMPARED) for i in range(num)]
    results = CudaEngine(captured).run(requests, always(number))
    return [differing(wanted[i % COMPARED], r)[:3] for i, r in enumerate(results)]


def how_many(built: Any, captured: Captured, seconds: float) -> int:
    """Requests of a round, at least five a slot; a few run here to warm up."""
    number, num = len(captured.plans) - 1, 2 * captured.num_slots
    engine = CudaEngine(captured, keeps_results=False, keeps_state=True)
    rate = rate_per_s(engine.run([built.request(i % COMPARED) for i in range(num)], always(number)))
    return max(5 * captured.num_slots, min(240, round(rate * seconds)))


def submit_us(captured: Captured, requests: Sequence[Any]) -> list[float]:
    """How long the CPU takes to start a request of the first plan: median and longest of a full house."""
    engine = CudaEngine(captured, keeps_results=False, keeps_state=True)
    engine.run(requests[: 2 * captured.num_slots], always(0))
    times = [s * 1e6 for s in engine.submit_s]
    return [round(statistics.median(times), 1), round(max(times), 1)]


def _modelled(trial: Trial, scale: Scale) -> float:
    return round(trial.per_s * scale.factor, 3)


def hidden(built: Any, plan: Plan, scale: Scale) -> dict[str, Any]:
    """How much of the time in which bytes moved, the device that waited for them had other work.

    And, on stretched devices, by how much launches ended later than due, as a share of what they hold.
    """
    with Captured([plan], built.weights, scale=scale.factor, is_profiled=True) as captured:
        engine = CudaEngine(captured, keeps_results=False, keeps_state=True)
        engine.run([built.request(0) for _ in range(2 * plan.slots)])
        timeline = engine.timeline()
    busy = timeline.busy_us()
    return {
        "spans": len(timeline.spans), "transfer us": round(moved_us(timeline), 1),
        "hidden": hidden_share(timeline), "clock": "GPU, divided by the scale; every launch stamped",
        "busy": {k: round(v / timeline.makespan_us, 3) for k, v in busy.items()},
        "slot idle between requests, us": slot_gaps_us(timeline),
        "overrun": {k: round(late / held, 4) for k, (late, held) in engine.late_us.items() if held},
    }  # fmt: skip


def slot_gaps_us(timeline: Timeline) -> list[float]:
    """From the last span of a request to the first of the next in its slot: median and longest."""
    ends: dict[tuple[int, int], tuple[float, float]] = {}
    for s in timeline.spans:
        start, stop = ends.get((s.slot, s.request), (s.start_us, s.stop_us))
        ends[s.slot, s.request] = (min(start, s.start_us), max(stop, s.stop_us))
    rows = sorted((slot, *times) for (slot, _), times in ends.items())
    gaps = [b[1] - a[2] for a, b in itertools.pairwise(rows) if a[0] == b[0]]
    return [round(statistics.median(gaps), 1), round(max(gaps), 1)] if gaps else []


def moved_us(timeline: Timeline) -> float:
    """Time of all transfers together."""
    return sum(s.stop_us - s.start_us for s in timeline.spans if s.is_transfer)


def hidden_share(timeline: Timeline) -> float | None:
    """Share of the transfers' time in which their destination computed; None without transfers."""
    total = moved_us(timeline)
    if not total:
        return None
    busy: dict[str, list[tuple[float, float]]] = {}
    for span in timeline.spans:
        if not span.is_transfer:
            mine = busy.setdefault(span.track, [])
            if mine and span.start_us <= mine[-1][1]:
                mine[-1] = (mine[-1][0], max(mine[-1][1], span.stop_us))
            else:
                mine.append((span.start_us, span.stop_us))
    covered = 0.0
    for span in (s for s in timeline.spans if s.is_transfer):
        for start, stop in busy.get(span.track.split(" -> ")[1], []):
            covered += max(0.0, min(stop, span.stop_us) - max(start, span.start_us))
    return round(covered / total, 4)


def run_soak(built: Any, text: str, slots: int, num: int) -> dict[str, Any]:
    """Requests in a row, each by a policy drawn at random; outputs equal, memory flat.

    Flat: the bytes in use are the same after every fifty requests, and the bytes that torch has reserved grow
    by less than 0.1 % in all, and not at all in the last third. Results of fifty requests are kept until they
    are compared, and which slot made how many of them is chance, so that a slot's share of reserved memory
    is found out late; a first run of a hundred and fifty, before anything is counted, reserves enough.
    """
    devices = parse_devices(text)
    cluster = Cluster(devices, card_link(*devices))
    costs, _ = measure(built.unit, cluster, built.weights, built.request(0))
    plans = list(
        make_plans(built, costs, cluster, ("throughput", "attention-ffn", "layer-pipeline"), slots).values()
    )
    rng, seeds = random.Random(0), 8
    plans.append(replace(whole_plan(built.unit, cluster, 0), costs=costs, slots=slots))
    reference = Undivided(built.unit, built.weights, driver.card(0))
    wanted = [reference.run(built.request(seed)) for seed in range(seeds)]
    wrong, used, reserved, switches, last = 0, list[int](), list[int](), 0, -1
    began = time.monotonic()
    with Captured(plans, built.weights) as captured:
        engine = CudaEngine(captured)
        engine.run([built.request(i % seeds) for i in range(150)], lambda number: number % len(plans))
        for first in range(0, num, 50):
            batch = range(first, min(first + 50, num))
            policy = [rng.randrange(len(plans)) for _ in batch]
            for p in policy:
                switches, last = switches + (p != last), p
            results = engine.run([built.request(i % seeds) for i in batch], policy.__getitem__)
            wrong += sum(bool(differing(wanted[i % seeds], r)) for i, r in zip(batch, results, strict=True))
            del results
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
            reserved.append(torch.cuda.memory_reserved())
    return {
        "requests": num, "policies": [p.policy for p in plans], "switches": switches, "different": wrong,
        "allocated bytes after each 50": used, "reserved bytes after each 50": reserved,
        "flat": is_flat(used, reserved),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def is_flat(used: Sequence[int], reserved: Sequence[int]) -> bool:
    """See `run_soak`; the first tenth warms up."""
    warm = len(used) // 10
    grew = reserved[-1] - reserved[warm]
    return (
        len(set(used[warm:])) == 1
        and grew < 1e-3 * reserved[warm]
        and len(set(reserved[-len(reserved) // 3 :])) == 1
    )
