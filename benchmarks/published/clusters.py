"""Figure 9: gpt-oss on two A100-PCIe beside an L40S, and a mixture of 235B on eight B200 beside eight H100.

Three cards are services as in figure 6. A layout over unlike cards takes one A100 and the L40S; the other
A100 serves whole requests, as in the re-measured runs.

The 235B model (Qwen3: 94 layers, 128 experts of which 8 are chosen, bfloat16) needs eight cards of a kind
for its weights. Such a group is priced as one card of eight times the speed: launches of a layer on one card,
divided by eight. Not priced: the all-reduces of tensor parallelism, small products that do not divide well,
and unequal experts. So its figures are bounds: `ours` of a split is what its busier group allows, and
of kernels the best fractional assignment of launches to the two groups.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.published import figures
from benchmarks.published.offline import OfflineCase, Rated, bar
from benchmarks.published.setup import CLUSTERS, FRACTIONAL, MIX, POLICIES, SEQUENCES

from tessera.profile.counts import OpClass, Work
from tessera.profile.estimate import price_works

LARGE, GROUP, KINDS = "eight_b200_eight_h100", 8, ("b200", "h100")
HIDDEN, LAYERS, EXPERTS, TOP, INNER, VOCABULARY = 4096, 94, 128, 8, 1536, 151_936
HEADS, KV_HEADS, WIDTH = 64, 4, 128
PROMPT, OUTPUT = 4096, 684
WHY_LARGE = (
    "a bound: eight cards as one of eight times the speed; all-reduces, small products and unequal experts "
    "are not priced, and services have no tensor parallelism"
)


def cases() -> list[OfflineCase]:
    alone = ("left_card_alone", "right_card_alone")
    return [
        OfflineCase(name, "gpt_oss_20b", policy, is_best)
        for name in CLUSTERS
        for policy in POLICIES
        if policy not in alone
        for is_best in (False, True)
        if not (is_best and policy in ("attention_ffn", "kernel_disaggregation"))  # no such search
    ]


def _product(rows: int, n: int, k: int) -> Work:
    return Work(OpClass.GEMM, "bfloat16", 2.0 * rows * n * k, 2 * (rows * (n + k) + n * k), (1, rows, n, k))


def _experts(rows: int, n: int, k: int) -> Work:
    visited = min(EXPERTS, rows)
    num_bytes = 2 * (rows * (n + k) + visited * n * k)
    return Work(OpClass.GROUPED, "bfloat16", 2.0 * rows * n * k, num_bytes, (EXPERTS, rows, n, k))


def _moving(num_bytes: int) -> Work:
    return Work(OpClass.ELEMENTWISE, "bfloat16", 0.0, num_bytes)


def _step(tokens: int, sequences: int, length: int) -> dict[str, tuple[Work, float]]:
    """Launches of a step, and how often each runs."""
    is_decode = tokens == sequences
    heads, new = (HEADS, KV_HEADS, WIDTH), tokens // sequences
    read = sequences * length * KV_HEADS * WIDTH * 4
    flops = 4.0 * tokens * length * HEADS * WIDTH / (1 if is_decode else 2)
    op = OpClass.DECODE if is_decode else OpClass.PREFILL
    layer = {
        "qkv": _product(tokens, (HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN),
        "attention": Work(op, "bfloat16", flops, read, (sequences, new, length, *heads, 1)),
        "output": _product(tokens, HIDDEN, HEADS * WIDTH),
        "router": _product(tokens, EXPERTS, HIDDEN),
        "experts up": _experts(tokens * TOP, 2 * INNER, HIDDEN),
        "experts down": _experts(tokens * TOP, HIDDEN, INNER),
        "norms": _moving(16 * tokens * HIDDEN),
        "activation": _moving(6 * tokens * TOP * INNER),
        "sum": _moving(2 * tokens * (TOP + 1) * HIDDEN),
    }
    head = {"lm head": (_product(sequences, VOCABULARY, HIDDEN), 1.0)}
    return {name: (work, float(LAYERS)) for name, work in layer.items()} | head


def large_rates() -> dict[str, float]:
    """Output tokens per second of each policy, by busy time of the two groups."""
    us: list[tuple[str, str, list[float]]] = []
    phases = (
        ("prefill", _step(PROMPT, 1, PROMPT), 1.0),
        ("decode", _step(SEQUENCES, SEQUENCES, PROMPT + OUTPUT // 2), OUTPUT / SEQUENCES),
    )
    for phase, step, runs in phases:
        priced = [price_works([work for work, _ in step.values()], card, None) for card in KINDS]
        for number, (name, (_, count)) in enumerate(step.items()):
            us.append((phase, name, [runs * count * costs[number].us / GROUP for costs in priced]))

    def split(is_first: Callable[[str, str], bool]) -> float:
        busy = [sum(t[1 - is_first(phase, name)] for phase, name, t in us if is_first(phase, name) == g)
                for g in (True, False)]  # fmt: skip
        return 1e6 * OUTPUT / max(busy)

    alone = [1e6 * OUTPUT / sum(t[group] for _, _, t in us) for group in (0, 1)]
    return {
        "request_distribution": sum(alone),
        "prefill_decode": max(split(lambda p, _: p == "prefill"), split(lambda p, _: p == "decode")),
        "attention_ffn": max(split(lambda _, n: n == "attention"), split(lambda _, n: n != "attention")),
        "kernel_disaggregation": 1e6 * OUTPUT / _best_split([t for _, _, t in us]),
    }


def _best_split(times: list[list[float]]) -> float:
    """Least largest busy time of two groups; one launch may be shared."""
    order = sorted(times, key=lambda t: t[0] / t[1])
    first, second = 0.0, sum(t[1] for t in order)
    for a, b in order:
        if first + a >= second - b:
            share = (second - first) / (a + b)
            return first + share * a
        first, second = first + a, second - b
    return first


def fig9(rated: dict[OfflineCase, Rated | None]) -> list[dict[str, Any]]:
    doc = figures()["fig9_cluster"]
    again, rows = doc["re_measured"], []
    for name in (*CLUSTERS, LARGE):
        published = doc["published"][name]
        measured = again["rows"] if again["cluster"] == name else {}
        here = {c: r for c, r in rated.items() if c.pair == name}
        large = large_rates() if name == LARGE else {}
        for policy in ("request_distribution", "prefill_decode", "attention_ffn", "kernel_disaggregation",
                       FRACTIONAL, MIX):  # fmt: skip
            best = max(large.values(), default=None) if policy == MIX else large.get(policy)
            values = [best, None] if large else [bar(here, policy, is_best) for is_best in (False, True)]
            rows.append(
                {
                    "pair": name,
                    "model": published["model"],
                    "policy": policy,
                    "unit": "output tokens per second",
                    "published": published.get(policy),
                    "re_measured": measured.get(policy, [None])[0],
                    "ours": values[0] and round(values[0], 1),
                    "ours_best_batch": values[1] and round(values[1], 1),
                    "why": WHY_LARGE if large else "",
                }
            )
    return rows
