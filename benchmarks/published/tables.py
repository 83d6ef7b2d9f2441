"""The document of `benchmarks.published.document` as tables; needs nothing but the document."""

from typing import Any

MODELS = {
    "llama_3_1_8b": "Llama 3.1 8B",
    "gpt_oss_20b": "gpt-oss 20B",
    "qwen_2_5_vl_7b": "Qwen2.5-VL 7B",
    "mamba_codestral_7b": "Mamba Codestral 7B",
    "stable_diffusion_3_5_medium": "SD 3.5 medium",
}
POLICIES = {
    "left_card_alone": "A100 alone",
    "right_card_alone": "L40S alone",
    "request_distribution": "one copy on each",
    "prefill_decode": "prefill/decode",
    "attention_ffn": "attention/FFN",
    "kernel_disaggregation": "kernels, one placement",
    "prefill_decode_fractional": "prefill/decode, fractional",
    "tessera_mix": "the planner's choice",
}
HEADS = ("published", "measured again", "ours", "ours, best batch")
COLUMNS = ("published", "re_measured", "ours", "ours_best_batch")


def readme_table(found: dict[str, Any]) -> str:
    """Output tokens per second on A100-PCIe + L40S of the models that were measured again."""
    names = list(MODELS)[:2]
    heads = [f"{MODELS[names[0]]}: published", *HEADS[1:], f"{MODELS[names[1]]}: published", *HEADS[1:]]
    lines = ["| policy | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    rows = {(r["model"], r["policy"]): r for r in found["figures"]["fig6"] if r["pair"] == "a100_l40s"}
    for policy, title in POLICIES.items():
        if (names[0], policy) not in rows:
            continue
        cells = [rows[name, policy][column] for name in names for column in COLUMNS]
        lines.append(f"| {title} | " + " | ".join(f"{x:,.0f}" if x else "-" for x in cells) + " |")
    return "\n".join(lines)


def markdown(found: dict[str, Any]) -> str:
    """A table a figure, and the ratios."""
    lines = ["# The published evaluation, in its own set-up", ""]
    lines += ["FluidGPU (SC26, arXiv 2604.10180); figures and licence: benchmarks/published/README.md.", ""]
    lines += ["Over other policies (median, mean, most):", ""]
    for name, over in found["ratios"].items():
        words = "; ".join(f"{k} {v['median']:.2f}, {v['mean']:.2f}, {v['most']:.2f}" for k, v in over.items())
        lines.append(f"- {name}: {words}")
    for name, rows in found["figures"].items():
        lines += ["", f"## {name}", ""]
        extra = [k for k in ("gbit_per_s", "window_ms", "threshold") if k in rows[0]]
        more = [k for k in ("ours_switches", "ours_switch_ms", "ours_switch_by_pages_ms") if k in rows[0]]
        columns = ["pair", "model", "policy", *extra, *COLUMNS, *more]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
    lines += ["", "## A mixed pair over two of its better card", ""]
    lines += ["| pair | model | " + " | ".join(COLUMNS) + " |", "|---|---|---|---|---|---|"]
    for row in found["two_of_the_better_card"]:
        lines.append("| " + " | ".join(_cell(row.get(c)) for c in ("pair", "model", *COLUMNS)) + " |")
    lines += ["", "## Not made", ""]
    lines += [f"- {name}: {why}" for name, why in found["not_made"].items()]
    lines += ["", costs_markdown(found["costs"]).replace("# Modelled", "## Modelled", 1)]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def costs_markdown(found: dict[str, Any]) -> str:
    lines = ["# Modelled costs against a real A100-PCIe and L40S", ""]
    lines += ["| step of Llama 3.1 8B | card | vLLM, ms | ours, ms | error |", "|---|---|---|---|---|"]
    for r in found["steps"]:
        lines.append(
            f"| {r['step']} | {r['card']} | {r['measured_ms']:.2f} | {r['ours_ms']:.2f} | {r['error']:+.1%} |"
        )
    lines += ["", "Kernels of gpt-oss 20B, time on the L40S over time on the A100:", ""]
    lines += ["| step | class | census | ours | error | |", "|---|---|---|---|---|---|"]
    for r in found["classes"]:
        cells = f"{r['ours_ratio']:.2f} | {r['error']:+.0%}" if "ours_ratio" in r else "- | -"
        why = r.get("why", "")
        lines.append(f"| {r['step']} | {r['class']} | {r['measured_ratio']:.2f} | {cells} | {why} |")
    return "\n".join(lines) + "\n"
