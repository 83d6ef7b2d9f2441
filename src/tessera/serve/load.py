"""Load generator: `measure` sends requests to a server; `figures` are named as in `vllm bench serve`.

Without a tokenizer, two short requests measure the tokens of the server's template and of a word.
Verification first sends a few distinct prompts one by one; greedy answers under load must have the same text.

    ttfb  sending to the first byte of the body
    ttft  to the first text                       tpot  (end - first text) / (tokens - 1)
    itl   between two events with text            e2el  to the end

Times are the client's, over answered requests: streams that reach `[DONE]` with a finish reason. Everything
else is a `LoadError`. Not handled: redirects, proxies, HTTP/2 and events of several lines.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec
import numpy as np

from tessera.errors import LoadError, first_line
from tessera.ir import Arrivals

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
NO_LIMIT = 1 << 30
# Words of the two measuring requests; letters of a word.
FEW, MANY = 1, 5
WORD = 5
LETTERS = "abcdefghijklmnopqrstuvwxyz"
QUANTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0}
# The server may be closing connections that are idle longer.
MAX_IDLE_S = 1.0
MAX_LINE_BYTES = 4 << 20
# A rate is reached if the last request is sent by this.
MAX_SLOWER, SLACK_S = 1.05, 0.1
SHOWN_CHARS = 300

Api = Literal["chat", "completions"]


class Client(NamedTuple):
    session: aiohttp.ClientSession
    base: str


@contextmanager
def _named() -> Iterator[None]:
    """Errors of a connection become a `LoadError` with their kind."""
    try:
        yield
    except TimeoutError:
        raise LoadError("timeout", "no complete answer in time") from None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        message = f"'{error}' is not a server's URL"
        raise LoadError("url", message, "Write http://127.0.0.1:8000.", "--url") from None
    except aiohttp.ClientConnectorError as error:
        message, place = f"cannot connect: {error.os_error}", f"{error.host}:{error.port}"
        raise LoadError("connect", message, "Is the server running?", place) from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        raise LoadError("closed", f"the server closed the connection: {first_line(error)}") from None
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, ValueError) as error:
        raise LoadError("protocol", f"the answer is not HTTP/1.1: {first_line(error)}") from None


@dataclass(frozen=True, slots=True)
class Generation:
    text: str
    finish_reason: str
    # Reported by the server, if at all.
    prompt_tokens: int | None
    output_tokens: int | None
    ttfb_s: float
    ttft_s: float
    e2e_s: float
    # Between events with text.
    gaps_s: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.gaps_s) + 1 if self.output_tokens is None else self.output_tokens


class _Delta(msgspec.Struct):
    content: str | None = None


class _EventChoice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_EventChoice] | None = None
    usage: _Usage | None = None
    error: Any = None


async def _ask(client: Client, options: "LoadOptions", model: str, query: "Query") -> Generation:
    body: dict[str, Any] = {"model": model, "temperature": 0.0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if options.ignores_end:
        body["ignore_eos"] = True
    path, most = "/v1/completions", query.max_tokens
    if options.api == "chat":
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": query.prompt}], "max_completion_tokens": most}
    else:
        body |= {"prompt": query.prompt, "max_tokens": most}
    start_s = time.perf_counter()
    with _named():
        async with client.session.post(client.base + path, json=body | dict(options.fields)) as response:
            if response.status != 200:
                raise LoadError(f"http {response.status}", _message(response.status, await response.read()))
            return await _read_stream(response, start_s)


async def _read_stream(response: aiohttp.ClientResponse, start_s: float) -> Generation:
    texts: list[str] = []
    times_s: list[float] = []
    usage, reason, first_s, is_over = _Usage(), None, 0.0, False
    async for line in response.content:
        now_s = time.perf_counter()
        first_s = first_s or now_s
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            is_over = True
            continue
        event = _event(data)
        usage = event.usage or usage
        for choice in event.choices or ():
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                texts.append(text)
                times_s.append(now_s)
            reason = choice.finish_reason or reason
    if not is_over or reason is None:
        missing = "a finish reason" if is_over else "[DONE]"
        raise LoadError("stream", f"the stream ended without {missing}")
    if reason == "error":
        raise LoadError("answer", "the answer ended with the finish reason 'error'")
    end_s = time.perf_counter()
    # An answer without text has its first token at its end.
    times_s = times_s or [end_s]
    ends_s = (first_s - start_s, times_s[0] - start_s, end_s - start_s)
    counts = (usage.prompt_tokens, usage.completion_tokens)
    gaps_s = tuple(b - a for a, b in pairwise(times_s))
    return Generation("".join(texts), reason, *counts, *ends_s, gaps_s)


def _event(data: bytes) -> _Event:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.ValidationError:
        raise LoadError("stream", f"an event is not in OpenAI's form: {_text(data)}") from None
    except msgspec.DecodeError:
        raise LoadError("stream", f"an event is not JSON: {_text(data)}") from None
    if event.error is not None:
        raise LoadError("answer", _error_message(event.error) or _text(data))
    return event


def _message(status: int, body: bytes) -> str:
    try:
        message = _error_message(msgspec.json.decode(body, type=_Event).error)
    except msgspec.DecodeError:
        message = ""
    return message or _text(body) or f"status {status} without a message"


def _error_message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:SHOWN_CHARS] if message else ""


def _text(data: bytes) -> str:
    return first_line(data[:SHOWN_CHARS].decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class LoadOptions:
    num_requests: int = 200
    concurrency: int = 32
    # None: as fast as `concurrency` allows. Gaps are gamma distributed: burstiness 1 is a Poisson stream,
    # less is burstier.
    rate_per_s: float | None = None
    burstiness: float = 1.0
    arrivals: Arrivals | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    api: Api = "chat"
    # None: the server's first.
    model: str | None = None
    ignores_end: bool = True
    # Sent alone first; None: no verification, all prompts differ.
    num_distinct: int | None = None
    seed: int = 0
    timeout_s: float = 600.0
    # Common to all prompts.
    prefix_tokens: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Query:
    number: int
    prompt_number: int
    prompt: str
    max_tokens: int
    # Later if too many are in flight.
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ruler:
    """Tokens of a prompt = `fixed` + words * `per_word`."""

    fixed: float
    per_word: float

    @classmethod
    def from_two(cls, few: tuple[int, int], many: tuple[int, int]) -> "Ruler":
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            text = f"usage reports {few[1]} tokens for {few[0]} words and {many[1]} for {many[0]}"
            raise LoadError("usage", text, "Leave --prompt-tokens out.")
        return cls(few[1] - few[0] * per_word, per_word)

    def words(self, tokens: int) -> int:
        return max(1, int((tokens - self.fixed) / self.per_word + 1e-6))


@dataclass(frozen=True, slots=True)
class QueryOutcome:
    query: Query
    sent_s: float
    answer: Generation | LoadError


@dataclass(frozen=True)
class LoadRun:
    options: LoadOptions
    model: str
    outcomes: tuple[QueryOutcome, ...]
    duration_s: float
    num_cut: int
    # Answers without other requests beside them, by distinct prompt.
    alone: tuple[Generation, ...] = ()


async def measure(
    url: str, options: LoadOptions, on_done: Callable[[str], None], api_key: str | None = None
) -> LoadRun:
    """A trailing `/v1` of the URL is left out."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=MAX_IDLE_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=options.timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=MAX_LINE_BYTES,
    ) as session:
        client = Client(session, base)
        model, length = await _served(client, options.model)
        ruler = await _ruler(client, options, model)
        queries, num_cut = _queries(options, length, ruler)
        alone = []
        if options.num_distinct is not None:
            for query in queries[: options.num_distinct]:
                alone.append(await _ask(client, options, model, query))
                on_done("asked alone")
        outcomes: list[QueryOutcome] = []
        start_s = time.perf_counter()

        async def work(waiting: Iterator[Query]) -> None:
            for query in waiting:
                await asyncio.sleep(max(0.0, query.at_s - (time.perf_counter() - start_s)))
                sent_s = time.perf_counter() - start_s
                answer: Generation | LoadError
                try:
                    answer = await _ask(client, options, model, query)
                except LoadError as error:
                    answer = error
                outcomes.append(QueryOutcome(query, sent_s, answer))
                on_done("asking")

        waiting = iter(queries)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(options.concurrency, len(queries))):
                group.create_task(work(waiting))
    duration_s = time.perf_counter() - start_s
    outcomes.sort(key=lambda outcome: outcome.query.number)
    return LoadRun(options, model, tuple(outcomes), duration_s, num_cut, tuple(alone))


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: Any = None


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard]


async def _served(client: Client, model: str | None) -> tuple[str, int | None]:
    """Name and length of the model, default: the first that the server lists."""
    with _named():
        async with client.session.get(f"{client.base}/v1/models") as response:
            status, body = response.status, await response.read()
    if status != 200:
        if model is not None and status == 404:
            return model, None
        raise LoadError(f"http {status}", f"the server does not list its models: {_message(status, body)}")
    try:
        cards = msgspec.json.decode(body, type=_ModelCards).data
    except msgspec.DecodeError:
        raise LoadError("protocol", "its list of models is not in OpenAI's form") from None
    lengths = {card.id: card.max_model_len for card in cards}
    name = model if model is not None else next(iter(lengths), "")
    if name not in lengths:
        names = ", ".join(lengths) or "none"
        raise LoadError("model", f"the server has no model '{name}'; it has: {names}", place="--model")
    length = lengths[name]
    return name, length if isinstance(length, int) else None


async def _ruler(client: Client, options: LoadOptions, model: str) -> Ruler:
    tokens = []
    for words in (FEW, MANY):
        prompt = make_prompts([words], options.seed)[0]
        tokens.append((await _ask(client, options, model, Query(0, 0, prompt, 1))).prompt_tokens)
    few, many = tokens
    return Ruler(0.0, 1.0) if few is None or many is None else Ruler.from_two((FEW, few), (MANY, many))


def _queries(options: LoadOptions, length: int | None, ruler: Ruler) -> tuple[list[Query], int]:
    half = max(1, length // 2) if length is not None else PROMPT_TOKENS
    usual_prompt = options.prompt_tokens or min(PROMPT_TOKENS, half)
    usual_output = options.output_tokens or min(OUTPUT_TOKENS, half)
    log = options.arrivals
    times_s = log.times_s if log else send_times(options)
    num = len(times_s)
    prompts, outputs, num_cut = [usual_prompt] * num, [usual_output] * num, 0
    if log is not None and log.prompts:
        limit = NO_LIMIT if length is None else half
        prompts = [min(x, options.prompt_tokens or limit) for x in log.prompts]
        outputs = [min(x, options.output_tokens or limit) for x in log.outputs]
        pairs = zip(prompts, outputs, log.prompts, log.outputs, strict=True)
        num_cut = sum((p, o) != (long_p, long_o) for p, o, long_p, long_o in pairs)
    distinct = min(num, options.num_distinct or num)
    shared = ruler.words(options.prefix_tokens) if options.prefix_tokens else 0
    texts = make_prompts([max(1, ruler.words(x) - shared) for x in prompts[:distinct]], options.seed)
    if shared:
        (prefix,) = make_prompts([shared], options.seed + 1)
        texts = [f"{prefix} {text}" for text in texts]
    turns = ((i, i % distinct) for i in range(num))
    return [Query(i, turn, texts[turn], outputs[turn], times_s[i]) for i, turn in turns], num_cut


def make_prompts(num_words: Sequence[int], seed: int) -> list[str]:
    prompts: dict[str, None] = {}
    for number, words in enumerate(num_words):
        random = np.random.default_rng([seed, number])
        while len(prompts) <= number:
            letters = "".join(LETTERS[i] for i in random.integers(len(LETTERS), size=words * WORD))
            prompts[" ".join(letters[i : i + WORD] for i in range(0, len(letters), WORD))] = None
    return list(prompts)


def send_times(options: LoadOptions) -> tuple[float, ...]:
    num, rate_per_s, burstiness = options.num_requests, options.rate_per_s, options.burstiness
    if rate_per_s is None:
        return (0.0,) * num
    random = np.random.default_rng([options.seed, num])
    return tuple(np.cumsum(random.gamma(burstiness, 1.0 / (rate_per_s * burstiness), num)).tolist())


def figures(run: LoadRun) -> dict[str, Any]:
    options = run.options
    answers = [x.answer for x in run.outcomes if isinstance(x.answer, Generation)]
    errors = [x.answer for x in run.outcomes if isinstance(x.answer, LoadError)]
    kinds = Counter(error.kind for error in errors)
    firsts = {error.kind: str(error) for error in reversed(errors)}
    seconds = run.duration_s or float("inf")
    inputs = [a.prompt_tokens for a in answers if a.prompt_tokens is not None]
    total_in = sum(inputs) if len(inputs) == len(answers) else None
    total_out = sum(a.num_tokens for a in answers)
    has_times = options.rate_per_s is not None or options.arrivals is not None
    late = [x.sent_s - x.query.at_s for x in run.outcomes] if has_times else []
    is_counted = all(a.output_tokens is not None for a in answers)
    return {
        "completed": len(answers),
        "errors": len(errors),
        "errors_by_kind": {kind: {"count": n, "first": firsts[kind]} for kind, n in kinds.items()},
        "duration": run.duration_s,
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(answers) / seconds,
        "output_throughput": total_out / seconds,
        "total_token_throughput": None if total_in is None else (total_in + total_out) / seconds,
        **_latencies(answers),
        "rate_not_reached": _not_reached(run) if late else None,
        "mean_late_ms": 1e3 * float(np.mean(late)) if late else None,
        "finish_reasons": dict(Counter(a.finish_reason for a in answers)),
        "tokens_counted_by": ("usage" if is_counted else "events") if answers else None,
        "model_id": run.model,
        "endpoint": options.api,
        "num_prompts": len(run.outcomes),
        "num_cut": run.num_cut,
        "max_concurrency": options.concurrency,
        "request_rate": options.rate_per_s,
        "burstiness": options.burstiness,
        "arrivals": options.arrivals.name if options.arrivals else None,
        "seed": options.seed,
        "verify": _verified(run) if run.alone else None,
    }


def _not_reached(run: LoadRun) -> str | None:
    due_s, sent_s = max(x.query.at_s for x in run.outcomes), max(x.sent_s for x in run.outcomes)
    if not due_s or sent_s <= MAX_SLOWER * due_s + SLACK_S:
        return None
    num, most = len(run.outcomes), run.options.concurrency
    rate_per_s = run.options.rate_per_s or num / due_s
    return f"{num / sent_s:.3g} requests/s were sent, {rate_per_s:.4g} asked for: {most} were in flight"


def _latencies(answers: Sequence[Generation]) -> dict[str, float | None]:
    times = {
        "ttfb": [a.ttfb_s for a in answers],
        "ttft": [a.ttft_s for a in answers],
        "tpot": [(a.e2e_s - a.ttft_s) / (a.num_tokens - 1) for a in answers if a.num_tokens > 1],
        "itl": [gap for a in answers for gap in a.gaps_s],
        "e2el": [a.e2e_s for a in answers],
    }
    columns: dict[str, float | None] = {}
    for name, values in times.items():
        ms = 1e3 * np.array(values)
        columns[f"mean_{name}_ms"] = float(ms.mean()) if values else None
        columns[f"std_{name}_ms"] = float(ms.std()) if values else None
        for quantile, q in QUANTILES.items():
            columns[f"{quantile}_{name}_ms"] = float(np.percentile(ms, q)) if values else None
    return columns


def _verified(run: LoadRun) -> dict[str, Any]:
    texts = [answer.text for answer in run.alone]
    compared = [(x.query, x.answer.text) for x in run.outcomes if isinstance(x.answer, Generation)]
    mixed = [
        {"request": q.number, "prompt": q.prompt, "alone": texts[q.prompt_number], "in_the_crowd": text}
        for q, text in compared
        if text != texts[q.prompt_number]
    ]
    return {
        "prompts": len(texts),
        # Few distinct answers may hide mixed-up requests.
        "distinct_answers": len(set(texts)),
        "compared": len(compared),
        "mixed_up": len(mixed),
        "first": mixed[0] if mixed else None,
    }
