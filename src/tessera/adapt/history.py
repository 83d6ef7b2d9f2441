"""LoadHistory: lengths and arrivals of the latest requests; the load that a service is planned for."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pvariance, stdev

from tessera.ir import Load
from tessera.ir.units import quantile

# Requests kept, and lengths of a load (evenly chosen).
MAX_REQUESTS, MAX_LENGTHS = 512, 128
MIN_REQUESTS = 32
# Relative difference of a mean length, and its standard errors, at which a load is another one.
LEAST_CHANGE, ERRORS = 0.15, 2.0
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class LengthView:
    mean: float
    p50: int
    p90: int
    p99: int


@dataclass(frozen=True, slots=True)
class LoadView:
    """The load of the latest requests; None: no answer is complete yet."""

    requests: int = 0
    prompt_tokens: LengthView | None = None
    output_tokens: LengthView | None = None
    arrivals_per_s: float = 0.0
    # Squared coefficient of variation of the time between arrivals: 1 for Poisson, more for bursts.
    burstiness: float | None = None
    # Means that the current plans are made for.
    planned_prompt_tokens: int = 0
    planned_output_tokens: int = 0


class LoadHistory:
    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=MAX_REQUESTS)
        self._arrivals_s: deque[float] = deque(maxlen=MAX_REQUESTS)
        # Answers since plans were last made.
        self.num_new = 0

    def arrived(self, now_s: float) -> None:
        self._arrivals_s.append(now_s)

    def answered(self, prompt_tokens: int, output_tokens: int) -> None:
        self._lengths.append((prompt_tokens, output_tokens))
        self.num_new += 1

    def changed(self, planned: Load) -> Load | None:
        """The observed load, if enough is known and it differs from the planned one."""
        if min(self.num_new, len(self._lengths)) < MIN_REQUESTS:
            return None
        prompts, outputs = zip(*self._lengths, strict=True)
        is_other = _differs(prompts, planned.prompt_tokens) or _differs(outputs, planned.output_tokens)
        return self.load(planned) if is_other else None

    def load(self, planned: Load) -> Load:
        lengths = list(self._lengths)
        chosen = tuple(lengths[:: math.ceil(len(lengths) / MAX_LENGTHS)])
        means = [max(1, round(sum(x) / len(x))) for x in zip(*lengths, strict=True)]
        return replace(planned, prompt_tokens=means[0], output_tokens=means[1], lengths=chosen)

    def view(self, now_s: float, planned: Load) -> LoadView:
        """From any thread."""
        lengths, times = list(self._lengths), list(self._arrivals_s)
        prompts, outputs = (_view(sorted(pair[n] for pair in lengths)) for n in (0, 1))
        span_s = now_s - times[0] if times else 0.0
        per_s = (len(times) - 1) / span_s if span_s > 0.0 else 0.0  # since the first
        tokens = (planned.prompt_tokens, planned.output_tokens)
        return LoadView(len(lengths), prompts, outputs, per_s, _burstiness(times), *tokens)


def _differs(lengths: Sequence[int], planned: int) -> bool:
    error = stdev(lengths) / math.sqrt(len(lengths))
    return abs(fmean(lengths) - planned) > max(LEAST_CHANGE * planned, ERRORS * error)


def _view(lengths: Sequence[int]) -> LengthView | None:
    if not lengths:
        return None
    return LengthView(sum(lengths) / len(lengths), *(int(quantile(lengths, q)) for q in QUANTILES))


def _burstiness(times: Sequence[float]) -> float | None:
    gaps = [b - a for a, b in pairwise(times)]
    mean = fmean(gaps) if gaps else 0.0
    return pvariance(gaps, mean) / mean**2 if mean else None
