"""Clients that do harm: sockets that say nothing, readers that hardly read, and askers that go away.

    python tests/bad_clients.py --url http://127.0.0.1:8000 --idle 10000 --slow 50 --leave 16

As a program it prints one JSON line when all are there, and another with its counts when standard input ends.
Half of the idle sockets send the beginning of a request and never its end. A slow reader has a small receive
buffer and takes 512 bytes every quarter of a second. One that leaves reads the first bytes of its stream and
resets the connection, again and again.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import sys
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

SIP_BYTES, SIP_S = 512, 0.25
BUFFER_BYTES = 4096
# Connects at a time: more would only overflow the server's backlog.
DIALS = 128


@dataclass
class Counts:
    """What the bad clients did, and what the server did to them."""

    idle: int = 0
    # How often the server closed an idle socket; it was opened again.
    idle_closed: int = 0
    # Connections that were not made.
    refused: int = 0
    slow: int = 0
    # Streams that a slow reader got to the end of, and its bytes.
    slow_ended: int = 0
    sipped_bytes: int = 0
    # Streams that were left in the middle, and questions that got no stream to leave.
    left: int = 0
    not_left: int = 0


class BadClients:
    """Runs until cancelled; `is_up` is set when every kind is there."""

    def __init__(self, url: str, model: str, max_tokens: int) -> None:
        self._target = urlsplit(url)
        asked = {"model": model, "prompt": "once upon a time", "max_tokens": max_tokens, "stream": True}
        self._body = json.dumps(asked | {"logprobs": 5, "ignore_eos": True}).encode()
        self.counts = Counts()
        self.is_up = asyncio.Event()

    def _request(self) -> bytes:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._target.netloc}\r\nContent-Type: application/json"
        )
        return f"{head}\r\nContent-Length: {len(self._body)}\r\n\r\n".encode() + self._body

    async def run(self, idle: int, slow: int, leave: int) -> None:
        """All of them together."""
        dials = asyncio.Semaphore(DIALS)
        async with asyncio.TaskGroup() as group:
            holds = [group.create_task(self._idle(n, dials)) for n in range(idle)]
            holds += [group.create_task(self._slow()) for _ in range(slow)]
            for _ in range(leave):
                group.create_task(self._leave())
            while sum((self.counts.idle, self.counts.refused, self.counts.slow)) < len(holds):
                await asyncio.sleep(0.05)
            self.is_up.set()

    async def _open(
        self, buffer_bytes: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, (self._target.hostname, self._target.port))
            return await asyncio.open_connection(sock=sock, limit=BUFFER_BYTES)
        except OSError:
            sock.close()
            self.counts.refused += 1
            return None

    async def _idle(self, number: int, dials: asyncio.Semaphore) -> None:
        """A socket that is closed by the server is opened again."""
        is_first = True
        while True:
            async with dials:
                opened = await self._open()
            if opened is None:
                return
            reader, writer = opened
            self.counts.idle += is_first
            is_first = False
            with contextlib.suppress(ConnectionError):
                if number % 2:
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
                await reader.read()
            self.counts.idle_closed += 1
            writer.close()

    async def _slow(self) -> None:
        opened = await self._open(BUFFER_BYTES)
        if opened is None:
            return
        reader, writer = opened
        self.counts.slow += 1
        with contextlib.suppress(ConnectionError):
            writer.write(self._request())
            while data := await reader.read(SIP_BYTES):
                self.counts.sipped_bytes += len(data)
                if data.endswith(b"0\r\n\r\n"):
                    break
                await asyncio.sleep(SIP_S)
        self.counts.slow_ended += 1
        writer.close()

    async def _leave(self) -> None:
        while True:
            opened = await self._open()
            if opened is not None:
                reader, writer = opened
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                    writer.write(self._request())
                    async with asyncio.timeout(60.0):
                        head = await reader.readuntil(b"\r\n\r\n")
                        await reader.readexactly(16)
                    is_stream = b" 200 " in head.split(b"\r\n")[0]
                    self.counts.left += is_stream
                    self.counts.not_left += not is_stream
                writer.transport.abort()
            await asyncio.sleep(0.02)


async def _main(asked: argparse.Namespace) -> None:
    clients = BadClients(asked.url, asked.model, asked.max_tokens)
    running = asyncio.create_task(clients.run(asked.idle, asked.slow, asked.leave))
    await clients.is_up.wait()
    print(json.dumps(asdict(clients.counts)), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps(asdict(clients.counts)), flush=True)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main() -> None:
    """Does harm until standard input ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--idle", type=int, default=100)
    parser.add_argument("--slow", type=int, default=8)
    parser.add_argument("--leave", type=int, default=4)
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
