"""Every figure of the publication in its own set-up: tasks in processes, one document.

    python -m benchmarks.paper --as-published [--quick] [--json] [-o FOLDER]

--quick leaves out Qwen, figure 7 on two pairs and at best batches, and half of figure 11. `ours` is that
set-up, `ours_best_batch` the best configuration of every policy.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.published import clusters, costs, figures, monitor, offline, online, shares, solver, stepwise
from benchmarks.published.setup import MODELS, PAIRS, UNSERVED
from benchmarks.published.tables import markdown

QUICK_MODELS = ("llama_3_1_8b", "gpt_oss_20b")
NUM_QUICK, NUM_FULL = 96, 320
NOT_MADE = {
    "fig8": "99th percentiles stand in fig7 (ours_p99)",
    "fig9": "8 + 8 cards as services: they have no tensor parallelism, so `ours` is a bound",
    "fig10": "stream priorities; measured on dilated devices: benchmarks/results/pipelining_h200_202611.json",
}
Task = tuple[Callable[..., Any], tuple[Any, ...]]


def tasks(is_quick: bool) -> list[Task]:
    """Longest first."""
    models = QUICK_MODELS if is_quick else tuple(MODELS)
    pairs = ("a100_l40s",) if is_quick else tuple(PAIRS)
    found: list[Task] = [(monitor.fig11, (is_quick,))]
    num = NUM_QUICK if is_quick else NUM_FULL
    found += [(online.curve, (case,)) for case in online.cases(pairs, num, has_best=not is_quick)]
    found += [(offline.rate, (case,)) for case in offline.cases(models=models)]
    wide = [case for case in offline.bandwidth_cases(has_best=not is_quick) if case.gbit_per_s != 200.0]
    found += [(offline.rate, (case,)) for case in wide]
    found += [(offline.rate, (case,)) for case in clusters.cases() if not (is_quick and case.is_best)]
    found += [(offline.pipeline_rate, (case,)) for case in offline.PIPELINES.values()]
    found += [(stepwise.rate, (case,)) for case in stepwise.cases(is_quick)]
    found += [(shares.shares, (name,)) for name in (*MODELS, *filter(stepwise.is_known, stepwise.STEPWISE))]
    found += [(costs.document, ())]
    return found


def run(is_quick: bool, jobs: int, advance: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The whole document."""
    start, own, listed = time.perf_counter(), time.process_time(), tasks(is_quick)
    done: dict[Task, Any] = {}
    cpu_s: dict[str, float] = {}
    for task, (found, seconds) in _work_out(listed, jobs):
        name = task[0].__module__.rpartition(".")[2]
        done[task], cpu_s[name] = found, cpu_s.get(name, 0.0) + seconds
        advance(task[0].__name__)
    made = {
        work: {args[0]: found for (other, args), found in done.items() if other is work and args}
        for work in (offline.rate, stepwise.rate, offline.pipeline_rate, online.curve, shares.shares)
    }
    rows = offline.fig6(made[offline.rate] | made[stepwise.rate])
    # Alone: its times are measured.
    solved = solver.fig12b(is_quick)
    if jobs > 1:
        cpu_s["this process"] = time.process_time() - own
    return {
        "about": figures()["about"] | {"set_up": figures()["setup"]},
        "is_quick": is_quick,
        "launches": offline.launches_of(),
        "figures": {
            "fig2b": shares.fig2b(made[shares.shares]),
            "fig3": shares.fig3(made[shares.shares]),
            "fig6": rows,
            "fig7": online.fig7(made[online.curve]),
            "fig9": clusters.fig9(made[offline.rate]),
            "fig10": offline.fig10(made[offline.pipeline_rate]),
            "fig11": done[monitor.fig11, (is_quick,)],
            "fig12a": offline.fig12a(made[offline.rate]),
            "fig12b": solved,
            "table3": offline.table3(rows),
        },
        "ratios": offline.ratios(rows),
        "over_sum": offline.over_sum(rows),
        "two_of_the_better_card": offline.two_alike(rows),
        "costs": done[costs.document, ()],
        "not_made": NOT_MADE | UNSERVED,
        "seconds": round(time.perf_counter() - start, 1),
        # Without imports; on a busy machine `seconds` is much more than these over the number of processes.
        "cpu_seconds": {name: round(seconds, 1) for name, seconds in cpu_s.items()},
    }


def _timed(work: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The result, and CPU seconds."""
    start = time.process_time()
    return work(*args), time.process_time() - start


def _work_out(listed: list[Task], jobs: int) -> Iterable[tuple[Task, tuple[Any, float]]]:
    if jobs <= 1:
        for work, args in listed:
            yield (work, args), _timed(work, *args)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare) as pool:
        futures = {pool.submit(_timed, work, *args): (work, args) for work, args in listed}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _prepare() -> None:
    """One thread a process."""
    import torch

    torch.set_num_threads(1)


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "published.json", folder / "published.md"]
    paths[0].write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(found), encoding="utf-8")
    return paths
