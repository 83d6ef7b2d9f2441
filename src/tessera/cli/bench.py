"""tessera bench serve: load a running server and report how it did.

Works with any server that speaks OpenAI's protocol with streaming. Everything is measured by the client.
"""

import asyncio
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from tessera.cli.output import AsJson, console, print_json, progress
from tessera.errors import LoadError, MissingExtra, UnknownName

if TYPE_CHECKING:
    from tessera.serve.load import LoadOptions

ENDPOINTS = ("chat", "completions")
DISTINCT = 20


RequestsOption = Annotated[
    int | None, typer.Option(help="Requests to send. [default: 200, or all of a file]")
]
RateOption = Annotated[
    float | None, typer.Option(help="Send so many a second. [default: as fast as they are answered]")
]
BurstinessOption = Annotated[
    float, typer.Option(help="With --rate: 1 for a Poisson stream, less for bursts, more for even gaps.")
]
SendOption = Annotated[
    str | None,
    typer.Option(help="In place of --rate: what `tessera simulate --arrivals` takes, such as a CSV log."),
]
PromptTokensOption = Annotated[
    int | None, typer.Option(help="Tokens of a prompt, about. With a log: at most. [default: 64]")
]
PrefixTokensOption = Annotated[
    int | None, typer.Option(help="Of the tokens of a prompt, those that all begin with. [default: none]")
]
OutputTokensOption = Annotated[
    int | None, typer.Option(help="Tokens of an answer. With a log: at most. [default: 32]")
]
IgnoreEosOption = Annotated[
    bool, typer.Option(help="Ask for answers of full length; servers other than vLLM's kind may refuse.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Compare every answer with the one given when asked alone.")
]
DistinctOption = Annotated[
    int | None, typer.Option(help="With --verify: so many different prompts. [default: 20]")
]


def serve(
    url: Annotated[str, typer.Option(help="Where the server is: http://127.0.0.1:8000.")],
    requests: RequestsOption = None,
    concurrency: Annotated[int, typer.Option(help="At most so many in flight.")] = 32,
    rate: RateOption = None,
    burstiness: BurstinessOption = 1.0,
    arrivals: SendOption = None,
    speed: Annotated[float, typer.Option(help="Arrivals so many times as fast.")] = 1.0,
    prompt_tokens: PromptTokensOption = None,
    prefix_tokens: PrefixTokensOption = None,
    output_tokens: OutputTokensOption = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    model: Annotated[str | None, typer.Option(help="Which model. [default: the server's first]")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key, or @FILE with it.")] = None,
    ignore_eos: IgnoreEosOption = True,
    verify: VerifyOption = False,
    distinct: DistinctOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and times.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Load a server with streaming requests; report throughput, latencies and errors as clients see them."""
    _check({"--requests": requests, "--concurrency": concurrency, "--prompt-tokens": prompt_tokens,
            "--prefix-tokens": prefix_tokens, "--output-tokens": output_tokens, "--distinct": distinct,
            "--timeout": timeout, "--rate": rate, "--burstiness": burstiness})  # fmt: skip
    if endpoint not in ENDPOINTS:
        raise UnknownName("endpoint", endpoint, ENDPOINTS)
    if rate is not None and arrivals is not None:
        raise LoadError("option", "--rate and --arrivals both say when to send", "Give one of them.")
    _refuse("--burstiness", "--rate", burstiness != 1.0 and rate is None)
    _refuse("--speed", "--arrivals", speed != 1.0 and arrivals is None)
    _refuse("--distinct", "--verify", distinct is not None and not verify)
    if find_spec("aiohttp") is None:
        raise MissingExtra("aiohttp", "load")
    from tessera.serve.load import LoadOptions

    options = LoadOptions(
        requests or 200, concurrency, rate, burstiness, _arrivals(arrivals, requests, seed, speed),
        prompt_tokens, output_tokens, cast(Literal["chat", "completions"], endpoint), model, ignore_eos,
        (distinct or DISTINCT) if verify else None, seed, timeout, prefix_tokens or 0,
    )  # fmt: skip
    found = _run(url, _key(api_key), options)
    print_json(found) if as_json else _show_load(found)
    _complain(found)


def _check(counts: Mapping[str, float | None]) -> None:
    for name, value in counts.items():
        if value is not None and not 0 < value < float("inf"):
            raise LoadError("option", f"{value:g} is none", "Use a number above zero.", name)


def _refuse(option: str, other: str, is_idle: bool) -> None:
    """An option that would do nothing is a mistake."""
    if is_idle:
        raise LoadError(
            "option", f"{option} needs {other}", "Leave it out, or see: tessera bench serve --help."
        )


def _key(word: str | None) -> str | None:
    if word is None or not word.startswith("@"):
        return word
    try:
        return Path(word[1:]).read_text().split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        raise LoadError("option", "no key can be read from this file", place=f"--api-key {word}") from None


def _arrivals(text: str | None, requests: int | None, seed: int, speed: float) -> Any:
    if text is None:
        return None
    from tessera.simulate.arrivals import make_arrivals

    return make_arrivals(text, requests, seed, speed=speed)


def _run(url: str, api_key: str | None, options: "LoadOptions") -> dict[str, Any]:
    from tessera.serve.load import figures, measure, parse_address

    total = len(options.arrivals.times_s) if options.arrivals else options.num_requests
    total += min(total, options.num_distinct or 0)
    with progress("looking at the server", total) as advance:
        return figures(asyncio.run(measure(parse_address(url, api_key), options, advance)))


def _complain(found: dict[str, Any]) -> None:
    """A run with failures ends as an error, after its figures."""
    if found["errors"]:
        kind, first = next(iter(found["errors_by_kind"].items()))
        many = f"{found['errors']} of {found['num_prompts']} requests failed"
        raise LoadError("failed", f"{many}; the first ({kind}): {first['first']}")
    verified = found["verify"]
    if verified and verified["mixed_up"]:
        message = (
            f"{verified['mixed_up']} of {verified['compared']} answers are not those given when asked alone"
        )
        raise LoadError("mixed up", message)


HEADS = ("mean", "median", "p90", "p99")
NAMES = {
    "ttfb": "time to first byte",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two events",
    "e2el": "whole request",
}


def _show_load(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['model_id']}: {found['completed']:,} answers", title_justify="left")
    table.add_column("measured by the client")
    for head in HEADS:
        table.add_column(head, justify="right")
    for name, words in NAMES.items():
        cells = (found[f"{head}_{name}_ms"] for head in HEADS)
        table.add_row(words, *("" if x is None else f"{x:,.1f} ms" for x in cells))
    out = console()
    out.print(table)
    total = found["total_token_throughput"]
    with_prompts = "" if total is None else f", {total:,.1f} with the prompts'"
    out.print(
        f"{found['request_throughput']:,.2f} requests/s, {found['output_throughput']:,.1f} tokens/s"
        f"{with_prompts}; {found['duration']:,.1f} s with at most {found['max_concurrency']} in flight; "
        f"errors: {found['errors']}"
    )
    if found["num_cut"]:
        out.print(f"{found['num_cut']:,} requests of the log were cut to the lengths allowed")
    for kind, row in found["errors_by_kind"].items():
        out.print(f"{kind}: {row['count']}; the first: {row['first']}", markup=False)
    verified = found["verify"]
    if not verified:
        return
    out.print(
        f"verified: {verified['compared']:,} answers to {verified['prompts']} prompts "
        f"({verified['distinct_answers']} different answers), mixed up: {verified['mixed_up']}"
    )
    if first := verified["first"]:
        out.print(f"request {first['request']}: {first['prompt']!r}", markup=False)
        out.print(f"  alone:        {first['alone']!r}", markup=False)
        out.print(f"  in the crowd: {first['in_the_crowd']!r}", markup=False)


app = typer.Typer(
    help="Measure a running server.",
    no_args_is_help=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve)
