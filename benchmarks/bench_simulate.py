"""How fast the simulator is, and how its time grows with requests.

    python benchmarks/bench_simulate.py [--json]

A chain of launches split over two devices, several requests in flight. Times are this machine's; compare rows
of one run, not runs.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from factories import make_chain, make_plan
from tessera.ir import Plan
from tessera.simulate import simulate, throughput_per_s

LAUNCHES, CUTS = 200, 8
REQUESTS = (100, 1_000, 10_000)


def make_instance() -> Plan:
    """Every request crosses between the devices CUTS times."""
    placement = [(i * (CUTS + 1) // LAUNCHES) % 2 for i in range(LAUNCHES)]
    return make_plan([make_chain(LAUNCHES)], [[placement]], microbatches=4)


def measure(plan: Plan, num_requests: int) -> dict[str, Any]:
    """One run without detail."""
    start = time.perf_counter()
    timeline = simulate(plan, num_requests, is_detailed=False)
    seconds = time.perf_counter() - start
    return {
        "requests": num_requests,
        "seconds": seconds,
        "us_per_request": 1e6 * seconds / num_requests,
        "simulated_per_s": throughput_per_s(timeline),
    }


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plan = make_instance()
    rows = [measure(plan, num) for num in REQUESTS]
    if options.json:
        print(json.dumps({"launches": LAUNCHES, "cuts": CUTS, "rows": rows}, indent=2))
        return
    print(f"{LAUNCHES} launches a request, {CUTS} crossings, {plan.microbatches} in flight")
    for row in rows:
        print(f"{row['requests']:>8} requests  {row['seconds']:8.3f} s  {row['us_per_request']:8.1f} us each")


if __name__ == "__main__":
    main()
