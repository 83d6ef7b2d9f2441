"""The results of gpu_execute.py for people: NAME.json -> NAME.md.

python benchmarks/gpu_execute_table.py benchmarks/results/execute_h200_202611.json
"""

import json
import sys
from pathlib import Path
from typing import Any

NOTE = (
    "One worker process per device, both on one card under CUDA MPS. Rates are requests (work units) per "
    "second. On `/as=` devices time is modelled: rate = measured rate x scale, where every launch is "
    "dilated to the modelled time of another GPU. 'simulated' is the planner's simulation of the same "
    "plan. 'equal' says that every output and all state have the bits of the launches run one by one on one "
    "device."
)


def table(whole: dict[str, Any]) -> str:
    """All sections."""
    about = whole["about"]
    lines = [
        "# Plans on one GPU, one worker process per device",
        "",
        f"{about.get('gpu')}, {about.get('sms')} SMs, torch {about.get('torch')}.",
        f"Command: `{whole['command']}`",
        "",
        NOTE,
        "",
        "| family | devices | scale | policy | measured/s | simulated/s | measured / simulated | equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    parts = {name: part for name, part in whole.items() if name.startswith("pairs")}
    for name, part in parts.items():
        lines += _rates(name.removeprefix("pairs-"), part)
    lines += [
        "",
        "| family | devices | plan / data-parallel | plan / best coarse | best coarse |",
        "|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        for key, row in _of(part, "compared"):
            ratios = f"{row['throughput / data-parallel']} | {row['throughput / best coarse']}"
            lines.append(f"| {name.removeprefix('pairs-')} | {key} | {ratios} | {row['best coarse']} |")
    lines += _transports(parts)
    lines += _one_process(parts, whole.get("one process", {}))
    lines += _loads({name: part for name, part in whole.items() if name.startswith("loads")})
    for name in ("overhead", "soak", "small", "probe"):
        if name in whole:
            lines += ["", f"## {name}", "", "```json", json.dumps(whole[name], indent=1), "```"]
    ended = {
        name: part["ended"] for name, part in whole.items() if isinstance(part, dict) and "ended" in part
    }
    lines += ["", f"How the parts ended: {ended}"]
    lines += ["", *(line for name, part in parts.items() for line in _other_runs(name, part))]
    return "\n".join(lines).rstrip() + "\n"


FAMILIES = {
    "llama": "Llama 3 8B",
    "llama-decode": "Llama 3 8B, decode",
    "gpt-oss": "gpt-oss 20B",
    "mamba": "Mamba Codestral 7B",
    "qwen-vl": "Qwen2.5-VL 7B",
    "sd3.5": "SD 3.5 medium",
}


def side_by_side(whole: dict[str, Any]) -> str:
    """The README's table: a plan as the linear program predicts it, as simulated and as measured."""
    lines = [
        "| model | cards | predicted | simulated | measured | gain, simulated | gain, measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(name for name in whole if name.startswith("pairs")):
        family = name.removeprefix("pairs-")
        for devices, found in _of(whole[name], "ipc"):
            plan, other = found["throughput"], found["data-parallel"]
            cards = " + ".join(word.rpartition("=")[2].upper() for word in devices.split(","))
            rates = [plan[f"{word} per s"] for word in ("LP", "simulated", "measured")]
            gains = [plan[f"{word} per s"] / other[f"{word} per s"] for word in ("simulated", "measured")]
            cells = [f"{rate:.1f}" for rate in rates] + [f"{gain:.2f}" for gain in gains]
            lines.append(f"| {FAMILIES.get(family, family)} | {cards} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _other_runs(name: str, part: dict[str, Any]) -> list[str]:
    """The command that made rows that were taken over."""
    found = {key: value for key, value in part.items() if key.endswith("from")}
    return [f"- {name}, {key.removesuffix('from').strip() or 'all'}: `{found[key]}`" for key in found]


def _of(part: dict[str, Any], what: str) -> list[tuple[str, Any]]:
    """(devices, result) of one kind."""
    found = [(key.removesuffix(f" {what}"), value) for key, value in part.items() if key.endswith(f" {what}")]
    return [(key, value) for key, value in found if "error" not in value]


def _rates(family: str, part: dict[str, Any]) -> list[str]:
    lines = []
    for devices, found in _of(part, "ipc"):
        scale = part.get(f"{devices} priced", {}).get("scale", 1.0)
        for policy, row in found.items():
            if isinstance(row, dict) and "measured per s" in row:
                figures = (
                    f"{row['measured per s']} | {row['simulated per s']} | {row['measured / simulated']}"
                )
                lines.append(
                    f"| {family} | {devices} | {scale:.2f} | {policy} | {figures} | {row['equal']} |"
                )
    return lines


def _transports(parts: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "| family | devices | transport | plan, measured/s | beside | equal |",
        "|---|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        family = name.removeprefix("pairs-")
        for devices, found in _of(part, "halves"):
            for transport in ("ipc", "nvshmem"):
                row = found[transport]["throughput"]
                beside = f"halves of the card; nvshmem / ipc {found['nvshmem / ipc']}"
                rate = row["measured per s"]
                lines.append(f"| {family} | {devices} | {transport} | {rate} | {beside} | {row['equal']} |")
        for devices, found in _of(part, "host"):
            row = found["throughput"]
            beside = f"simulated for that link {row['simulated per s']}, link {found['link']} us, GB/s"
            rate = row["measured per s"]
            lines.append(f"| {family} | {devices} | host | {rate} | {beside} | {row['equal']} |")
    return lines


def _loads(parts: dict[str, Any]) -> list[str]:
    """The plan and the best coarser policy of a load, each at its own best batch."""
    if not parts:
        return []
    lines = [
        "",
        "Loads of the evaluation with a part of their models' layers, every policy at its own best batch, as "
        "the search chose it; ratios are of rows per second:",
        "",
        "| load | cards | layers | plan | best coarser | ratio, predicted | ratio, measured "
        "| measured / predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part in parts.values():
        found, load = part.get("measured", {}), part.get("load", {})
        if "measured ratio" not in found:
            continue
        rates, best = found["rates"], found["best"]
        batches = ["/".join(map(str, dict.fromkeys(rates[n]["batch"].values()))) for n in ("plan", best)]
        ways = [f"{b} x {rates[n]['microbatches']}" for n, b in zip(("plan", best), batches, strict=True)]
        cells = [
            f"{load['model']} {load['kind']} at {load['context']}", "+".join(load["gpus"]),
            f"{load['layers']} of {load['whole']}", ways[0], f"{best}, {ways[1]}", found["predicted ratio"],
            found["measured ratio"], found["measured / predicted"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _one_process(parts: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The same plans by an executor that has all devices in one process."""
    lines = ["", f"Beside it, {other['what']}:", ""] if other else []
    lines += (
        ["| family | pair | policy | workers/s | one process/s | ratio |", "|---|---|---|---|---|---|"]
        if other
        else []
    )
    for name, part in parts.items():
        family = name.removeprefix("pairs-")
        for devices, found in _of(part, "ipc"):
            pair = "+".join(word.rpartition("=")[2] for word in devices.split(","))
            for policy in ("throughput", "data-parallel"):
                beside = other.get(f"{family}.{pair}", {}).get(policy)
                if beside is not None:
                    # Rate of the run that these plans are from; the rows above may be of a later one.
                    one = beside.get("workers per s", found[policy]["measured per s"])
                    two = beside["measured per s"]
                    lines.append(f"| {family} | {pair} | {policy} | {one} | {two} | {one / two:.3f} |")
    return lines


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".md").write_text(table(json.loads(source.read_text())))
