"""Modelled costs against steps and kernels timed on a real A100-PCIe and L40S.

Steps: Llama 3.1 8B in vLLM, 32 sequences, from offline runs of nine lengths. Ours are the compiled steps that
a service runs: a decode of 32 sequences, a prompt alone, and as many prompts as 16,384 tokens hold.

Kernels: classes of gpt-oss 20B's census, by the ratio of L40S to A100. In one-token steps every shape is
known; a decode's batch is not stated and taken as 32. `EXPLAINED` lists classes that are not comparable.
"""

from typing import Any

from benchmarks.paper.records import Wire, wired
from benchmarks.published import kernels

from tessera.planning import ServedSteps
from tessera.profile import Tables
from tessera.profile.counts import OpClass, Work
from tessera.profile.estimate import price_works

CARDS = ("a100-pcie", "l40s")
STEP_TOLERANCE, CLASS_TOLERANCE = 0.08, 0.25
SEQUENCES, CONTEXT, PROMPT, BUDGET = 32, 2048, 1920, 16384
# gpt-oss 20B.
HIDDEN, QUERIES, KV, EXPERTS, TOP, VOCABULARY = 2880, 4096, 512, 32, 4, 201_088
EXPLAINED = {
    "attention": "contexts are not stated, every second layer has a window of 128; a Triton kernel of vLLM",
    "expert_product": "MXFP4 weights by Marlin; which experts are visited is not stated",
    "expert_sum": "a kernel of vLLM's own, 4.3 us on the A100 and 1.8 us on the L40S; one-token steps agree",
    "product_router": "L40S runs a matrix-vector kernel; with its split-k reduction the time is within 21 %",
}


def steps() -> list[dict[str, Any]]:
    """Decode and prefill of Llama on both cards."""
    served = ServedSteps("llama-3-8b", wired(CARDS, Wire.preset("pcie4")), is_compiled=True)
    prompts = BUDGET // PROMPT
    sizes = (
        (f"decode, {SEQUENCES} sequences, context {CONTEXT:,}", SEQUENCES, SEQUENCES, CONTEXT),
        (f"prefill, one prompt of {PROMPT:,}", PROMPT, 1, PROMPT),
        (f"prefill, {prompts} prompts of {PROMPT:,}", prompts * PROMPT, prompts, PROMPT),
    )
    fit = kernels()["step_times_in_vllm"]["computed_here"]["llama_3_1_8b_fit"]
    rows = []
    for name, tokens, sequences, length in sizes:
        price = served.price(tokens, sequences, length)
        for number, card in enumerate(CARDS):
            timed = fit[card.removesuffix("-pcie")]
            if name.startswith("decode"):
                line = timed["decode_step_ms_at_32_sequences"]
                measured = line["constant"] + line["per_token_of_context"] * length
            else:
                line = timed["prefill_us_per_token"]
                measured = 1e-3 * tokens * (line["constant"] + line["per_token_of_prompt"] * length)
            ours = 1e-3 * price.total_us(number)
            off = ours / measured - 1.0
            row = {"step": name, "card": card, "measured_ms": round(measured, 3), "ours_ms": round(ours, 3)}
            rows.append(row | {"error": round(off, 4), "within": abs(off) <= STEP_TOLERANCE})
    return rows


def _product(rows: int, n: int, k: int) -> Work:
    num_bytes = 2 * (rows * n + rows * k + n * k)
    return Work(OpClass.GEMM, "bfloat16", 2.0 * rows * n * k, num_bytes, (1, rows, n, k))


def _moving(op: OpClass, num_bytes: int, *overhead: tuple[str, float]) -> Work:
    return Work(op, "bfloat16", 0.0, num_bytes, (), overhead)


def census_works(rows: int) -> dict[str, Work]:
    """One launch of every class that the census has, for so many tokens."""
    return {
        "norm": _moving(OpClass.REDUCTION, 8 * rows * HIDDEN),
        "rotary": _moving(OpClass.ELEMENTWISE, 4 * rows * (QUERIES + KV)),
        "activation": _moving(OpClass.ELEMENTWISE, 6 * rows * TOP * HIDDEN),
        "expert_sum": _moving(OpClass.ELEMENTWISE, 2 * rows * (TOP + 1) * HIDDEN),
        "kv_cache_write": _moving(OpClass.ELEMENTWISE, 8 * rows * KV),
        "pointwise": _moving(OpClass.ELEMENTWISE, 4 * rows * HIDDEN),
        "fill": _moving(OpClass.COPY, 4 * rows * TOP),
        "copy": _moving(OpClass.COPY, 6 * rows * VOCABULARY),
        "gather": _moving(OpClass.GATHER, 4 * rows * HIDDEN),
        "sampling": _moving(OpClass.SOFTMAX, 8 * rows * VOCABULARY),
        "split_k_reduce": _moving(OpClass.ELEMENTWISE, 6 * rows * HIDDEN),
        "expert_routing": _moving(
            OpClass.SAMPLING, 4 * rows * EXPERTS, ("topk", float(EXPERTS)), ("topk_floor", 1.0)
        ),
        "product_router": _product(rows, EXPERTS, HIDDEN),
        "product_qkv": _product(rows, QUERIES + 2 * KV, HIDDEN),
        "product_attention_out": _product(rows, HIDDEN, QUERIES),
        "product_lm_head": _product(rows, VOCABULARY, HIDDEN),
    }


def classes(tables: Tables | None = None) -> list[dict[str, Any]]:
    """Ratio of L40S to A100 by class, in decodes and in steps of one token."""
    census = kernels()["gpt_oss_20b_by_class"]["rows"]
    found = []
    # Small launches of one-token steps stand under prefill_mixed, whose medians are theirs.
    for step, rows, parts in (
        ("decode", SEQUENCES, ("decode",)),
        ("one token", 1, ("prefill_one_token", "prefill_mixed")),
    ):
        works = census_works(rows)
        priced = [price_works(list(works.values()), card, tables) for card in CARDS]
        ours = {name: (a.us, b.us) for name, a, b in zip(works, *priced, strict=True)}
        for part in parts:
            for name, (launches, _, a100_us, l40s_us, ratio, share) in census[part].items():
                if part == "prefill_mixed" and name in census["prefill_one_token"]:
                    continue
                row = {"step": step, "class": name, "launches": launches, "share_of_a100_percent": share}
                row |= {"measured_us": [a100_us, l40s_us], "measured_ratio": ratio}
                if name in ours:
                    us = ours[name]
                    off = us[1] / us[0] / ratio - 1.0
                    row |= {"ours_us": [round(x, 2) for x in us], "ours_ratio": round(us[1] / us[0], 3)}
                    row |= {"error": round(off, 3), "within": abs(off) <= CLASS_TOLERANCE}
                if not row.get("within", False):
                    row["why"] = EXPLAINED.get(name, "no launch of ours is like it")
                found.append(row)
    return found


def document() -> dict[str, Any]:
    """Both comparisons, and whether they hold."""
    whole, kinds = steps(), classes()
    return {
        "source": kernels()["about"]["artifact"],
        "step_tolerance": STEP_TOLERANCE,
        "class_tolerance": CLASS_TOLERANCE,
        "steps": whole,
        "classes": kinds,
        "steps_within": all(row["within"] for row in whole),
        "classes_within": all(row.get("within", True) or row["class"] in EXPLAINED for row in kinds),
    }
