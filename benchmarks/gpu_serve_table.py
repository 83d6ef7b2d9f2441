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
    lines += ["", *_engine({name: part for name, part in whole.items() if name.split(" ")[0] == "engine"})]
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
