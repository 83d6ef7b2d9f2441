"""The results of gpu_execute.py for people: NAME.json -> NAME.md.

python benchmarks/gpu_execute_table.py benchmarks/results/execute_h200_202611.json
"""

import json
import sys
from pathlib import Path
from typing import Any

POLICIES = ("throughput", "data-parallel", "prefill-decode", "attention-ffn", "layer-pipeline")


def table(whole: dict[str, Any]) -> str:
    """All sections."""
    about = whole["about"]
    lines = [
        "# Plans run on one GPU",
        "",
        f"{about.get('gpu')}, {about.get('sms')} SMs, torch {about.get('torch')}. "
        f"Command: `{whole['command']}`",
        "",
        "Rates are requests (work units) per second. On `/sm=` devices they are measured and so are the "
        "costs, with the other part busy. On `/as=` devices time is modelled: rate = measured rate x scale. "
        "'LP' is what the plan's linear program predicted, 'simulated' the planner's simulation (of every "
        "policy in the order of the columns), 'chosen' the policy that `pick` took after a "
        "first round; the rates are of a second round. Every round has at least five requests a slot and "
        "counts neither the filling nor the emptying of the pipeline. 'equal' says that outputs and state "
        "have the undivided run's bits, 'hidden' is the share of the transfers' time in which the device "
        "that waited for them computed. 'overrun' is by how much launches on stretched devices ended later "
        "than due, as a share of the time that they hold the device: it makes requests slower, and the rate "
        "too where no other request could fill the gap.",
    ]
    for name, part in whole.items():
        if name.startswith("pairs"):
            lines += ["", *_pairs(name, part)]
    lines += ["", *_overhead(whole.get("overhead", {})), "", *_soak(whole.get("soak", {}))]
    lines += ["", *_probe(whole.get("probe", {})), "", *_unfinished(whole)]
    return "\n".join(lines).rstrip() + "\n"


def _pairs(name: str, part: dict[str, Any]) -> list[str]:
    family = part.get("family", {})
    lines = [
        f"## {name.removeprefix('pairs-')}: launches {family.get('launches')}, runs of each step "
        f"{family.get('counts')}",
        "",
        f"| devices | scale | {' | '.join(POLICIES)} | chosen | chosen / best coarse | chosen / its LP "
        "| throughput / best coarse | throughput / its LP | measured / simulated | hidden | overrun "
        "| equal |",
        f"|{'---|' * (len(POLICIES) + 11)}",
    ]
    if "from" in part:
        but = "".join(f", but for `{devices}`" for devices in part.get("again", []))
        lines[1:1] = ["", f"From an earlier run{but}: `{part['from']}`"]
    for key, rates in part.items():
        devices, _, what = key.rpartition(" ")
        if what != "rates" or "error" in rates:
            continue
        priced, hidden = part.get(f"{devices} priced", {}), part.get(f"{devices} hidden", {})
        found = [rates.get(p, {}).get("measured per s", "-") for p in POLICIES]
        equal = all(rates[p]["equal"] for p in POLICIES if p in rates)
        cells = [
            f"`{devices}`", priced.get("scale"), *found, rates.get("chosen"),
            rates.get("chosen / best coarse"), rates.get("chosen / LP"),
            rates.get("throughput / best coarse"), rates["throughput"]["measured / LP"],
            _simulated(rates), hidden.get("hidden", "-"),
            ", ".join(map(str, hidden.get("overrun", {}).values())) or "-",
            "yes" if equal else "**no**",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _simulated(rates: dict[str, Any]) -> str:
    """Of every policy in order, how its rate compares with what the planner's simulation said."""
    found = [rates[p] for p in POLICIES if p in rates]
    return ", ".join(f"{x['measured per s'] / x['simulated per s']:.3f}" for x in found)


def _overhead(part: dict[str, Any]) -> list[str]:
    lines = ["## Overhead: everything on one device against the compiled model, both as CUDA graphs", ""]
    if "from" in part:
        lines += [f"From an earlier run: `{part['from']}`", ""]
    for name in ("compiled kernels", "PTX text"):
        row = part.get(name)
        if row and "ratio" in row:
            times = {k: round(v["median_us"], 1) for k, v in row["times"].items()}
            lines.append(
                f"- {name}: {row['ratio']} of its time, bits equal: {row['equal']}; medians in us: {times}"
            )
    return lines


def _soak(part: dict[str, Any]) -> list[str]:
    row = part.get("soak", {})
    if "requests" not in row:
        return []
    return [
        "## A long run",
        "",
        f"{row['requests']} requests over {len(row['policies'])} plans ({', '.join(row['policies'])}), "
        f"{row['switches']} changes of policy, {row['different']} results different, memory flat: "
        f"{row['flat']} ({row['seconds']} s). In use after every 50 requests: {_spread(row, 'allocated')}; "
        f"reserved by torch: {_spread(row, 'reserved')}.",
    ]


def _spread(row: dict[str, Any], what: str) -> str:
    """The first and the last of some sizes, and how many differ."""
    sizes = row.get(f"{what} bytes after each 50", [])
    return f"{sizes[0]:,} to {sizes[-1]:,} bytes, {len(set(sizes))} sizes" if sizes else "not recorded"


def _probe(part: dict[str, Any]) -> list[str]:
    rows = {k: v for k, v in part.items() if k not in ("seconds", "ended", "from") and "error" not in v}
    return ["## Building blocks", "", *(f"- {k}: `{json.dumps(v)[:900]}`" for k, v in rows.items())]


def _unfinished(whole: dict[str, Any]) -> list[str]:
    lines = []
    for name, part in whole.items():
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            if isinstance(value, dict) and "error" in value:
                lines.append(f"- {name}, {key}: {value['error'].strip().splitlines()[-1][:300]}")
        if isinstance(part.get("error"), str):
            lines.append(f"- {name}: {part['error'].strip().splitlines()[-1][:300]}")
        if part.get("ended", "exit code 0") != "exit code 0" or "skipped" in part:
            lines.append(f"- {name}: {part.get('ended') or part.get('skipped')}")
    return ["## Not finished", "", *lines] if lines else []


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".md").write_text(table(json.loads(source.read_text())))
