"""Limits on real sockets: clients that go, stall, idle, send too much or garbage; and the server's end."""

import asyncio
import json
import socket
import statistics
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
httpx = pytest.importorskip("httpx", reason="needs httpx")

import uvicorn  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from http_factory import Running, Scripted, running, wait_until  # noqa: E402
from tessera.errors import TesseraError  # noqa: E402
from tessera.serve.limits import HttpLimits  # noqa: E402
from tessera.serve.openai.bodies import CompletionRequest, parse  # noqa: E402
from tessera.serve.openai.errors import ApiError  # noqa: E402
from tessera.serve.server import Connection, ConnectionTable, allowed_connections, bind, is_loopback  # noqa: E402

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG = CHAT | {"max_tokens": 200}
LIMITS = HttpLimits(
    body_bytes=2000, body_s=0.5, requests=6, stall_s=0.5, connections=60, idle_s=1.0, drain_s=5.0
)


@pytest.fixture
def service() -> Scripted:
    return Scripted()


@pytest.fixture
def server(service: Scripted) -> Iterator[Running]:
    with running(service, LIMITS) as found:
        yield found


def raw_request(body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    """A request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


def connect(server: Running, first: bytes = b"", buffer: int | None = None) -> socket.socket:
    """A socket that has sent something."""
    found = socket.socket()
    if buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    found.settimeout(10)
    found.connect(("127.0.0.1", server.port))
    found.sendall(first)
    return found


def is_answered(server: Running) -> bool:
    """True if a good client is served."""
    return bool(httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 200)


def everything(client: socket.socket) -> bytes:
    """All until the server closes."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("is_stream", [True, False])
def test_client_that_goes_cancels_its_answer(server: Running, service: Scripted, is_stream: bool) -> None:
    """When a client closes its connection the generation is given up."""
    service.token_s = 0.05
    client = connect(server, raw_request(LONG | {"stream": is_stream}))
    wait_until(lambda: service.running == 1)
    client.close()

    wait_until(lambda: service.closed_early == 1, 2)
    assert service.running == 0


def test_reader_that_stalls_is_let_go(server: Running, service: Scripted) -> None:
    """A client that reads nothing is dropped after a while, its answer cancelled, and others are served."""
    service.times = 100_000
    client = connect(server, raw_request(LONG | {"stream": True}), buffer=4096)
    wait_until(lambda: service.running == 1)
    assert is_answered(server)

    wait_until(lambda: service.closed_early == 1, 5)
    wait_until(lambda: not server.server.server_state.connections)
    client.close()


def test_idle_and_half_open_sockets_keep_nobody_out(server: Running) -> None:
    """Three hundred sockets that bring no request, five times the limit, and a good client is served."""
    with ExitStack() as stack:
        for number in range(300):
            first = b"POST /v1/chat/completions HTTP/1.1\r\nhost:" if number % 2 else b""
            stack.enter_context(connect(server, first))
            if number % 50 == 0:
                assert is_answered(server)
        assert is_answered(server)
        wait_until(lambda: len(server.server.server_state.connections) <= LIMITS.connections)


def test_idle_connections_are_closed(server: Running) -> None:
    """A connection without a whole request ends after the idle time, also if it goes on dribbling."""
    idle, dribbling = connect(server), connect(server, b"GET / HT")
    started = time.monotonic()
    assert idle.recv(1) == b""
    with pytest.raises(OSError, match=r"reset|Broken|closed"):  # noqa: PT012
        while time.monotonic() - started < 10:
            dribbling.sendall(b"x")
            time.sleep(0.1)
    assert time.monotonic() - started < 5


def test_connection_is_used_again(server: Running) -> None:
    """Two requests on one connection are both answered."""
    client = connect(server, raw_request(CHAT) + raw_request(CHAT)[:20])
    wait_until(lambda: bool(client.recv(65536, socket.MSG_PEEK).count(b"usage") == 1))
    client.sendall(raw_request(CHAT)[20:])
    wait_until(lambda: bool(client.recv(65536, socket.MSG_PEEK).count(b"usage") == 2))
    answers = client.recv(65536)
    client.close()

    assert 2 == answers.count(b"HTTP/1.1 200")


def test_busy_connection_is_not_idle(service: Scripted) -> None:
    """An answer that takes longer than the idle time is finished, also on a connection used before."""
    with running(service, HttpLimits(idle_s=0.4, drain_s=2.0)) as server, httpx.Client() as client:
        for token_s in (0.0, 0.1):
            service.token_s = token_s
            answer = client.post(f"{server.url}/v1/chat/completions", json=CHAT | {"max_tokens": 10})
            assert answer.json()["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("is_chunked", [True, False])
def test_large_body_is_refused(server: Running, is_chunked: bool) -> None:
    """More bytes than allowed are 413, whether or not they were announced."""
    content = json.dumps(CHAT | {"user": "x" * 3000}).encode()
    parts = iter([content[:1000], content[1000:]]) if is_chunked else content
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=parts, headers=headers)

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(("kind", "status"), [("application/json", 413), ("text/plain", 415)])
def test_refusal_reaches_a_client_that_sends_on(server: Running, kind: str, status: int) -> None:
    """A client that reads nothing until it has sent 70 MB is told why, and may send another request."""
    client = HTTPConnection(server.url.partition("//")[2])
    for body, expected in ((bytes(70_000_000), status), (b"{}", 415)):
        client.request("POST", "/v1/chat/completions", body, {"content-type": kind if body[0] == 0 else ""})
        answer = client.getresponse()
        answer.read()
        assert answer.status == expected
    client.close()


@pytest.mark.parametrize(("is_next", "num_bytes"), [(False, 2**24), (True, 2**21)])
def test_rest_of_a_refused_body_is_bounded(service: Scripted, is_next: bool, num_bytes: int) -> None:
    """After an answer, no more bytes are read than large bodies may have; the next head has its own bound."""
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
    size = 70_000 if is_next else 10**8
    first = b"%scontent-length: %d\r\n\r\n%s" % (head, size, bytes(70_000))
    with running(service, HttpLimits(bodies_bytes=2**22)) as server, connect(server, first) as client:
        wait_until(lambda: b"405" in client.recv(100, socket.MSG_PEEK))
        with suppress(ConnectionError):
            client.sendall(head * is_next + b"x" * num_bytes)
            everything(client)


def test_body_that_does_not_come_is_given_up(server: Running) -> None:
    """A body that stays away is 408, and the connection is closed."""
    client = connect(server, raw_request(CHAT)[:-10])

    answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"timeout"' in answer


def test_large_bodies_share_a_budget(service: Scripted) -> None:
    """Large bodies that are slow to come leave no room for another large one, but for every small one."""
    limits = HttpLimits(body_bytes=300_000, bodies_bytes=400_000, body_s=1.0)
    large = CHAT | {"user": "x" * 290_000}
    with running(service, limits) as server, ExitStack() as stack:
        slow = stack.enter_context(connect(server, raw_request(large)[:-10]))
        limiter = server.server.config.app.state.limiter  # type: ignore[union-attr]
        wait_until(lambda: limiter.held_bytes > 200_000)
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=large)
        assert answer.status_code == 429
        assert is_answered(server)
        assert everything(slow).startswith(b"HTTP/1.1 408")
        assert limiter.held_bytes == 0
        assert httpx.post(f"{server.url}/v1/chat/completions", json=large).status_code == 200


def test_slow_bodies_take_no_place(server: Running) -> None:
    """More half-sent requests than may be served at once, and a good client is served."""
    with ExitStack() as stack:
        for _ in range(LIMITS.requests + 2):
            stack.enter_context(connect(server, raw_request(CHAT)[:-10]))
        assert is_answered(server)


def test_invalid_http_is_refused(server: Running) -> None:
    """Garbage gets a 400 and a closed connection."""
    assert everything(connect(server, b"\x16\x03\x01 hello\r\n\r\n")).startswith(b"HTTP/1.1 400")


def test_endless_head_is_dropped(service: Scripted) -> None:
    """A head without end closes the connection, however fast it comes."""
    with running(service, HttpLimits(bodies_bytes=2**20)) as server:
        client = connect(server, b"GET / HTTP/1.1\r\nhost: x\r\n")
        with client, pytest.raises(OSError, match=r"reset|Broken"):
            client.sendall(b"x-more: 1\r\n" * 2**20)


def test_a_head_beyond_its_limit_is_told_so(server: Running) -> None:
    """A client that sends all of its head before it reads gets a 431."""
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\ncookie: %s\r\n\r\n" % (b"x" * 2**22)
    with connect(server, head) as client:
        assert everything(client).startswith(b"HTTP/1.1 431 ")


def tiny_chunks(num: int) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * num


def test_tiny_chunks_are_refused(service: Scripted) -> None:
    """A flood of one-byte chunks is 400 long before its end; somewhat small chunks are read."""
    with running(service) as server:
        said = b""
        with connect(server, tiny_chunks(20_000)) as client, suppress(ConnectionResetError):
            while part := client.recv(65536):
                said += part
        body = json.dumps({"prompt": "x" * 100, "max_tokens": 1}).encode().ljust(100_000)
        parts = (body[at : at + 16] for at in range(0, len(body), 16))
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/completions", content=parts, headers=headers)

    assert said.startswith(b"HTTP/1.1 400")
    assert b"tiny_chunks" in said
    assert answer.status_code == 200


def test_key_is_checked_before_the_body(service: Scripted) -> None:
    """A chunked body without a key is 401 at once, and the connection is closed."""
    with running(service, keys=("some-secret",)) as server, connect(server, tiny_chunks(1)) as client:
        said = everything(client)

    assert said.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in said


@pytest.mark.rerun("times a server beside four flooding threads")
def test_a_flood_of_chunks_without_a_key_delays_nobody(service: Scripted) -> None:
    """600 KB of one-byte chunks on four connections: /health meanwhile within 200 ms."""
    slowest_s: list[float] = []
    with running(service, keys=("some-secret",)) as server, httpx.Client(base_url=server.url) as client:
        client.get("/health")
        is_over = threading.Event()

        def flood() -> None:
            while not is_over.is_set():
                with suppress(OSError), connect(server, tiny_chunks(100_000)) as one:
                    everything(one)

        floods = [threading.Thread(target=flood) for _ in range(4)]
        for thread in floods:
            thread.start()
        for _ in range(30):
            begun_s = time.perf_counter()
            assert client.get("/health").status_code == 200
            slowest_s.append(time.perf_counter() - begun_s)
        is_over.set()
        for thread in floods:
            thread.join()

    assert statistics.median(slowest_s) < 0.05
    assert max(slowest_s) < 0.2


def test_too_many_requests_are_refused(server: Running, service: Scripted) -> None:
    """Above the most at once a request is 429; afterwards it is served."""
    service.token_s = 0.05
    clients = [connect(server, raw_request(LONG)) for _ in range(LIMITS.requests)]
    wait_until(lambda: service.running == LIMITS.requests)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"

    for client in clients:
        client.close()
    wait_until(lambda: service.running == 0)
    assert is_answered(server)


def test_stop_finishes_what_runs_and_refuses_what_comes(server: Running, service: Scripted) -> None:
    """Told to stop, the server ends the running answer whole, and answers 503 meanwhile."""
    service.token_s = 0.5
    found: list[Any] = []
    body = CHAT | {"max_tokens": 20}
    thread = threading.Thread(
        target=lambda: found.append(httpx.post(f"{server.url}/v1/chat/completions", json=body))
    )
    thread.start()
    wait_until(lambda: service.running == 1)
    server.server.end()

    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    service.token_s = 0.0
    thread.join()
    assert found[0].json()["usage"]["completion_tokens"] == 20
    server.thread.join(5)
    assert not server.thread.is_alive()


def test_what_does_not_finish_in_time_is_told_so(service: Scripted) -> None:
    """After the deadline a stream ends with an error of its own, not by a broken connection."""
    service.token_s = 0.05
    with running(service, HttpLimits(drain_s=0.3)) as server:
        client = connect(server, raw_request(LONG | {"stream": True}))
        wait_until(lambda: service.running == 1)
        server.server.end()
        text = everything(client).decode()

    assert '"code":"shutting_down"' in text
    assert "data: [DONE]" in text


def test_second_signal_ends_at_once(service: Scripted) -> None:
    """Told to stop twice, the server does not wait for what runs."""
    service.token_s = 0.1
    with running(service, HttpLimits(drain_s=60.0)) as server:
        client = connect(server, raw_request(LONG | {"stream": True}))
        wait_until(lambda: service.running == 1)
        server.server.end()
        server.server.end()
        server.thread.join(8)
        assert not server.thread.is_alive()
        client.close()
    assert service.closed_early == 1


def test_port_in_use_is_one_line() -> None:
    """A port that another program has is an error with the remedy."""
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(TesseraError, match=r"the port is in use. Choose another: --port 0"):
            bind("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(("host", "is_local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_loopback_is_known(host: str, is_local: bool) -> None:
    """Only addresses of this machine alone count as loopback."""
    assert is_loopback(host) == is_local


def test_fewer_files_mean_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shell allows few open files, connections are fewer and the remark says what to raise."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (512, 1024))
    monkeypatch.setattr("resource.setrlimit", lambda which, limits: None)

    allowed, remark = allowed_connections(10_000)

    assert allowed == 768
    assert "ulimit -n 10256" in remark


OFFER = b" HTTP/1.1\r\nconnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEA\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize(
    "parts", [(b"",), (b"U", b"pgrade: "), (b"Upgra", b"de: h2c\r\n"), (b"\r", b"\nUpgrade")]
)
def test_an_offer_of_another_protocol_is_ignored(server: Running, parts: tuple[bytes, ...]) -> None:
    """Java's client offers HTTP/2 with every first request, and sends the body all the same; wherever a read
    of the offer ends.
    """
    request = raw_request(CHAT).replace(b" HTTP/1.1\r\n", OFFER)
    at = request.index(b"".join(parts)) + len(parts[0])
    with connect(server, request[:at]) as client:
        time.sleep(0.05)
        client.sendall(request[at:])
        said = client.recv(65536)

    assert said.startswith(b"HTTP/1.1 200 ")


def test_a_body_that_begins_like_an_offer_is_read_to_its_end(server: Running) -> None:
    """Only lines of a head are offers: the last bytes of a body are not kept back."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with connect(server, head + b"content-length: 3\r\n\r\n\nup") as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_a_body_of_two_lengths_is_refused_and_the_connection_closed(server: Running) -> None:
    """A proxy might believe the other one, and take the rest for the next request."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    both = b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(server, head + both + b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n") as client:
        said = everything(client)

    assert said.startswith(b"HTTP/1.1 400 ")
    assert 1 == said.count(b"HTTP/1.1")


@pytest.mark.parametrize("item", ["[1],", "{},", '"a",', "1,", "[[[]]],"])
@pytest.mark.parametrize("field", ["prompt", "stop", "unknown"])
def test_a_body_of_a_million_parts_is_refused_before_they_are_made(item: str, field: str) -> None:
    """Counting them takes hardly any memory, and no time to speak of."""
    body = f'{{"x": "\\\\\\"", "{field}": [{item * (2_400_000 // len(item))}1]}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="lists, objects and texts"):
            parse(CompletionRequest, body, "toy")
        assert tracemalloc.get_traced_memory()[1] < 16 * len(body)
    finally:
        tracemalloc.stop()


def test_a_text_with_many_brackets_is_a_text() -> None:
    """Only what stands outside of texts counts."""
    said = '{"[\\\\",' * 50_000

    assert said == parse(CompletionRequest, json.dumps({"prompt": said}).encode(), "toy").prompt


def test_a_transport_of_another_event_loop_is_taken() -> None:
    """uvloop's transports have asyncio's methods and are none of its classes."""

    class Transport:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    async def connected() -> int:
        table, config = ConnectionTable(LIMITS), uvicorn.Config(lambda scope: None)
        config.load()
        connection = Connection(table, config=config, server_state=ServerState())
        connection.connection_made(Transport())  # type: ignore[arg-type]
        return len(table.idle)

    assert 1 == asyncio.run(connected())
