"""The document as one page of Markdown: the command, how the ratios are spread, and every row in a table."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.paper.throughput import spread

Row = dict[str, Any]
SPREAD = ("rows", "least", "p10", "p25", "p50", "p75", "p90", "most", "above_1.02")


def summary(found: dict[str, Any]) -> str:
    """The whole page."""
    quick = " --quick" if found["scale"] == "quick" else ""
    missing = found.get("num_missing")
    rest = f", {missing} more to come from the same command" if missing else ""
    lines = [
        f"# The evaluation, {found['scale']} run",
        "",
        f"Made by `python -m benchmarks.paper{quick} -o FOLDER`: {found['num_cases']} cases{rest}. "
        "**Everything is simulated on modelled costs** unless a row's `source` says otherwise; every policy "
        "is at its own best batch, prefill batch and microbatches, at equal memory and equal time limits. "
        "Form and method: docs/evaluation.md.",
    ]
    for name, figure in found["figures"].items():
        beside = found["published"][name]
        lines += ["", f"## {figure['title']}", "", *PARTS[name](found[name])]
        lines += ["", f"Published ({beside['cited']}): {beside['reports']}"]
        lines += ["", f"Why ours differs: {beside['why_ours_differs']}"]
        lines += ["", f"![{name}]({name}.png)"]
    return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    made = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return made + [f"| {' | '.join(row)} |" for row in rows]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spread(title: str, ratios: Iterable[float | None]) -> list[str]:
    found = spread(ratios)
    return (
        []
        if found is None
        else [title, *(_times(x) if isinstance(x := found[k], float) else str(x) for k in SPREAD)]
    )


def _throughput(rows: list[Row]) -> list[str]:
    keys = (
        ("over data-parallel", "ratio_to_data_parallel"),
        ("over the best policy", "ratio_to_best_baseline"),
    )
    groups = [
        ("all", rows),
        *(
            (name, [r for r in rows if r["model"] == name])
            for name in dict.fromkeys(r["model"] for r in rows)
        ),
    ]
    made = [
        _spread(f"{name}: {title}", (r[key] for r in here)) for title, key in keys for name, here in groups
    ]
    heads = (
        "load",
        "devices",
        "link",
        "launches",
        "plan",
        "best policy",
        "times it",
        "times data-parallel",
        "ms",
        "$/M tokens",
    )
    table = (_throughput_cells(r) for r in rows)
    return [*_table(("plan", *SPREAD), [row for row in made if row]), "", *_table(heads, table)]


def _throughput_cells(row: Row) -> list[str]:
    own = row["reached"].get("throughput")
    return [
        row["workload"],
        row["pair"],
        row["link"],
        row["launches"],
        f"{_number(row['policies'].get('throughput'))} {row['unit'].split()[0]}/s",
        row["best_baseline"] or row["why_none"] or "-",
        _times(row["ratio_to_best_baseline"]),
        _times(row["ratio_to_data_parallel"]),
        _number(own["ms"] if own else None),
        _number(row["usd_per_million_tokens"].get("throughput")),
    ]


def _cost(rows: list[Row]) -> list[str]:
    per_usd = _spread("requests per dollar, over two cards alike", (r["ratio_per_usd"] for r in rows))
    rate = _spread("throughput, over two cards alike", (r["ratio_throughput"] for r in rows))
    return _table(("plan", *SPREAD), [row for row in (rate, per_usd) if row])


def _heterogeneity(rows: list[Row]) -> list[str]:
    heads = ("model", "step", "launches", "p5", "p50", "p95", "time that is faster on the second")
    table = (
        [r["model"], s["step"], str(s["launches"]), *(_number(s["all"][p]) for p in ("p5", "p50", "p95")),
         f"{s['all']['time_second_faster']:.0%}"]
        for r in rows for s in r["steps"]
    )  # fmt: skip
    return [f"Time on {rows[0]['second']} over time on {rows[0]['first']}.", "", *_table(heads, table)]


def _online(found: Row) -> list[str]:
    names = list(found["rates"][0]["normalised_ms"])
    heads = ("arrivals", "seeds", *(f"{n}, ms a token" for n in names), "times the better", "worst seed")
    table = (
        [r["arrivals"], str(r["seeds"]), *(_number(r["normalised_ms"].get(n)) for n in names),
         _times(r["ratio_to_better_fixed"]), _times(r["worst_ratio"])]
        for r in found["mean_of_seeds"]
    )  # fmt: skip
    return [f"{found['workload']} on {found['pair']}.", "", *_table(heads, table)]


def _sensitivity(found: Row) -> list[str]:
    heads = ("window, s", "threshold, errors", "ms a token", "times the better", "switches")
    table = (
        [_number(r["window_s"]), _number(r["threshold_errors"]), _number(r["normalised_ms"].get("adaptive")),
         _times(r["ratio_to_better_fixed"]), str(r["switches"])]
        for r in found["rows"]
    )  # fmt: skip
    return _table(heads, table)


def _scaling(rows: list[Row]) -> list[str]:
    heads = ("GPUs", "devices", "plan", "of linear", "best policy", "times it", "times data-parallel")
    table = (
        [str(r["gpus"]), r["devices"], _number(r["policies"].get("throughput")), _number(r["of_linear"]),
         r["best_baseline"] or "-", _times(r["ratio_to_best_baseline"]), _times(r["ratio_to_data_parallel"])]
        for r in rows
    )  # fmt: skip
    return [f"{rows[0]['workload']}.", "", *_table(heads, table)]


def _links(rows: list[Row]) -> list[str]:
    heads = ("GB/s", "times data-parallel", "times the best policy")
    table = (
        [_number(r["gbps"]), _times(r["ratio_to_data_parallel"]), _times(r["ratio_to_best_baseline"])]
        for r in rows
    )
    return [f"{rows[0]['workload']} on {rows[0]['pair']}.", "", *_table(heads, table)]


def _regimes(found: Row) -> list[str]:
    return [f"Verdicts: {', '.join(f'{name} {n}' for name, n in found['verdicts'].items())}."]


PARTS: dict[str, Callable[[Any], list[str]]] = {
    "heterogeneity": _heterogeneity,
    "throughput": _throughput,
    "cost": _cost,
    "online": _online,
    "sensitivity": _sensitivity,
    "scaling": _scaling,
    "links": _links,
    "regimes": _regimes,
}
