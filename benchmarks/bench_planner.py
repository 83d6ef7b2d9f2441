"""How good plans are and how long they take: made-up models, and captured ones at full size.

    python -m benchmarks.bench_planner [--parts growth devices quality milp latency captured] [-o FOLDER]

growth    planning time over launches, two devices: the linear program alone, and with simulation
devices   the same over devices, with the gap to the bound
quality   simulated throughput with four microbatches, as a share of the bound, beside the coarse policies
milp      against one placement by HiGHS (60 s), under the same costs: rate and time
latency   one request alone: distance to a proved lower bound
captured  quality, for the built-in models recorded at full size without a GPU and priced by `tessera.profile`

Every figure but the seconds is modelled or simulated. `cpu s` is this process's time, which other work on the
machine hardly changes; `wall s` is the clock's. A bound is that of busy time: it holds for any microbatches.
Shares of the bound are those of requests that start spread over time, seen for ten requests' worth of work
behind four to settle, six behind three of very long programs. `of_bound_depth` is the share of the bound with
one row more: all launches and transfers of a request in series, at most as many periods as there are
microbatches. A request that overlaps with itself may beat that bound; it only says how little of the distance
Little's law explains.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.planner_instances import Case, Spec, make_case

from tessera import ir
from tessera.plan import PlanConfig, solve
from tessera.plan.config import FULL
from tessera.plan.latency import bound_us
from tessera.plan.pricing import throughput
from tessera.plan.pricing.milp import best_placement
from tessera.plan.problem import build
from tessera.plan.search.task import Task
from tessera.simulate import SteadyRates

FAMILIES = ("dense", "moe", "ssm", "diffusion", "random")
Figures = dict[str, Any]
# What is captured: (name, [(step, batch, context, reserve)], runs of each step).
CAPTURED = (
    ("llama-3-8b", (("prefill", 2, 512, 128), ("decode", 2, 640, 0)), (1, 32)),
    ("gpt-oss-20b", (("prefill", 2, 512, 128), ("decode", 2, 640, 0)), (1, 32)),
    ("mamba-codestral-7b", (("prefill", 2, 256, 128), ("decode", 2, 384, 0)), (1, 32)),
    ("qwen2.5-vl-7b", (("encode", 1, 256, 0), ("prefill", 2, 512, 128), ("decode", 2, 640, 0)), (1, 1, 32)),
    ("sd3.5-medium", (("denoise", 2, 1024, 0),), (28,)),
)
PAIRS = ("emu:a100,emu:l40s", "emu:h100,emu:h20")


def timed(work: Callable[[], ir.Plan]) -> tuple[ir.Plan, Figures]:
    """A plan and how long it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    plan = work()
    return plan, {
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
        "launches": plan.unit.num_launches,
        "devices": len(plan.cluster.devices),
        "lanes": len(plan.lanes),
        "gap": float(plan.gap),
    }


def by_busy_time(case: Case, objective: ir.Objective = ir.Objective.THROUGHPUT) -> tuple[ir.Plan, Figures]:
    """Without simulation."""
    return timed(lambda: solve(*case, PlanConfig(objective)))


def simulated(case: Case, microbatches: int) -> tuple[ir.Plan, Figures]:
    """With it, and what it says."""
    rates = SteadyRates()
    config = PlanConfig(ir.Objective.THROUGHPUT, microbatches)
    plan, row = timed(lambda: solve(*case, config, rates))
    reached = {b.name: b.throughput_per_s for b in plan.baselines if b.throughput_per_s}
    task = Task(build(*case), microbatches)
    assert task.free.mix.columns
    deep = throughput.generate(task.pool, float(microbatches)).bound_per_s
    row |= {
        "slots": microbatches,
        "of_bound": plan.simulated_per_s / plan.bound_per_s,
        "of_bound_depth": plan.simulated_per_s / min(deep, plan.bound_per_s),
        "data_parallel": reached.get("data-parallel", 0.0) / plan.bound_per_s,
        "best_coarse": max(reached.values()) / plan.bound_per_s,
    }
    return plan, row


def growth() -> Iterator[Figures]:
    """Over launches."""
    for launches in (200, 1000, 5000, 20000):
        spec = Spec("dense", launches)
        case = make_case(spec)
        yield {"part": "growth", "instance": spec.name, "how": "linear program"} | by_busy_time(case)[1]
        yield {"part": "growth", "instance": spec.name, "how": "with simulation"} | simulated(case, 4)[1]


def devices() -> Iterator[Figures]:
    """Over devices: some alike, or all of four kinds."""
    for launches, num, kinds in (
        (5000, 4, 2),
        (5000, 4, 4),
        (5000, 8, 2),
        (5000, 8, 4),
        (5000, 16, 2),
        (2000, 16, 4),
    ):
        spec = Spec("dense", launches, num, kinds)
        yield {"part": "devices", "instance": spec.name} | by_busy_time(make_case(spec))[1]
    for family in ("moe", "diffusion", "random"):
        spec = Spec(family, 2000, 4, 4)
        yield {"part": "devices", "instance": spec.name} | by_busy_time(make_case(spec))[1]


def quality() -> Iterator[Figures]:
    """Four requests in flight on two devices."""
    for family in FAMILIES:
        for link, seed in (("pcie4", 0), ("pcie4", 1), ("ib100", 2), ("nvlink", 3)):
            spec = Spec(family, 300, link=link, seed=seed)
            yield {"part": "quality", "instance": spec.name} | simulated(make_case(spec), 4)[1]


def milp() -> Iterator[Figures]:
    """One placement by HiGHS."""
    for family in FAMILIES:
        for num in (2, 3) if family == "dense" else (2,):
            spec = Spec(family, 200, num, num)
            case = make_case(spec)
            plan, row = by_busy_time(case)
            start = time.perf_counter()
            found = best_placement(build(*case))
            seconds = time.perf_counter() - start
            rate = 1e6 / float(found[0].busy_us.max()) if found else None
            yield (
                {"part": "milp", "instance": spec.name}
                | row
                | {
                    "milp_wall_s": round(seconds, 2),
                    "milp_of_plan": rate / plan.throughput_per_s if rate else None,
                    "times_faster": seconds / max(row["wall_s"], 1e-3),
                }
            )


def latency() -> Iterator[Figures]:
    """One request alone: made-up models on two, four and eight devices, then captured ones."""
    specs = [Spec(family, 600, seed=seed) for family in FAMILIES for seed in (0, 1)]
    specs += [Spec(family, 5000) for family in ("dense", "moe", "random")]
    specs += [Spec(family, 600, 4, 4) for family in ("dense", "moe", "diffusion", "random")]
    specs += [Spec(family, 600, 8, 4, seed=3) for family in ("moe", "diffusion")]
    made = ((spec.name, make_case(spec)) for spec in specs)
    for name, case in chain(made, captured_cases()):
        plan, row = by_busy_time(case, ir.Objective.LATENCY)
        problem = build(*case)
        row["latency_gap"] = plan.latency_us / bound_us(problem, FULL) - 1.0
        yield {"part": "latency", "instance": name} | row


def captured() -> Iterator[Figures]:
    """Built-in models at full size."""
    for name, case in captured_cases():
        yield {"part": "captured", "instance": name} | simulated(case, 4)[1]


def captured_cases() -> Iterator[tuple[str, Case]]:
    """Built-in models recorded at full size, on pairs of devices."""
    from tessera.capture import record_step
    from tessera.flow import make_unit, price
    from tessera.profile import parse_devices, wire

    for model, steps, counts in CAPTURED:
        traces = [record_step(ir.Step(model, k, b, c, 0, r), "fake") for k, b, c, r in steps]
        unit = make_unit(traces, counts)
        for pair in PAIRS:
            cluster = wire(parse_devices(pair), ["pcie4"])
            yield f"{model} {pair}", (unit, price(unit, cluster), cluster)


PARTS: dict[str, Callable[[], Iterator[Figures]]] = {
    "growth": growth, "devices": devices, "quality": quality, "milp": milp, "latency": latency,
    "captured": captured,
}  # fmt: skip


def summary(rows: list[Figures]) -> Figures:
    """What the issue asks for, in figures."""
    judged = [r for r in rows if r["part"] in ("quality", "captured")]
    found: Figures = {}
    if judged:
        found["median_of_bound"] = statistics.median(r["of_bound"] for r in judged)
        found["least_of_bound"] = min(r["of_bound"] for r in judged)
        found["below_data_parallel"] = sum(bool(r["of_bound"] < r["data_parallel"] - 1e-9) for r in judged)
        found["below_best_coarse"] = sum(bool(r["of_bound"] < r["best_coarse"] - 1e-9) for r in judged)
    single = [r["milp_of_plan"] for r in rows if r.get("milp_of_plan")]
    if single:
        found["most_milp_of_plan"] = max(single)
    return found


def verdicts(rows: list[Figures]) -> Iterator[str]:
    """What was aimed at, and whether it was reached."""

    def said(what: str, value: float, limit: float, is_least: bool = False) -> str:
        is_good = value >= limit if is_least else value <= limit
        return f"- {'reached' if is_good else 'MISSED'}: {what}: {value:.4g}, aim {limit:g}"

    found = summary(rows)
    if "median_of_bound" in found:
        yield said("median share of the bound, 4 microbatches", found["median_of_bound"], 0.95, True)
        yield said("instances below data-parallel", found["below_data_parallel"], 0)
    for size, limit in ((4980, 1.0), (19980, 5.0)):
        for row in (r for r in rows if r["part"] == "growth" and r["launches"] == size):
            yield said(f"CPU s, {size} launches, 2 devices, {row['how']}", row["cpu_s"], limit)
    for row in (r for r in rows if r["part"] == "devices"):
        yield said(f"CPU s, {row['instance']}", row["cpu_s"], 60.0 if row["devices"] > 8 else 20.0)
        yield said(f"gap, {row['instance']}", row["gap"], 0.02)
    if "most_milp_of_plan" in found:
        yield said("best single placement (HiGHS) over the plan", found["most_milp_of_plan"], 1.0)
    for row in (r for r in rows if r["part"] == "latency"):
        yield said(f"latency over its bound, {row['instance']}", row["latency_gap"], 0.05)


def table(rows: list[Figures]) -> str:
    """Markdown, one table a part."""
    text = []
    for part in dict.fromkeys(r["part"] for r in rows):
        listed = [r for r in rows if r["part"] == part]
        heads = [h for h in dict.fromkeys(k for r in listed for k in r) if h != "part"]
        text += [f"\n## {part}\n", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        text += ["| " + " | ".join(_cell(r.get(h)) for h in heads) + " |" for r in listed]
    return "\n".join(text)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "none" if value is None else str(value)


def draw(rows: list[Figures], path: Path) -> None:
    """Time over launches and over devices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    for how in ("linear program", "with simulation"):
        listed = [r for r in rows if r["part"] == "growth" and r["how"] == how]
        left.loglog([r["launches"] for r in listed], [r["cpu_s"] for r in listed], "o-", label=how)
    left.set(xlabel="launches (2 devices)", ylabel="planning, CPU s")
    left.legend(fontsize=8)
    for kinds in ("k2", "k4"):
        listed = [
            r
            for r in rows
            if r["part"] == "devices" and "dense-5000" in r["instance"] and kinds in r["instance"]
        ]
        right.semilogy(
            [r["devices"] for r in listed], [r["cpu_s"] for r in listed], "o-", label=f"{kinds[1]} kinds"
        )
    right.set(xlabel="devices (5,000 launches)")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def write(rows: list[Figures], folder: Path) -> None:
    """planner_202611.json, .md and .png."""
    place = folder / "planner_202611"
    found = json.dumps(summary(rows))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.with_suffix(".json").write_text(
        json.dumps({"summary": summary(rows), "rows": rows}, indent=1) + "\n"
    )
    head = (
        f"# Planner, November 2026\n\n{(__doc__ or '').strip()}\n\nSummary: `{found}`\n\n"
        + "\n".join(verdicts(rows))
        + "\n"
    )
    place.with_suffix(".md").write_text(head + table(rows) + "\n")
    if {"growth", "devices"} <= {r["part"] for r in rows}:
        draw(rows, place.with_suffix(".png"))


def main() -> None:
    """Runs the parts asked for, or takes rows that earlier runs printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument(
        "--printed", nargs="+", type=Path, help="what earlier runs printed, instead of running"
    )
    parser.add_argument("-o", "--output", type=Path, help="folder for planner_202611.md, .json and .png")
    options = parser.parse_args()
    rows: list[Figures] = []
    for path in options.printed or ():
        lines = [json.loads(x) for x in path.read_text().splitlines() if x.startswith("{")]
        rows += [x for x in lines if "part" in x]
    for part in () if options.printed else options.parts:
        for row in PARTS[part]():
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(json.dumps(summary(rows)))
    if options.output:
        write(rows, options.output)


if __name__ == "__main__":
    main()
