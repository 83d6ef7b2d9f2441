"""The results of gpu_serve.py for people: NAME.json -> NAME.md.

python benchmarks/gpu_serve_table.py benchmarks/results/serve_h200_202611.json
"""

import json
import sys
from pathlib import Path
from typing import Any


def table(whole: dict[str, Any]) -> str:
    """All sections."""
    about = whole["about"]
    lines = [
        "# Serving on one GPU",
        "",
        f"{about.get('gpu')}, {about.get('sms')} SMs, torch {about.get('torch')}. llama-3-8b, random "
        "weights, bfloat16, greedy. 'hf' is the Hugging Face model with its static cache and its own "
        "attention (`sdpa`, which repeats keys and values for every query head) under torch.compile, in a "
        "loop that feeds tokens back on the GPU; nobody reads them. Both are timed in turn on the same card.",
    ]
    for kind, section in {"engine": _engine, "pair": _pair, "arrivals": _arrivals}.items():
        parts = {name: part for name, part in whole.items() if name.split(" ")[0] == kind}
        if parts:
            lines += ["", *section(parts)]
    notes = ["", "## Notes", "", *(f"- {note}" for note in whole["notes"])] if "notes" in whole else []
    return "\n".join([*lines, *notes, "", *_unfinished(whole)]).rstrip() + "\n"


def _engine(parts: dict[str, Any]) -> list[str]:
    lines = [
        "## The service's engine: every token handed to its reader, all rows decoding",
        "",
        "| rows | positions | layers | tessera, tokens/s | hf, tokens/s | hf compiled by | tessera / hf |",
        f"|{'---|' * 7}",
    ]
    for part in parts.values():
        model, rates = part.get("model", {}), part.get("tokens per s", {})
        cells = [model.get(key) for key in ("batch", "capacity", "layers")]
        cells += [rates.get(key, "-") for key in ("tessera", "hf", "hf compiled by", "tessera / hf")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for name, part in parts.items():
        lines += ["", f"{name}: `{part['command']}`"]
        for key, value in part.items():
            if key.startswith(("engine,", "stepper")) and "error" not in value:
                lines += ["", f"{key}: `{json.dumps(value)}`"]
    return lines


def _pair(parts: dict[str, Any]) -> list[str]:
    lines = [
        "## Two unlike devices: the engine under a closed load, all rows in use",
        "",
        "The first policy of each table is the plan that was rehearsed best. 'rehearsed' is what the same "
        "engine gave in virtual time before, 'predicted' the plan's own simulated figure for work units.",
    ]
    for name, part in parts.items():
        model, gains = part.get("model", {}), part.get("gain of the plan over", {})
        lines += [
            "",
            f"{name}: {model.get('layers')} layers, {model.get('batch')} rows each, steps' us by device "
            f"{model.get('steps us')}, runs of each {model.get('counts')}, scale {part.get('scale')}. Rates "
            f"are modelled: measured x scale. `{part['command']}`",
            "",
            "| policy | tokens/s (modelled) | rehearsed | measured / rehearsed | predicted by the plan | "
            "measured / predicted | plan / policy |",
            f"|{'---|' * 7}",
        ]
        for key, row in part.items():
            if not isinstance(row, dict) or "modelled tokens per s" not in row:
                continue
            policy, rate = key.partition(" ")[2], row["modelled tokens per s"]
            rehearsed = part.get("rehearsed, tokens per s", {}).get(policy)
            cells = [policy, rate, rehearsed or "-", round(rate / rehearsed, 4) if rehearsed else "-"]
            cells += [row["predicted tokens per s"], row["measured / predicted"], gains.get(policy, "-")]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _arrivals(parts: dict[str, Any]) -> list[str]:
    lines = [
        "## Two unlike devices: a Poisson stream of requests, for real and in virtual time",
        "",
        "The same requests at the same moments through the same engine, over worker processes and over the "
        "simulator's stepper. Medians in modelled milliseconds: what was waited, divided by the scale.",
    ]
    waits = ("time to first token", "time per output token")
    for name, part in parts.items():
        model = part.get("model", {})
        lines += [
            "",
            f"{name}: {model.get('layers')} layers, {model.get('batch')} rows a microbatch, scale "
            f"{part.get('scale')}. `{part['command']}`",
            "",
            "| policy | requests | requests/s | "
            + " | ".join(f"{wait}, real | virtual | real / virtual" for wait in waits)
            + " |",
            f"|{'---|' * 9}",
        ]
        for key, row in part.items():
            if not isinstance(row, dict) or waits[0] not in row:
                continue
            cells = [key.partition(" ")[2], row["requests"], row["requests per s"]]
            cells += [row[wait][what] for wait in waits for what in ("real ms", "virtual ms", "ratio")]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _unfinished(whole: dict[str, Any]) -> list[str]:
    lines = []
    for name, part in whole.items():
        if not isinstance(part, dict):
            continue
        errors = [v for v in part.values() if isinstance(v, dict) and "error" in v]
        errors += [part] if isinstance(part.get("error"), str) else []
        lines += [f"- {name}: {e['error'].strip().splitlines()[-1][:300]}" for e in errors]
        if part.get("ended", "exit code 0") != "exit code 0":
            lines.append(f"- {name}: {part['ended']}")
    return ["## Not finished", "", *lines] if lines else []


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".md").write_text(table(json.loads(source.read_text())))
