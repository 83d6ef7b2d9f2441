"""measure: asks a server many questions at a time and keeps what came of each.

First the server is looked at: which model it has, how long a request may be, how many tokens a word is. With
verification every distinct prompt is then asked alone; in the crowd its answer must be the same text again,
for generation is greedy: an answer that differs was mixed up with another's. At most `concurrency` requests
are in flight, in the order of their times; how late each was sent is kept, for a server that is too slow
delays those behind it too.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.errors import LoadError
from tessera.ir import Arrivals
from tessera.serve.load_answers import Answer, Asking, Endpoint, read_answer, said
from tessera.serve.load_http import Client, Target
from tessera.serve.load_queries import (
    Lengths,
    Query,
    Ruler,
    lengths_of,
    make_prompts,
    make_queries,
    send_times,
)

# Tokens of a request whose user does not say, where the server has room for them.
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
NO_LIMIT = 1 << 30
# Words of the two questions that find out what a word costs.
FEW, MANY = 1, 5


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask of a server, and how hard."""

    num_requests: int = 200
    concurrency: int = 32
    # Requests a second; None: as fast as `concurrency` allows.
    rate_per_s: float | None = None
    burstiness: float = 1.0
    # Requests over time, in place of a number and a rate.
    arrivals: Arrivals | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    endpoint: Endpoint = "chat"
    # None: the first that the server has.
    model: str | None = None
    ignores_end: bool = True
    # Distinct prompts, each asked alone first; None: no verification, every prompt is another.
    num_distinct: int | None = None
    seed: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one query. Times count from the start of the crowd."""

    query: Query
    sent_s: float
    answer: Answer | LoadError


@dataclass(frozen=True)
class Measured:
    """A whole run."""

    load: Load
    model: str
    outcomes: tuple[Outcome, ...]
    duration_s: float
    num_cut: int
    # With verification: the answer to each distinct prompt, asked alone.
    alone: tuple[Answer, ...] = ()


async def measure(target: Target, load: Load, on_done: Callable[[str], None]) -> Measured:
    """Runs a load; `on_done` is called after every answer. LoadError if the server cannot be asked at all."""
    client = Client(target, load.timeout_s)
    try:
        model, room = await _served(client, load.model)
        asking = Asking(load.endpoint, model, load.ignores_end)
        ruler = await _ruler(client, asking, load.seed)
        lengths, times_s = _sizes(load, room)
        queries = make_queries(lengths, times_s, ruler, load.seed, load.num_distinct)
        alone = []
        if load.num_distinct is not None:
            for query in queries[: max(q.prompt_number for q in queries) + 1]:
                alone.append(await _ask(client, asking, query.prompt, query.max_tokens))
                on_done("asked alone")
    finally:
        client.close()
    outcomes, duration_s = await _Crowd(target, asking, load, on_done).run(queries)
    return Measured(load, model, tuple(outcomes), duration_s, lengths.num_cut, tuple(alone))


async def _served(client: Client, wanted: str | None) -> tuple[str, int | None]:
    """The model to ask, and the tokens that a request may have, if the server says."""
    reply = await client.ask("GET", "/v1/models")
    if reply.status != 200:
        if wanted is not None and reply.status == 404:
            return wanted, None
        raise LoadError(f"http {reply.status}", f"the server does not tell its models: {said(reply)}")
    try:
        cards: list[dict[str, Any]] = json.loads(bytes(reply.body))["data"]
        names = [str(card["id"]) for card in cards]
    except (ValueError, KeyError, TypeError):
        raise LoadError("protocol", "its list of models is not of OpenAI's shape") from None
    if not names or (wanted is not None and wanted not in names):
        known = ", ".join(names) or "none"
        raise LoadError(
            "model", f"the server has no model '{wanted or ''}'; it has: {known}", place="--model"
        )
    place = names.index(wanted) if wanted is not None else 0
    room = cards[place].get("max_model_len")
    return names[place], room if isinstance(room, int) else None


async def _ruler(client: Client, asking: Asking, seed: int) -> Ruler:
    """What a word costs; a server that counts nothing is taken to have one token a word."""
    seen = []
    for words in (FEW, MANY):
        prompt = make_prompts([words], seed)[0]
        answer = await _ask(client, asking, prompt, 1)
        seen.append((words, answer.prompt_tokens))
    (few, first), (many, second) = seen
    if first is None or second is None:
        return Ruler(0.0, 1.0)
    return Ruler.from_two((few, first), (many, second))


def _sizes(load: Load, room: int | None) -> tuple[Lengths, Sequence[float]]:
    """Lengths of the requests and when to send them; a log's own lengths are cut to the server's room."""
    half = max(1, room // 2) if room is not None else PROMPT_TOKENS
    usual = (load.prompt_tokens or min(PROMPT_TOKENS, half), load.output_tokens or min(OUTPUT_TOKENS, half))
    if load.arrivals is None:
        times_s = send_times(load.num_requests, load.rate_per_s, load.burstiness, load.seed)
        return Lengths((usual[0],) * len(times_s), (usual[1],) * len(times_s)), times_s
    limit = NO_LIMIT if room is None else half
    most = (load.prompt_tokens or limit, load.output_tokens or limit)
    return lengths_of(load.arrivals, usual, most), load.arrivals.times_s


async def _ask(client: Client, asking: Asking, prompt: str, max_tokens: int) -> Answer:
    start_s = time.perf_counter()
    reply = await client.ask("POST", asking.path, asking.body(prompt, max_tokens))
    return read_answer(reply, start_s, time.perf_counter())


class _Crowd:
    """Many clients at a time, each with a connection of its own, taking queries in their order."""

    def __init__(self, target: Target, asking: Asking, load: Load, on_done: Callable[[str], None]) -> None:
        self._target, self._asking, self._load, self._on_done = target, asking, load, on_done
        self._outcomes: list[Outcome] = []
        self._start_s = 0.0

    async def run(self, queries: Sequence[Query]) -> tuple[list[Outcome], float]:
        """Outcomes in the order of the queries, and the seconds it took."""
        waiting = iter(queries)
        self._start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._load.concurrency, len(queries))):
                group.create_task(self._work(waiting))
        duration_s = time.perf_counter() - self._start_s
        return sorted(self._outcomes, key=lambda x: x.query.number), duration_s

    async def _work(self, waiting: Iterator[Query]) -> None:
        client = Client(self._target, self._load.timeout_s)
        try:
            for query in waiting:
                early_s = query.at_s - (time.perf_counter() - self._start_s)
                if early_s > 0:
                    await asyncio.sleep(early_s)
                sent_s = time.perf_counter() - self._start_s
                self._outcomes.append(Outcome(query, sent_s, await self._one(client, query)))
                self._on_done("asking")
        finally:
            client.close()

    async def _one(self, client: Client, query: Query) -> Answer | LoadError:
        try:
            return await _ask(client, self._asking, query.prompt, query.max_tokens)
        except LoadError as error:
            return error
