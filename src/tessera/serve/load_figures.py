"""The figures of a load run, under the names people know from `vllm bench serve`.

    ttfb  from sending a request to the first byte of its answer's body
    ttft  to its first text                       tpot  (end - first text) / (tokens - 1)
    itl   between two events with text            e2el  to its end

All are measured by the client. Percentiles are over answered requests; failed ones count as errors only.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.errors import LoadError
from tessera.serve.load import Measured, Outcome
from tessera.serve.load_answers import Answer

QUANTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0}


def figures(measured: Measured) -> dict[str, Any]:
    """A run as one JSON document."""
    load = measured.load
    answers = [x.answer for x in measured.outcomes if isinstance(x.answer, Answer)]
    seconds = measured.duration_s or float("inf")
    inputs = [a.prompt_tokens for a in answers if a.prompt_tokens is not None]
    total_in = sum(inputs) if len(inputs) == len(answers) else None
    total_out = sum(a.num_tokens for a in answers)
    found: dict[str, Any] = {
        "completed": len(answers),
        "errors": len(measured.outcomes) - len(answers),
        "errors_by_kind": _errors(measured.outcomes),
        "duration": measured.duration_s,
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(answers) / seconds,
        "output_throughput": total_out / seconds,
        "total_token_throughput": None if total_in is None else (total_in + total_out) / seconds,
    }
    found |= _latencies(answers)
    late = [x.sent_s - x.query.at_s for x in measured.outcomes] if _has_times(measured) else []
    return found | {
        "mean_late_ms": 1e3 * float(np.mean(late)) if late else None,
        "finish_reasons": dict(Counter(a.finish_reason for a in answers)),
        "tokens_counted_by": _counted_by(answers),
        "model_id": measured.model,
        "endpoint": load.endpoint,
        "num_prompts": len(measured.outcomes),
        "num_cut": measured.num_cut,
        "max_concurrency": load.concurrency,
        "request_rate": load.rate_per_s,
        "burstiness": load.burstiness,
        "arrivals": load.arrivals.name if load.arrivals else None,
        "seed": load.seed,
        "verify": _verified(measured) if measured.alone else None,
    }


def _has_times(measured: Measured) -> bool:
    return measured.load.rate_per_s is not None or measured.load.arrivals is not None


def _latencies(answers: Sequence[Answer]) -> dict[str, float | None]:
    several = [a for a in answers if a.num_tokens > 1]
    times = {
        "ttfb": [a.ttfb_s for a in answers],
        "ttft": [a.ttft_s for a in answers],
        "tpot": [(a.e2e_s - a.ttft_s) / (a.num_tokens - 1) for a in several],
        "itl": [gap for a in answers for gap in a.gaps_s],
        "e2el": [a.e2e_s for a in answers],
    }
    found: dict[str, float | None] = {}
    for name, values in times.items():
        ms = 1e3 * np.array(values)
        found[f"mean_{name}_ms"] = float(ms.mean()) if values else None
        found[f"std_{name}_ms"] = float(ms.std()) if values else None
        for quantile, q in QUANTILES.items():
            found[f"{quantile}_{name}_ms"] = float(np.percentile(ms, q)) if values else None
    return found


def _errors(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By kind: how many, and what the first of them said."""
    kinds: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        if isinstance(outcome.answer, LoadError):
            kind = kinds.setdefault(outcome.answer.kind, {"count": 0, "first": str(outcome.answer)})
            kind["count"] += 1
    return kinds


def _counted_by(answers: Sequence[Answer]) -> str | None:
    if not answers:
        return None
    return "usage" if all(a.output_tokens is not None for a in answers) else "events"


@dataclasses.dataclass(frozen=True, slots=True)
class _Mixed:
    """One answer that is not the one given alone."""

    request: int
    prompt: str
    alone: str
    in_the_crowd: str


def _verified(measured: Measured) -> dict[str, Any]:
    """Answers in the crowd against those given alone."""
    texts = [answer.text for answer in measured.alone]
    answered = [x for x in measured.outcomes if isinstance(x.answer, Answer)]
    mixed = [
        _Mixed(x.query.number, x.query.prompt, texts[x.query.prompt_number], x.answer.text)
        for x in answered
        if isinstance(x.answer, Answer) and x.answer.text != texts[x.query.prompt_number]
    ]
    return {
        "prompts": len(texts),
        # If these are few, a mix-up between requests with the same answer cannot be seen.
        "distinct_answers": len(set(texts)),
        "compared": len(answered),
        "mixed_up": len(mixed),
        "first": dataclasses.asdict(mixed[0]) if mixed else None,
    }
