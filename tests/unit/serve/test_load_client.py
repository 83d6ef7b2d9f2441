"""The load generator's client: responses cut anywhere, ended in any way, and those that are none."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_factory import HEAD, answer, chunked, plain, serving
from tessera.errors import LoadError
from tessera.serve.load import Reply, connected, parse_address

ASKED = {"messages": [{"role": "user", "content": "héllo ☃"}], "max_completion_tokens": 5}
BODY = (
    b"data: a\n\ndata:\xe2\x98\x83 b\r\n\r\n: ping\n\n"
    b"event: x\r\ndata: one\r\ndata: two\r\n\r\ndata: [DONE]\n\n"
)


def read(*pieces: bytes) -> Reply:
    """The body of a stream, in pieces that come a second apart."""
    reply = Reply(is_events=True)
    for number, piece in enumerate(pieces):
        reply.take(piece, float(number))
    return reply


def ask(*wire: bytes | None, times: int = 1) -> tuple[Sequence[Reply], int]:
    """Replies to questions that are all answered by these bytes, and the connections that it took."""

    async def run(url: str) -> list[Reply]:
        async with connected(parse_address(url), timeout_s=10.0) as client:
            return [await client.ask("POST", "/v1/completions", b"{}") for _ in range(times)]

    with serving(lambda path, asked: wire) as stub:
        replies = asyncio.run(run(stub.url))
    return replies, stub.num_connections


@given(st.lists(st.integers(0, len(BODY)), max_size=30))
def test_events_do_not_depend_on_where_bytes_are_cut(cuts: list[int]) -> None:
    """Lines and events may be cut anywhere; `\\r\\n`, comments, names and several lines are understood."""
    places = [0, *sorted(cuts), len(BODY)]

    reply = read(*(BODY[a:b] for a, b in pairwise(places)))

    assert [b"a", "☃ b".encode(), b"one\ntwo", b"[DONE]"] == [data for _, data in reply.events]


def test_an_event_has_the_time_of_its_last_byte() -> None:
    """An event that comes in two pieces is there with the second."""
    reply = read(b"data: a\n\ndata: b", b"\n\n")

    assert [(0.0, b"a"), (1.0, b"b")] == reply.events
    assert reply.first_s == 0.0


def test_a_stream_comes_whole() -> None:
    """Every event of a chunked body is there, whatever its letters."""
    (reply,), _ = ask(*answer(ASKED))

    assert reply.status == 200
    assert reply.events[-1][1] == b"[DONE]"
    assert len(reply.events) == 1 + 5 + 1 + 1


def test_a_body_with_a_length_leaves_the_connection_free() -> None:
    """Two questions with plain JSON answers are asked over one connection."""
    replies, num_connections = ask(*plain(400, {"a": 1}), times=2)

    assert [(400, b'{"a": 1}')] * 2 == [(reply.status, bytes(reply.body)) for reply in replies]
    assert num_connections == 1


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    """HTTP/1.0 style bodies are whole when the server closes, and the next question takes another one."""
    replies, num_connections = ask(b"HTTP/1.1 200 OK\r\n\r\nsome", None, times=2)

    assert [b"some"] * 2 == [bytes(reply.body) for reply in replies]
    assert num_connections == 2


def test_an_interim_response_is_skipped() -> None:
    """100 Continue is followed by the real answer."""
    (reply,), _ = ask(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n")

    assert reply.status == 204


def test_a_closed_connection_is_no_end_of_a_chunked_body() -> None:
    """Half an answer is an error."""
    with pytest.raises(LoadError, match="in the middle of an answer"):
        ask(HEAD, chunked(b"data: a\n\n"), None)


@pytest.mark.parametrize(
    "wire",
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"zz\r\n", b"x" * (64 << 10)],
)
def test_what_is_no_http_is_a_named_error(wire: bytes) -> None:
    """Another protocol's bytes give one clear error and no traceback."""
    with pytest.raises(LoadError) as caught:
        ask(wire)

    assert caught.value.kind == "protocol"
