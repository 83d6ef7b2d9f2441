"""How fast serving is simulated, how its time grows with requests, and whether it is right.

    python benchmarks/bench_online.py [--requests 100000] [--real] [--out benchmarks/results/online_202611]
    python benchmarks/bench_online.py --quick --json

An 8B decode workload (llama-3-8b recorded without a GPU, batch 32) on an A100 beside an L40S, answers of 200
tokens on average. Parts: growth; queues whose mean wait is known in closed form; a monitor against both
fixed policies at several loads; what is regained when a kernel type was priced wrong and the monitor corrects
the costs; and with --real, plans run by worker processes on this machine's CPU against
the simulation of the same plans at costs measured here. There the gain of one plan over another is compared,
since other work on the machine slows both. Other rates and latencies are simulated; seconds are of this run.

--quick runs only the monitor against both fixed policies, at `QUICK_LOADS` with answers of `QUICK_ANSWERS`;
--sweep does so at `SWEEP` in processes: steady and bursty streams, and two with the statistics of public logs
(`LOGGED`), over many seeds.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks.row_service.metrics import capabilities, capacity_per_s, measured, poisson
from benchmarks.row_service.replan import replan
from benchmarks.row_service.server import SimulatedServer
from benchmarks.row_service.study import AdaptiveServer, Scenario, adapt, compare, known_of, replanner

from factories import make_chain, make_plan
from online_factory import RUN_US, alone_plan, serve
from tessera.adapt.capability import Capability
from tessera.adapt.drift import scaled_costs
from tessera.adapt.monitor import DEFAULT, Monitor, MonitorConfig
from tessera.ir import Arrivals, Objective, Plan, Step
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.stepper import Truth

LENGTHS = "geometric:512,200"
LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.4)
BURSTS = (0.4, 0.7)
# With --quick: shares of the best capacity, tokens of an answer, requests, and number of seeds by stream.
QUICK_LOADS, QUICK_ANSWERS, QUICK_REQUESTS = (0.5, 0.8, 0.95, 1.05), (20, 256), 1500
QUICK_STREAMS = {"poisson": 3, "bursty": 2}
# With --sweep: shares of the best capacity, tokens of an answer, streams, requests and seeds.
SWEEP_LOADS, SWEEP_ANSWERS, SWEEP_REQUESTS, SWEEP_SEEDS = (0.2, 0.5, 0.8, 0.95, 1.1), (20, 128, 512), 300, 20
SWEEP_STREAMS = ("poisson", "bursty", "burstgpt", "azure")
# Statistics of public logs, not their rows. BurstGPT: times between requests are Gamma with a coefficient of
# variation of 2, lengths have a long tail. Azure's conversations: busier minutes, lengths nearly lognormal.
LOGGED = {"burstgpt": (2.0, "lognormal:512,{},1.2"), "azure": (None, "lognormal:512,{},1.0")}
AZURE_MINUTES = "bursty:{:.5g},1.6,0.3,60"
# (device, real over planned time) of the kernel type that takes most time there.
WRONG = (("emu:l40s", 1.1), ("emu:l40s", 1.3), ("emu:a100", 1.3))


def make_plans(microbatches: int = 4) -> list[tuple[str, Plan]]:
    """A latency and a throughput plan of one decode."""
    from tessera.capture.record import record_step
    from tessera.flow import make_plan as plan_for
    from tessera.flow import make_unit, price
    from tessera.plan import PlanConfig
    from tessera.profile import parse_devices, wire

    trace = record_step(Step("llama-3-8b", "decode", 32, 128), "fake")
    cluster = wire(parse_devices("emu:a100,emu:l40s"), ["pcie4"])
    unit = make_unit([trace])
    costs = price(unit, cluster)
    goals = (Objective.LATENCY, Objective.THROUGHPUT)
    return [(goal.value, plan_for(unit, costs, cluster, PlanConfig(goal, microbatches))) for goal in goals]


def growth(plans: list[tuple[str, Plan]], most: int) -> list[dict[str, Any]]:
    """More and more requests at 80 % of the capacity, with batching and without."""
    rows = []
    for name, plan in plans:
        capacity = compare([(name, plan)], Scenario(make_arrivals("batch:64", lengths=LENGTHS)))[
            0
        ].capacity_per_s
        for num in (n for n in (1000, 3000, 10_000, 30_000, 100_000) if n <= most):
            setting = Scenario(make_arrivals(f"poisson:{0.8 * capacity}", num, 0, LENGTHS))
            rows.append(_timed_row(f"{name}, 32 rows a microbatch, 200 tokens", name, plan, setting))
    name, plan = plans[1]
    for num in (n for n in (1000, 10_000, 100_000) if n <= most):
        setting = Scenario(make_arrivals(f"poisson:{0.8 * plan.simulated_per_s}", num), rows=1)
        rows.append(_timed_row(f"{name}, a microbatch and one step each", name, plan, setting))
    return rows


def _timed_row(what: str, name: str, plan: Plan, setting: Scenario) -> dict[str, Any]:
    wall, own = time.perf_counter(), time.process_time()
    (report,) = compare([(name, plan)], setting)
    wall, own = time.perf_counter() - wall, time.process_time() - own
    return {
        "what": what,
        "requests": report.num_requests,
        "wall_s": wall,
        "process_s": own,
        "us_each": 1e6 * own / report.num_requests,
        "tokens_per_s": report.tokens_per_s,
    }


def queues() -> list[dict[str, Any]]:
    """Mean waits against theory."""
    rows = []
    for rho in (0.3, 0.6, 0.8):
        served = serve(alone_plan(1), poisson(rho / RUN_US * 1e6, 30_000, seed=5))
        wait = float(measured(served)["latency"].mean()) * 1e6 - RUN_US
        rows.append(
            {"queue": "M/D/1", "load": rho, "simulated_us": wait, "theory_us": RUN_US * rho / 2 / (1 - rho)}
        )
    num, mean, load = 2, 20, 0.5
    plan = make_plan([make_chain(1)], [[[0]], [[1]]], us=1.0, microbatches=num)
    served = serve(
        plan, make_arrivals(f"poisson:{load * num / mean * 1e6}", 20_000, 1, f"geometric:1,{mean}")
    )
    offered = load * num
    full = offered**num / math.factorial(num) / (1 - load)
    chance = full / (sum(offered**k / math.factorial(k) for k in range(num)) + full)
    wait = float(measured(served)["ttft"].mean()) * 1e6 - 1.0
    rows.append(
        {
            "queue": "M/M/2",
            "load": load,
            "simulated_us": wait,
            "theory_us": chance * mean / (num * (1 - load)),
        }
    )
    return rows


def policies(plans: list[tuple[str, Plan]], num: int = 3000) -> list[dict[str, Any]]:
    """A monitor against both fixed policies."""
    known = known_of(plans, Scenario(make_arrivals("poisson:1", 1000, 0, LENGTHS)))
    best = max(x.capacity_per_s for x in known)
    loads = [f"poisson:{x * best:.4g}" for x in LOADS] + [f"bursty:{x * best:.4g}" for x in BURSTS]
    return [_watched(plans, known, text, Scenario(make_arrivals(text, num, 0, LENGTHS))) for text in loads]


def _watched(
    plans: list[tuple[str, Plan]], known: tuple[Capability, ...], text: str, setting: Scenario
) -> dict[str, Any]:
    """One stream with a monitor, over the better fixed policy."""
    adaptive, _ = adapt(plans, setting, known=known)
    means = {name: _mean_s(plan, setting) for name, plan in plans}
    own = adaptive.normalised_s.mean if adaptive.normalised_s else math.inf
    end_s = setting.arrivals.times_s[-1]
    switches = sum(d.kind.value == "switch" and d.at_s < end_s for d in adaptive.decisions)
    row = {"arrivals": text, **{f"{n}_ms": 1e3 * v for n, v in means.items()}, "adaptive_ms": 1e3 * own}
    horizon_s = max(DEFAULT.horizons) * Monitor(known).window_s
    return row | {
        "ratio": own / min(means.values()),
        "switches": switches,
        "switches_per_horizon": switches / max(1.0, end_s / horizon_s),
        "saturated": adaptive.is_saturated,
    }


def _mean_s(plan: Plan, setting: Scenario) -> float:
    """Mean normalised latency of a fixed policy."""
    served = SimulatedServer([plan], setting.requests(plan), setting.truth(plan)).run()
    return float(np.nanmean(measured(served)["normalised"]))


def quick(plans: list[tuple[str, Plan]]) -> dict[str, Any]:
    """The monitor at a few loads, as means over seeds; "worst_ratio_to_better_fixed" is over all rows.

    Means, because requests of a fixed policy may stay in microbatches that are filled well or badly by luck.
    """
    rows = []
    for tokens in QUICK_ANSWERS:
        lengths = f"geometric:512,{tokens}"
        known = known_of(plans, Scenario(make_arrivals("poisson:1", 1000, 0, lengths)))
        best = max(x.capacity_per_s for x in known)
        for share in QUICK_LOADS:
            for kind, num_seeds in QUICK_STREAMS.items():
                text = f"{kind}:{share * best:.4g}"
                settings = (
                    Scenario(make_arrivals(text, QUICK_REQUESTS, n, lengths)) for n in range(num_seeds)
                )
                seeds = [_watched(plans, known, text, setting) for setting in settings]
                rows.append({"answer_tokens": tokens, "load": share, **_mean_row(seeds)})
    steady = [row["switches_per_horizon"] for row in rows if row["arrivals"].startswith("poisson")]
    return {
        "worst_ratio_to_better_fixed": max(row["ratio_to_better_fixed"] for row in rows),
        "most_switches_per_horizon_in_steady_load": max(steady),
        "rows": rows,
    }


def stream_of(kind: str, rate_per_s: float, tokens: int, seed: int) -> Arrivals:
    if kind not in LOGGED:
        text, lengths = f"{kind}:{rate_per_s:.5g}", f"geometric:512,{tokens}"
        return make_arrivals(text, SWEEP_REQUESTS, seed, lengths)
    variation, lengths = LOGGED[kind]
    text = AZURE_MINUTES.format(rate_per_s) if variation is None else f"poisson:{rate_per_s:.5g}"
    found = make_arrivals(text, SWEEP_REQUESTS, seed, lengths.format(tokens))
    if variation is None:
        return found
    shape = variation**-2
    gaps = np.random.default_rng([seed, 3]).gamma(shape, 1.0 / rate_per_s / shape, SWEEP_REQUESTS)
    return replace(found, times_s=tuple(np.cumsum(gaps).tolist()))


def _known(plans: list[tuple[str, Plan]], tokens: int) -> tuple[Capability, ...]:
    return known_of(plans, Scenario(make_arrivals("poisson:1", SWEEP_REQUESTS, 0, f"geometric:512,{tokens}")))


def _swept(
    plans: list[tuple[str, Plan]], known: tuple[Capability, ...], tokens: int, seed: int
) -> list[dict[str, Any]]:
    """All loads and streams of one answer length and seed."""
    best = max(x.capacity_per_s for x in known)
    return [
        {"answer_tokens": tokens, "load": share, "seed": seed}
        | _watched(plans, known, kind, Scenario(stream_of(kind, share * best, tokens, seed)))
        for share in SWEEP_LOADS
        for kind in SWEEP_STREAMS
    ]


def sweep(plans: list[tuple[str, Plan]], out: Path | None) -> dict[str, Any]:
    """Means over seeds by answer length, load and stream; written after every seed."""
    context, runs, found = multiprocessing.get_context("spawn"), [], {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context) as pool:
        known = {tokens: pool.submit(_known, plans, tokens) for tokens in SWEEP_ANSWERS}
        tasks = [(known[n].result(), n, seed) for seed in range(SWEEP_SEEDS) for n in SWEEP_ANSWERS]
        for future in as_completed([pool.submit(_swept, plans, *task) for task in tasks]):
            runs += future.result()
            found = swept_document(runs)
            if out is not None:
                out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def swept_document(runs: list[dict[str, Any]]) -> dict[str, Any]:
    rows = []
    for key in dict.fromkeys((r["answer_tokens"], r["load"], r["arrivals"]) for r in runs):
        here = [r for r in runs if (r["answer_tokens"], r["load"], r["arrivals"]) == key]
        rows.append({"answer_tokens": key[0], "load": key[1], "seeds": len(here), **_mean_row(here)})
    steady = [row["switches_per_horizon"] for row in rows if row["arrivals"] == "poisson"]
    return {
        "command": "python benchmarks/bench_online.py --sweep",
        "requests": SWEEP_REQUESTS,
        "runs": len(runs),
        "worst_ratio_to_better_fixed": max(row["ratio_to_better_fixed"] for row in rows),
        "most_switches_per_horizon_in_steady_load": max(steady),
        "rows": rows,
    }


def _mean_row(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of latencies over seeds, and the most switches."""
    means = {k: sum(row[k] for row in seeds) / len(seeds) for k in seeds[0] if k.endswith("_ms")}
    better = min(value for name, value in means.items() if name != "adaptive_ms")
    return {
        "arrivals": seeds[0]["arrivals"],
        **means,
        "ratio_to_better_fixed": means["adaptive_ms"] / better,
        "ratios": [row["ratio"] for row in seeds],
        "switches": max(row["switches"] for row in seeds),
        "switches_per_horizon": max(row["switches_per_horizon"] for row in seeds),
    }


def corrections(plans: list[tuple[str, Plan]], num: int = 1500) -> list[dict[str, Any]]:
    """Requests per second at full load, simulated at true costs, of plans made with wrong ones.

    `uncorrected` is the plan made with wrong prices, `replanned` after new plans, `oracle` a plan made with
    the true prices.
    """
    true = dict(plans)["throughput"]
    return [_correction(true, device, factor, num) for device, factor in WRONG]


def _correction(true: Plan, device: str, factor: float, num: int) -> dict[str, Any]:
    from tessera.flow import make_plan as plan_for
    from tessera.plan import PlanConfig

    kernel = _costliest(true, device)

    def wrong_by(name: str, where: str) -> float:
        return 1.0 / factor if (name, where) == (kernel, device) else 1.0

    costs = scaled_costs(true.unit, true.costs, wrong_by)
    made = plan_for(true.unit, costs, true.cluster, PlanConfig(true.objective, true.microbatches))

    rates = {
        "uncorrected": _rate(made, true, num),
        "replanned": _rate(_after(made, true, num), true, num),
        "oracle": _rate(true, true, num),
    }
    lost = rates["oracle"] / rates["uncorrected"] - 1.0
    return {"kernel": kernel, "device": device, "real_over_planned": factor, **rates, "oracle_gain": lost}


def _steps(plan: Plan) -> list[Any]:
    return list(zip(plan.unit.graphs, plan.costs, strict=True))


def _costliest(plan: Plan, device: str) -> str:
    at = plan.cluster.names.index(device)
    found: dict[str, float] = {}
    for graph, costs in _steps(plan):
        for launch in range(len(costs.costs)):
            name = graph.trace.kernel_of(launch).name
            found[name] = found.get(name, 0.0) + costs.us(launch, at)
    return max(found, key=lambda name: found[name])


def _rate(plan: Plan, true: Plan, num: int) -> float:
    requests = Scenario(make_arrivals("batch:1000", num, 0, LENGTHS)).requests(true)
    return capacity_per_s(plan, requests, Truth(true))


def _after(made: Plan, true: Plan, num: int) -> Plan:
    """The plan in force after requests were served at full load by a monitor."""
    requests = Scenario(make_arrivals(f"batch:{num}", num, 0, LENGTHS)).requests(true)
    known = capabilities([made], requests)
    monitor = Monitor(known, MonitorConfig(window_s=num / known[0].capacity_per_s / 20))
    window_s = monitor.window_s
    planner = replanner(replan, requests)
    server = AdaptiveServer(monitor, [made], requests, Truth(true), planner=planner, replan_s=window_s)
    server.run()
    return server.plans[made.policy]


def real(num: int = 60, rounds: int = 3) -> dict[str, Any]:
    """Two plans of a tiny model on two CPU devices: gain of the pipeline over one device, both ways.

    The plans take turns and the best rate of each counts: other work can only slow a run down.
    """
    rates: dict[str, dict[str, float]] = {"single": {}, "layer-pipeline": {}}
    with tempfile.TemporaryDirectory() as folder:
        _tessera(folder, "capture", "tiny-llama", "--batch", "2", "--context", "64", "-o", "t.trace")
        _tessera(folder, "profile", "t.trace", "--devices", "cpu,cpu", "-o", "t.costs", "--store", "store")
        for _ in range(rounds):
            for name, best in rates.items():
                for key, rate in _both(folder, name, num).items():
                    best[key] = max(rate, best.get(key, 0.0))
    keys = ("measured_per_s", "simulated_per_s")
    gain = {key: rates["layer-pipeline"][key] / rates["single"][key] for key in keys}
    return {"rates": rates, "gain": gain, "ratio_of_gains": gain[keys[0]] / gain[keys[1]]}


def _both(folder: str, policy: str, num: int) -> dict[str, float]:
    """Requests per second of one plan, run and simulated."""
    words = ("--costs", "t.costs", "--microbatches", "2", "--policy", policy, "-o", "t.plan")
    _tessera(folder, "plan", "t.trace", *words)
    ran = _tessera(folder, "run", "t.plan", "--requests", str(num))
    most = max(ran["per_device"], key=lambda d: d["busy_us"])
    simulated = _tessera(folder, "simulate", "t.plan", "--requests", str(num))
    seconds = most["busy_us"] / most["utilisation"] * 1e-6
    return {"measured_per_s": num / seconds, "simulated_per_s": simulated["throughput"]}


def _tessera(folder: str, *words: str) -> Any:
    command = [sys.executable, "-m", "tessera", *words, "--json"]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Prints tables; with --out writes them and JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--only", help="one part, by its name; others in the JSON beside --out stay")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="the monitor at a few loads, nothing else")
    parser.add_argument("--sweep", action="store_true", help="the monitor over seeds, loads and streams")
    parser.add_argument("--json", action="store_true", help="print JSON; with --quick and --sweep")
    options = parser.parse_args()
    plans = make_plans()
    if options.quick or options.sweep:
        result = quick(plans) if options.quick else sweep(plans, options.out)
        print(json.dumps(result) if options.json else shown("quick", result["rows"]))
        return
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {sys.version.split()[0]}", "lengths": LENGTHS}
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("growth", lambda: growth(plans, options.requests)),
        ("queues", queues),
        ("policies", lambda: policies(plans)),
        ("corrections", lambda: corrections(plans)),
        *([("real", real)] if options.real else []),
    ]
    if options.only and options.out is not None and options.out.with_suffix(".json").exists():
        found = json.loads(options.out.with_suffix(".json").read_text())
    for name, work in parts:
        if options.only not in (None, name):
            continue
        found[name] = work()
        print(shown(name, found[name]), flush=True)
        if options.out is not None:
            write(options.out, found)


def shown(name: str, part: Any) -> str:
    """One part as Markdown."""
    text = table(part) if isinstance(part, list) else f"```json\n{json.dumps(part, indent=2)}\n```"
    return f"## {name}\n\n{text}\n"


def write(path: Path, found: dict[str, Any]) -> None:
    """Tables and JSON beside each other."""
    path.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
    parts = [shown(name, part) for name, part in found.items() if not isinstance(part, str)]
    path.with_suffix(".md").write_text("\n".join(["# Serving, simulated\n", HEAD, *parts]))


HEAD = """Made by `python benchmarks/bench_online.py --real --out benchmarks/results/online_202611`. Rates and
latencies are simulated (costs fitted), but for `measured_per_s`. `process_s` is what the process itself used;
the machine had other work, so `wall_s` is larger than it needs to be. `real` is of earlier code, with other
work on both cores, so that two workers could hardly run side by side; it was not made again.
"""

if __name__ == "__main__":
    main()
