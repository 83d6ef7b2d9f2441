"""Reply: responses cut anywhere, ended in any way, and those that are none."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_factory import HEAD, answer, chunked, plain
from tessera.errors import LoadError
from tessera.serve.load_reply import MAX_HEAD_BYTES, Reply

ASKED = {"messages": [{"role": "user", "content": "héllo ☃"}], "max_completion_tokens": 5}
WIRE = b"".join(piece for piece in answer(ASKED) if piece is not None)


def read(*pieces: bytes) -> Reply:
    """A reply from pieces that come a second apart."""
    reply = Reply()
    for number, piece in enumerate(pieces):
        reply.feed(piece, float(number))
    return reply


@given(st.lists(st.integers(0, len(WIRE)), max_size=30))
def test_events_do_not_depend_on_where_bytes_are_cut(cuts: list[int]) -> None:
    """Chunks, lines and events may be cut anywhere."""
    whole = read(WIRE)
    places = [0, *sorted(cuts), len(WIRE)]

    reply = read(*(WIRE[a:b] for a, b in pairwise(places)))

    assert reply.is_done
    assert [data for _, data in whole.events] == [data for _, data in reply.events]
    assert whole.events[-1][1] == b"[DONE]"


def test_an_event_has_the_time_of_its_last_byte() -> None:
    """An event that comes in two pieces is there with the second."""
    reply = read(HEAD, chunked(b"data: a\n\ndata: b"), chunked(b"\n\n"), b"0\r\n\r\n")

    assert [(1.0, b"a"), (2.0, b"b")] == reply.events
    assert reply.first_s == 1.0


def test_events_may_have_several_lines_carriage_returns_and_comments() -> None:
    """What the format allows is understood: `\\r\\n`, comments, names, data without a space."""
    body = b": ping\r\n\r\nevent: x\r\ndata:one\r\ndata: two\r\n\r\n"

    reply = read(HEAD, chunked(body), b"0\r\nTrailer: x\r\n\r\n")

    assert [b"one\ntwo"] == [data for _, data in reply.events]
    assert reply.is_done


def test_a_body_with_a_length_ends_with_it() -> None:
    """A plain JSON answer leaves the connection free for the next request."""
    (wire,) = plain(400, {"a": 1})

    reply = read(wire[:-3], wire[-3:])

    assert reply.is_done
    assert reply.can_follow
    assert (400, b'{"a": 1}') == (reply.status, bytes(reply.body))


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    """HTTP/1.0 style bodies are whole when the server closes, and the connection is over."""
    reply = read(b"HTTP/1.1 200 OK\r\n\r\nsome")
    was_done = reply.is_done

    reply.end()

    assert (False, True, False) == (was_done, reply.is_done, reply.can_follow)


def test_an_interim_response_is_skipped() -> None:
    """100 Continue is followed by the real answer."""
    reply = read(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n")

    assert (204, True) == (reply.status, reply.is_done)


def test_a_closed_connection_is_no_end_of_a_chunked_body() -> None:
    """Half an answer is an error."""
    with pytest.raises(LoadError, match="in the middle of an answer"):
        read(HEAD, chunked(b"data: a\n\n")).end()


@pytest.mark.parametrize(
    "wire",
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"zz\r\n", b"x" * (MAX_HEAD_BYTES + 1)],
)
def test_what_is_no_http_is_a_named_error(wire: bytes) -> None:
    """Another protocol's bytes give one clear error and no traceback."""
    with pytest.raises(LoadError) as caught:
        read(wire)

    assert caught.value.kind == "protocol"
