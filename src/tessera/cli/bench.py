"""tessera bench serve: load a running server and report throughput, latencies and errors."""

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from tessera.cli.output import (
    HIDDEN,
    Illustrated,
    Record,
    excludes,
    info,
    needs,
    only_if,
    option,
    positive,
    printed,
    progress,
    shown,
)
from tessera.cli.render import RecordTable
from tessera.cli.serve_options import KeyOption, key_of
from tessera.errors import LoadError, TesseraError, extra_module
from tessera.simulate.arrivals import make_arrivals

if TYPE_CHECKING:
    from tessera.serve.load import LoadOptions

NUM_DISTINCT = 20
NUM_REQUESTS = 200
STATISTICS = ("mean", "std", "median", "p90", "p99")
# Metric of `vllm bench serve` -> its name for people.
METRICS = {
    "ttfb": "time to first byte",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two events",
    "e2el": "whole request",
}
COLUMNS = [
    (f"{statistic}_{metric}_ms", Annotated[float | None, HIDDEN])
    for metric in METRICS
    for statistic in STATISTICS
]


class LatencyLine(Record, frozen=True):
    mean_ms: float | None
    median_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


class ErrorKind(Record, frozen=True):
    count: int
    first: str


class WrongAnswer(Record, frozen=True):
    """A request whose answer under load differs from the answer alone."""

    request: int
    prompt: str
    alone: str
    in_the_crowd: str


class VerifiedAnswers(Record, frozen=True):
    """Answers under load, compared with the answers alone."""

    prompts: int
    distinct_answers: int
    compared: int
    mixed_up: int
    first: WrongAnswer | None


Columns = msgspec.defstruct("Columns", COLUMNS, bases=(Record,), frozen=True, kw_only=True)


class BenchServe(Columns, frozen=True):  # type: ignore[call-arg, misc, valid-type]
    """The result of a load test, under the names of `vllm bench serve`."""

    model_id: Annotated[str, shown("model")]
    completed: Annotated[int, shown("completed requests")]
    errors: int
    errors_by_kind: dict[str, ErrorKind]
    duration: Annotated[float, shown("duration", "s")]
    max_concurrency: Annotated[int, shown("requests in flight, at most")]
    request_throughput: Annotated[float, shown("requests/s")]
    output_throughput: Annotated[float, shown("output tokens/s")]
    total_token_throughput: Annotated[float | None, shown("tokens/s, prompts included")]
    total_input_tokens: Annotated[int | None, HIDDEN]
    total_output_tokens: Annotated[int, HIDDEN]
    # Only where the server was too slow for it.
    rate_not_reached: Annotated[str | None, shown("rate not reached")]
    mean_late_ms: Annotated[float | None, shown("sent late by")]
    finish_reasons: Annotated[dict[str, int], HIDDEN]
    tokens_counted_by: Annotated[str | None, HIDDEN]
    endpoint: Annotated[str, HIDDEN]
    num_prompts: Annotated[int, HIDDEN]
    # Shortened to the lengths allowed.
    num_cut: Annotated[int, shown("requests of the log that were cut")]
    request_rate: Annotated[float | None, HIDDEN]
    burstiness: Annotated[float, HIDDEN]
    arrivals: Annotated[str | None, HIDDEN]
    seed: Annotated[int, HIDDEN]
    verify: Annotated[VerifiedAnswers | None, shown("answers compared with those given alone")]

    def problem(self) -> TesseraError | None:
        if self.errors:
            kind, errors = next(iter(self.errors_by_kind.items()))
            many = f"{self.errors} of {self.num_prompts} requests failed"
            return LoadError("failed", f"{many}; the first ({kind}): {errors.first}")
        if self.verify and self.verify.mixed_up:
            many = f"{self.verify.mixed_up} of {self.verify.compared} answers"
            return LoadError("mixed up", f"{many} are not those given when asked alone")
        return None


ARRIVALS_HELP = "Arrival times as in `tessera simulate --arrivals`, for example a CSV log."
TWICE = "--rate and --arrivals both say when to send; give one of them"
NEEDS_RATE = only_if(lambda params: params.get("rate_per_s"), "needs --rate")


@dataclass(frozen=True)
class SentRequests:
    """Options by the names of `LoadOptions`."""

    num_requests: int | None = option(
        None, "Number of requests.", "--requests", shown="200, or all of a log", min=1
    )
    concurrency: int = option(32, "Maximum number of requests in flight.", min=1)
    rate_per_s: float | None = option(
        None, "Requests per second.", "--rate", shown="as fast as they are answered", callback=positive
    )
    burstiness: float = option(
        1.0, "1: Poisson arrivals; less: bursts; more: even gaps.", callback=NEEDS_RATE, min=0.001, max=1000.0
    )
    arrivals: str | None = option(None, ARRIVALS_HELP, callback=excludes("rate_per_s", TWICE))
    prompt_tokens: int | None = option(
        None, "Tokens per prompt, about; with a log: at most.", shown="64", min=1
    )
    prefix_tokens: int = option(0, "Tokens of a prefix common to all prompts.", min=0)
    output_tokens: int | None = option(None, "Tokens per answer; with a log: at most.", shown="32", min=1)
    api: Literal["chat", "completions"] = option("chat", "Endpoint.", "--endpoint")
    model: str | None = option(None, "Model name.", shown="the server's first")
    ignores_end: bool = option(
        True, "Ask for answers of full length, as vLLM allows.", "--ignore-eos/--no-ignore-eos"
    )
    verify: bool = option(False, "Compare each answer with the answer given alone.", "--verify")
    num_distinct: int | None = option(
        None, "Number of distinct prompts.", "--distinct", shown="20", callback=needs("verify"), min=1
    )
    timeout_s: float = option(
        600.0, "Seconds after which a request counts as failed.", "--timeout", min=0.001, max=86_400
    )
    seed: int = option(0, "Seed of prompts and arrival times.", min=0)

    def options(self) -> "LoadOptions":
        from tessera.serve.load import LoadOptions

        values = asdict(self) | {"num_requests": self.num_requests or NUM_REQUESTS}
        if self.arrivals:
            values["arrivals"] = make_arrivals(self.arrivals, self.num_requests, self.seed)
        if values.pop("verify"):
            values["num_distinct"] = self.num_distinct or NUM_DISTINCT
        return LoadOptions(**values)


def bench_serve(
    url: Annotated[str, info("URL of the server, such as http://127.0.0.1:8000.")],
    sent: SentRequests,
    api_key: KeyOption = "",
) -> Illustrated[BenchServe]:
    """Load a server and report its rate, latencies and errors."""
    extra_module("aiohttp", "load")
    from tessera.serve.load import figures, measure

    options, key = sent.options(), key_of(api_key)
    total = len(options.arrivals.times_s) if options.arrivals else options.num_requests
    total += min(total, options.num_distinct or 0)
    with progress("asking the server for its model", total) as advance:
        columns = figures(asyncio.run(measure(url, options, advance, key)))
    return Illustrated(msgspec.convert(columns, BenchServe), (_latencies(columns),))


def _latencies(columns: dict[str, Any]) -> RecordTable:
    """The JSON has the metrics under the names of `vllm bench serve`."""
    lines = {}
    for metric, words in METRICS.items():
        values = {f"{name}_ms": columns[f"{name}_{metric}_ms"] for name in STATISTICS if name != "std"}
        lines[words] = LatencyLine(**values)
    return RecordTable("latencies, measured by the client", lines)


app = typer.Typer(
    help="Measure a running server.",
    no_args_is_help=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(printed(bench_serve))
