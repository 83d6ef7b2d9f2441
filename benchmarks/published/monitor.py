"""Figure 11: latency and switches over the monitor's window and threshold.

A latency and a throughput plan of Llama on A100 + L40S serve requests in phases. The publication's threshold
is a ratio of loads (1.5); ours is the number of standard errors by which a load must be past the crossing.
Windows are swept around the publication's 300 ms, in which hardly one of these requests arrives, and around
ours, which is long enough for 100.

`ours_switch_ms` is the mean time without a token of a request that a switch moves (simulated);
`ours_switch_by_pages_ms` how long the link takes for the pages of all requests present on average (modelled).
"""

from statistics import fmean
from typing import Any

from benchmarks.paper.online import row_of
from benchmarks.published import figures
from benchmarks.published.setup import PAIRS, cluster
from benchmarks.row_service.metrics import report_of
from benchmarks.row_service.study import Scenario, compare, known_of, watched

from tessera.adapt.monitor import Monitor, MonitorConfig
from tessera.capture import outlines
from tessera.flow import make_unit, price, record_compiled
from tessera.ir import BufferKind, Objective, Plan, Step
from tessera.plan import QUICK, PlanConfig, solve
from tessera.simulate import SteadyRates
from tessera.simulate.arrivals import make_arrivals

MODEL, BATCH, PROMPT, OUTPUT, MICROBATCHES = "llama-3-8b", 16, 1024, 256, 4
NUM_REQUESTS, NUM_KNOWN = 300, 150
LENGTHS = f"geometric:{PROMPT},{OUTPUT}"
# Mean load in phases, as a share of the capacity.
SHARE = 0.6
WINDOWS_MS = (30, 90, 150, 300, 600, 1500)
BETAS = (1.1, 1.3, 1.5, 2.0, 3.0)
USUAL, ERRORS = (0.1, 0.3, 1.0, 3.0), (0.5, 1.0, 1.5, 2.0, 3.0)


def _plans() -> list[tuple[str, Plan]]:
    steps = (Step(MODEL, "prefill", BATCH, PROMPT, 0, OUTPUT), Step(MODEL, "decode", BATCH, PROMPT + OUTPUT))
    unit = make_unit([outlines.find_or_make(step, record_compiled) for step in steps], (1, OUTPUT))
    devices = cluster(PAIRS["a100_l40s"])
    costs = price(unit, devices)
    found = []
    for goal in (Objective.LATENCY, Objective.THROUGHPUT):
        config = PlanConfig(goal, MICROBATCHES, is_served=True, shown_microbatches=(), search=QUICK)
        found.append((goal.value, solve(unit, costs, devices, config, SteadyRates(QUICK.long_window))))
    return found


def _pages_ms(num_requests: float, plan: Plan) -> float:
    """Milliseconds of a link for the keys and values of requests in the middle of their answers."""
    trace = plan.graphs[-1].trace
    row_bytes = sum(trace.buffers[b].size_bytes for b in trace.buffers_of(BufferKind.STATE)) / BATCH
    share = (PROMPT + OUTPUT / 2) / (PROMPT + OUTPUT)
    return num_requests * row_bytes * share / (plan.cluster.links[0].gbps * 1e9) * 1e3


def fig11(is_quick: bool) -> list[dict[str, Any]]:
    doc = figures()["fig11_monitor"]["published"]
    by_window = {row[0]: row[1:] for row in doc["window_ms_at_beta_1_5"]["rows"]}
    by_beta = {row[0]: row[1:] for row in doc["beta_at_window_300_ms"]["rows"]}
    plans = _plans()
    known = known_of(plans, Scenario(make_arrivals("poisson:1", NUM_KNOWN, 0, LENGTHS)))
    best = max(x.capacity_per_s for x in known)
    text = f"bursty:{SHARE * best:.5g},2,0.4,100"
    setting = Scenario(make_arrivals(text, NUM_REQUESTS, 0, LENGTHS))
    fixed, usual_s = compare(plans, setting), Monitor(known).window_s
    windows = [(w / 1e3, 1.5, "window", by_window[w]) for w in WINDOWS_MS]
    windows += [(0.3, b, "threshold", by_beta[b]) for b in BETAS]
    windows += [(x * usual_s, 1.0, "window", None) for x in USUAL]
    windows += [(usual_s, e, "threshold", None) for e in ERRORS if e != 1.0]
    if is_quick:
        windows = windows[::2]
    rows, present = [], max(x.usual(SHARE * best) for x in known)
    for window_s, errors, swept, published in windows:
        served = watched(plans, setting, known, MonitorConfig(window_s=window_s, errors=errors))
        row = row_of(SHARE, text, fixed, report_of(served, [p for _, p in plans], setting.arrivals, best))
        rows.append(
            {
                "pair": "a100_l40s",
                "model": MODEL,
                "policy": f"monitor, {swept} swept",
                "unit": "ms per token",
                "window_ms": round(1e3 * window_s, 1),
                "threshold": errors,
                "published": published[0] if published else None,
                "published_switches": published[1] if published else None,
                "re_measured": None,
                "ours": round(row["normalised_ms"]["adaptive"], 2),
                "ours_best_batch": None,
                "ours_switches": row["switches"],
                "ours_over_better_fixed": round(row["ratio_to_better_fixed"] or 0.0, 3),
                "ours_switch_ms": round(1e3 * fmean(served.stops_s), 1) if served.stops_s else None,
                "ours_switch_by_pages_ms": round(_pages_ms(present, plans[0][1]), 1),
            }
        )
    return rows
