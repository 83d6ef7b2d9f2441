"""The figures' documents as tables for a terminal: the few numbers that carry each figure."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

Cells = list[str]


def tables(name: str, found: Any) -> Table:
    """One table a figure."""
    heads, rows = TABLES[name](found)
    table = Table(*heads, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"


def _heterogeneity(found: Any) -> tuple[Cells, list[Cells]]:
    heads = ["workload", "step", "launches", "p5", "p50", "p95", "time faster on the second", "costs"]
    rows = [
        [row["model"], step["step"], str(step["launches"]),
         *(_number(step["all"][p]) for p in ("p5", "p50", "p95")),
         f"{step['all']['time_second_faster']:.0%}", row["source"]]
        for row in found
        for step in row["steps"]
    ]  # fmt: skip
    return heads, rows


def _throughput(found: Any) -> tuple[Cells, list[Cells]]:
    heads = [
        "load",
        "devices",
        "link",
        "throughput",
        "best baseline",
        "ratio",
        "data-parallel",
        "strict split",
    ]
    rows = [
        [r["workload"], r["pair"], r["link"], _number(r["policies"].get("throughput")),
         r["best_baseline"] or "-", _times(r["ratio_to_best_baseline"]),
         _times(r["ratios"].get("data-parallel")), _times(r["ratios"].get("prefill-decode"))]
        for r in found
    ]  # fmt: skip
    return heads, rows


def _cost(found: Any) -> tuple[Cells, list[Cells]]:
    heads = ["load", "devices", "$/M tokens", "best baseline", "against", "throughput", "per dollar"]
    rows = [
        [
            r["workload"],
            r["pair"],
            _number(r["usd_per_million_tokens"]),
            _number(r["best_baseline_usd_per_million_tokens"]),
            f"{r['gpus']}x {r['alike']}",
            _times(r["ratio_throughput"]),
            _times(r["ratio_per_usd"]),
        ]
        for r in found
    ]
    return heads, rows


def _online(found: Any) -> tuple[Cells, list[Cells]]:
    names = list(found["rates"][0]["normalised_ms"])
    heads = ["arrivals", "seeds", *(f"{n}, ms a token" for n in names), "against the better", "worst"]
    rows = [
        [r["arrivals"], str(r["seeds"]), *(_number(r["normalised_ms"].get(n)) for n in names),
         _times(r["ratio_to_better_fixed"]), _times(r["worst_ratio"])]
        for r in found["mean_of_seeds"]
    ]  # fmt: skip
    return heads, rows


def _sensitivity(found: Any) -> tuple[Cells, list[Cells]]:
    heads = ["window, s", "threshold, errors", "ms a token", "against the better", "switches"]
    rows = [
        [_number(r["window_s"]), _number(r["threshold_errors"]), _number(r["normalised_ms"].get("adaptive")),
         _times(r["ratio_to_better_fixed"]), str(r["switches"])]
        for r in found["rows"]
    ]  # fmt: skip
    return heads, rows


def _scaling(found: Any) -> tuple[Cells, list[Cells]]:
    heads = ["GPUs", "devices", "throughput", "of linear", "best baseline", "ratio"]
    rows = [
        [str(r["gpus"]), r["devices"], _number(r["policies"].get("throughput")), _number(r["of_linear"]),
         r["best_baseline"] or "-", _times(r["ratio_to_best_baseline"])]
        for r in found
    ]  # fmt: skip
    return heads, rows


def _links(found: Any) -> tuple[Cells, list[Cells]]:
    heads = ["workload", "GB/s", "over data-parallel", "over the best baseline"]
    rows = [
        [r["workload"], _number(r["gbps"]), _times(r["ratio_to_data_parallel"]),
         _times(r["ratio_to_best_baseline"])]
        for r in found
    ]  # fmt: skip
    return heads, rows


def _regimes(found: Any) -> tuple[Cells, list[Cells]]:
    heads = ["devices", "load", "batch", "link", "over data-parallel", "over the best coarse", "best"]
    rows = [
        [c["pair"], c["workload"], str(c["batch"]), c["link"],
         _times(c["ratio_to_data_parallel"]), _times(c["ratio_to_best_coarse"]), c["verdict"]]
        for c in found["cells"]
    ]  # fmt: skip
    return heads, rows


TABLES: dict[str, Callable[[Any], tuple[Cells, list[Cells]]]] = {
    "heterogeneity": _heterogeneity,
    "throughput": _throughput,
    "cost": _cost,
    "online": _online,
    "sensitivity": _sensitivity,
    "scaling": _scaling,
    "links": _links,
    "regimes": _regimes,
}
