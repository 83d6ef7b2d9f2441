"""Figure 12b: CPU time of the placement program over kernels and devices.

Ours solves for a mix of placements (column generation), which is at least as good as the one placement of the
publication's mixed-integer program. Instances are layers of a dense model on devices of unlike strengths.
"""

import time
from typing import Any

from benchmarks.planner_instances import Spec, make_case
from benchmarks.published import figures

from tessera.ir import Objective
from tessera.plan import PlanConfig, solve

# Beyond the published sizes.
LARGER = ((2, 5000), (4, 5000))


def fig12b(is_quick: bool) -> list[dict[str, Any]]:
    doc, rows = figures()["fig12b_solver"], []
    published = {
        (int(group[0]), int(size)): ms
        for group, sizes in doc["published"].items()
        for size, ms in sizes.items()
    }
    again = {
        (int(group[0]), int(size)): row["solver_ms"]
        for group, sizes in doc["re_measured"]["rows"].items()
        for size, row in sizes.items()
    }
    solve(*make_case(Spec("dense", 50)), PlanConfig(Objective.THROUGHPUT))  # imports
    for devices, kernels in sorted({*published, *again, *(() if is_quick else LARGER)}):
        unit, costs, cluster = make_case(Spec("dense", kernels, devices, devices))
        start = time.process_time()
        plan = solve(unit, costs, cluster, PlanConfig(Objective.THROUGHPUT))
        seconds = time.process_time() - start
        rows.append(
            {
                "pair": f"{devices} devices",
                "model": f"{unit.num_launches} launches",
                "policy": "solver",
                "unit": "ms",
                "kernels": kernels,
                "devices": devices,
                "published": published.get((devices, kernels)),
                "re_measured": again.get((devices, kernels)),
                "ours": round(1e3 * seconds, 1),
                "ours_best_batch": None,
                "gap": float(plan.gap),
            }
        )
    return rows
