"""The load generator's client: streams cut anywhere, ended in any way, and answers that are none."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load_factory import HEAD, answer, chunked, serving
from tessera.errors import LoadError
from tessera.serve.load import Generation, LoadOptions, LoadRun, measure

BODY = (
    b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n: ping\n\nevent: x\r\n'
    b'data:{"choices": [{"delta": {"content": "\xe2\x98\x83"}, "finish_reason": "stop"}]}\r\n\r\n'
    b"data: [DONE]\n\n"
)


def ask(*wire: bytes | None) -> Generation | LoadError:
    """What the load generator makes of an answer in these bytes; the two before it measure words."""
    num = 0

    def handler(path: str, asked: dict[str, object]) -> list[bytes | None]:
        nonlocal num
        num += 1
        return list(answer(asked)) if num < 3 else list(wire)

    async def run(url: str) -> LoadRun:
        return await measure(url, LoadOptions(1, 1, timeout_s=10.0), lambda what: None)

    with serving(handler) as stub:
        return asyncio.run(run(stub.url)).outcomes[0].answer


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, len(BODY)), max_size=30))
def test_events_do_not_depend_on_where_bytes_are_cut(cuts: list[int]) -> None:
    """Lines may be cut anywhere; `\\r\\n`, comments and names are understood."""
    places = sorted({0, *cuts, len(BODY)})

    found = ask(HEAD, *(chunked(BODY[a:b]) for a, b in pairwise(places)), b"0\r\n\r\n")

    assert isinstance(found, Generation)
    assert ("a\u2603", "stop") == (found.text, found.finish_reason)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    """HTTP/1.0 style bodies are whole when the server closes."""
    found = ask(b"HTTP/1.1 200 OK\r\n\r\n" + BODY, None)

    assert isinstance(found, Generation)


def test_a_closed_connection_is_no_end_of_a_chunked_body() -> None:
    """Half an answer is an error."""
    found = ask(HEAD, chunked(b"data: a\n"), None)

    assert isinstance(found, LoadError)


@pytest.mark.parametrize(
    "wire", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"zz\r\n", b"x" * (64 << 10)]
)
def test_what_is_no_http_is_a_named_error(wire: bytes) -> None:
    """Another protocol's bytes give one clear error and no traceback."""
    found = ask(wire)

    assert isinstance(found, LoadError)
    assert found.kind in ("protocol", "closed")
