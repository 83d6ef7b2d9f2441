"""Part `--minutes` of `soak`: a server process under mixed load, kills, cancellations and hostile clients.

Every distinct request is answered once alone, before the faults; later answers are compared with it:

    greedy, seeded, logprobs, schema, stream    the same text
    cancelled                                   a stream whose client goes after some events
    hostile                                     see `HOSTILE`: refused or dropped, whatever else runs

`/health` is asked ten times a second on a connection of its own. Memory is that of the server and everything
it started, as the mean of the first and of the last third.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from benchmarks.serve_process import Server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
# Many lexer states.
HARD = {"type": "string", "pattern": "^(a|b)*a(a|b){12}$"}
JSON_TYPE = b"content-type: application/json\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + JSON_TYPE
PROBE_S, LIMIT_HEALTH_S = 0.1, 30.0


def bodies(model: str, num: int, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Distinct requests with their kinds."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
        "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        "schema": {
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
        "stream": {"temperature": 0, "stream": True},
    }
    found = []
    for number, kind in zip(range(num), itertools.cycle(kinds), strict=False):
        words = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 24)))
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"{number} {words}"}],
            "max_tokens": 48 if kind == "schema" else rng.randrange(2, 24),
            **kinds[kind],
        }
        found.append((kind, body))
    return found


async def tiny_chunks(port: int) -> None:
    await _raw(port, POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100_000)


async def slow_body(port: int) -> None:
    await _raw(port, POST + b"content-length: 1000\r\n\r\n", *([b" "] * 20))


async def endless_head(port: int) -> None:
    await _raw(port, b"GET / HTTP/1.1\r\n" + b"x: " + b"a" * 200_000)


async def nested(port: int) -> None:
    body = b"[" * 100_000
    await _raw(port, POST + b"content-length: %d\r\n\r\n" % len(body) + body)


async def large_body(port: int) -> None:
    text = json.dumps({"model": "x", "messages": [{"role": "user", "content": "word " * 400_000}]}).encode()
    await _raw(port, POST + b"content-length: %d\r\n\r\n" % len(text) + text)


async def garbage(port: int) -> None:
    await _raw(port, os.urandom(4096))


HOSTILE: tuple[Callable[[int], Awaitable[None]], ...] = (
    tiny_chunks, slow_body, endless_head, nested, large_body, garbage,
)  # fmt: skip


async def _raw(port: int, *pieces: bytes) -> None:
    """Sends bytes and waits for the answer or the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
        await asyncio.wait_for(reader.read(1 << 16), 10.0)
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()


@dataclass
class HttpSoak:
    server: Server
    options: argparse.Namespace
    rng: random.Random
    asked: list[tuple[str, dict[str, Any]]]
    until_s: float = 0.0
    references: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until_s

    async def answer(self, client: httpx.AsyncClient, number: int) -> str:
        kind, body = self.asked[number]
        if kind != "stream":
            reply = await client.post("/v1/chat/completions", json=body)
            reply.raise_for_status()
            choice = reply.json()["choices"][0]
            if kind == "logprobs":
                return json.dumps([token["token"] for token in choice["logprobs"]["content"]])
            return str(choice["message"]["content"])
        text = ""
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise httpx.HTTPError(event["error"]["message"])
                    text += event["choices"][0]["delta"].get("content") or ""
        return text

    async def client(self, client: httpx.AsyncClient) -> None:
        while not self.is_over:
            number = self.rng.randrange(len(self.asked))
            try:
                found = await asyncio.wait_for(self.answer(client, number), self.options.limit)
            except TimeoutError:
                self.counts["hung"] += 1
                continue
            except httpx.HTTPError as error:
                self.counts["errors"] += 1
                self.messages.append(f"{self.asked[number][0]}: {error}")
                continue
            self.counts["right" if found == self.references[number] else "wrong"] += 1

    async def leaver(self, client: httpx.AsyncClient) -> None:
        """Goes after some events."""
        streams = [body for kind, body in self.asked if kind == "stream"]
        while not self.is_over:
            body = {**self.rng.choice(streams), "max_tokens": 40}
            try:
                async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    lines = reply.aiter_lines()
                    for _ in range(self.rng.randrange(6)):
                        await asyncio.wait_for(anext(lines, ""), self.options.limit)
            except (httpx.HTTPError, TimeoutError):
                self.counts["leaver_errors"] += 1
            self.counts["cancelled"] += 1
            await asyncio.sleep(0.2 * self.rng.random())

    async def attacker(self, client: httpx.AsyncClient) -> None:
        hard = {"type": "json_schema", "json_schema": {"name": "x", "schema": HARD}}
        for number in itertools.count():
            if self.is_over:
                return
            if number % 7 == 6:
                body = {**self.asked[0][1], "response_format": hard, "max_tokens": 16}
                try:
                    await client.post("/v1/chat/completions", json=body, timeout=self.options.limit)
                except httpx.HTTPError:
                    self.counts["hard_errors"] += 1
            else:
                await HOSTILE[number % len(HOSTILE)](self.server.port)
            self.counts["hostile"] += 1
            await asyncio.sleep(self.rng.random())

    async def killer(self, client: httpx.AsyncClient) -> None:
        gap_s = 60.0 * self.options.minutes / (self.options.kills + 1)
        for _ in range(self.options.kills):
            await asyncio.sleep(gap_s)
            devices = (await client.get("/v1/state", timeout=60.0)).json()["devices"]
            ready = [device["pid"] for device in devices if device["state"] == "ready" and device["pid"]]
            if ready and not self.is_over:
                os.kill(self.rng.choice(ready), signal.SIGKILL)
                self.counts["kills"] += 1

    async def prober(self, client: httpx.AsyncClient) -> None:
        while not self.is_over:
            begun_s = time.perf_counter()
            (await client.get("/health", timeout=LIMIT_HEALTH_S)).raise_for_status()
            self.health_s.append(time.perf_counter() - begun_s)
            await asyncio.sleep(PROBE_S)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self.options.clients + 8)
        base: dict[str, Any] = {"base_url": self.server.url, "timeout": self.options.limit + 5.0}
        async with httpx.AsyncClient(**base, limits=limits) as client, httpx.AsyncClient(**base) as probe:
            for number in range(len(self.asked)):
                self.references.append(await self.answer(client, number))
            self.until_s = time.monotonic() + 60.0 * self.options.minutes
            clients = [self.client(client) for _ in range(self.options.clients)]
            others = (self.leaver(client), self.attacker(client), self.killer(probe), self.prober(probe))
            await asyncio.gather(*clients, *others)
            for number in range(len(self.asked)):  # it still answers, and right
                found = await self.answer(client, number)
                self.counts["right" if found == self.references[number] else "wrong"] += 1


def soaked_minutes(options: argparse.Namespace, command: str) -> dict[str, Any]:
    rng = random.Random(options.seed)
    words = ["-m", "tessera", "serve", options.model, "--devices", options.devices]
    with Server(words) as server, server.watched() as memory:
        soak = HttpSoak(server, options, rng, bodies(options.model, options.distinct, rng))
        asyncio.run(soak.run())
    keys = ("right", "wrong", "hung", "errors", "cancelled", "hostile", "kills", "leaver_errors")
    quantiles = statistics.quantiles(soak.health_s, n=100)
    return {
        "command": command,
        "minutes": options.minutes,
        **{key: soak.counts[key] for key in keys},
        "health_ms": {
            "num": len(soak.health_s),
            "p50": round(1e3 * quantiles[49], 1),
            "p99": round(1e3 * quantiles[98], 1),
            "max": round(1e3 * max(soak.health_s), 1),
        },
        "memory": memory.thirds(),
        "load_average": os.getloadavg()[0],
        "messages": soak.messages[:5],
    }
