"""Demand: what requests ask of a work unit; Ledger: what became of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.ir import Arrivals, WorkUnit


@dataclass(frozen=True)
class Demand:
    """Requests as the simulator needs them."""

    times_us: Sequence[float]
    # Tokens that each one gives, and decodes that it takes.
    tokens: Sequence[int]
    decodes: Sequence[int]
    # Of a whole head, what each one's prompt takes.
    shares: Sequence[float]
    # Requests that share a microbatch.
    rows: int
    # True if a head gives the first token.
    head_speaks: bool
    # Of a whole head, what a token takes that was given before and is read again.
    per_token: float = 0.0

    def __len__(self) -> int:
        return len(self.times_us)


def demand_of(unit: WorkUnit, arrivals: Arrivals, rows: int | None = None) -> Demand:
    """What arrivals ask of a work unit; `rows` requests share a microbatch, by default the captured batch."""
    steps = [graph.trace.step for graph in unit.graphs]
    is_decode = steps[-1].kind == "decode"
    head_speaks = is_decode and any(s.kind == "prefill" for s in steps[:-1])
    rows = rows or max(1, steps[-1].batch)
    num = len(arrivals.times_s)
    usual = unit.counts[-1] + head_speaks if is_decode else 1
    tokens = arrivals.outputs if arrivals.outputs and is_decode else (usual,) * num
    context = max((s.context for s in steps if s.kind == "prefill"), default=0)
    shares = (
        [prompt / (context * rows) for prompt in arrivals.prompts]
        if context and arrivals.prompts
        else [1.0 / rows] * num
    )
    decodes = [n - head_speaks for n in tokens] if is_decode else [0] * num
    per_token = 1.0 / (context * rows) if context else 0.0
    return Demand([t * 1e6 for t in arrivals.times_s], tokens, decodes, shares, rows, head_speaks, per_token)


@dataclass
class RequestLedger:
    """What happened to each request; times in microseconds, negative: it did not."""

    first_us: list[float]
    done_us: list[float]
    num_restarted: int = 0
    num_refused: int = 0
    num_failed: int = 0
    max_waiting: int = 0
    # Decodes that a request had when it left a microbatch before its end: it goes on from there.
    decoded: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(num: int) -> "RequestLedger":
        """With nothing in it."""
        return RequestLedger([-1.0] * num, [-1.0] * num)
