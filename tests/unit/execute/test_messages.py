"""Messages between engine and workers: what is sent is what arrives, and nothing else is believed."""

import json
import random
import struct
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import engine_factory as made
from tessera.errors import TesseraError
from tessera.execute.lower import lower
from tessera.execute.messages import (
    KINDS,
    Begin,
    Briefed,
    Cancel,
    Cancelled,
    Clear,
    Done,
    Failed,
    Hello,
    Load,
    Message,
    PeerLost,
    Piece,
    Progress,
    Ready,
    Refused,
    Relink,
    StoreGet,
    StoreSet,
    StoreValue,
    Want,
    Welcome,
    Where,
    decode,
    encode,
    pack_programs,
    unpack_programs,
)
from tessera.execute.packing import Packed, pack, unpack

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(-1e9, 1e9)
TEXTS = st.text(max_size=8)
PACKED = st.lists(st.integers(0, 3), max_size=3).map(lambda shape: pack(torch.zeros(shape)))
TENSORS = st.dictionaries(TEXTS, PACKED, max_size=2)
HEX = st.binary(max_size=4).map(bytes.hex)


def rows(width: int) -> st.SearchStrategy[list[list[float]]]:
    """Tables whose rows start with an index."""
    row = st.tuples(st.integers(0, 1 << 40), st.lists(FLOATS, min_size=width - 1, max_size=width - 1))
    return st.lists(row.map(lambda r: [r[0], *r[1]]), max_size=2)


# Fields of every kind, in their order.
FIELDS: dict[type, list[st.SearchStrategy[Any]]] = {
    Hello: [NUMBERS, TEXTS, TEXTS],
    Welcome: [TENSORS],
    Refused: [TEXTS, TEXTS],
    Want: [TEXTS, NUMBERS],
    Piece: [TENSORS],
    Briefed: [],
    Ready: [FLOATS, NUMBERS],
    StoreSet: [TEXTS, HEX],
    StoreGet: [TEXTS],
    StoreValue: [TEXTS, HEX],
    Load: [NUMBERS, TENSORS],
    Relink: [NUMBERS, NUMBERS],
    Where: [],
    Progress: [rows(3)],
    Cancelled: [NUMBERS],
    Begin: [NUMBERS, NUMBERS, NUMBERS, NUMBERS, TENSORS, TENSORS, *[st.booleans()] * 2, TEXTS],
    Clear: [NUMBERS, NUMBERS],
    Cancel: [NUMBERS],
    Done: [NUMBERS, TENSORS, TENSORS, rows(4), rows(3), FLOATS],
    Failed: [TEXTS, TEXTS, NUMBERS, NUMBERS, NUMBERS],
    PeerLost: [NUMBERS, TEXTS, NUMBERS],
}
MESSAGES: st.SearchStrategy[Message] = st.one_of(*[st.builds(k, *parts) for k, parts in FIELDS.items()])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON header of an encoded message, and what follows it."""
    (length,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + length]), data[4 + length :]


def with_header(head: Any, rest: bytes = b"") -> bytes:
    """A message with this header."""
    text = json.dumps(head).encode()
    return struct.pack("<I", len(text)) + text + rest


def test_tensors_survive_the_way() -> None:
    """Types, shapes and bits of several tensors in two fields, an empty one among them."""
    tensors = {"a": torch.randn(2, 3).bfloat16(), "empty": torch.empty(0, 4), "b": torch.arange(5)}
    sent = Done(7, {n: pack(t) for n, t in tensors.items()}, {"s": pack(torch.ones(3))}, [[1, 2.0, 3.0, 0.5]])
    found = decode(encode(sent))

    assert isinstance(found, Done)
    assert sent == found
    for name, tensor in tensors.items():
        assert torch.equal(tensor, unpack(found.outputs[name]))


@given(MESSAGES)
def test_every_field_arrives(message: Message) -> None:
    """Equal by value after the round trip, whatever the message."""
    assert message == decode(encode(message))


def test_every_kind_of_message_is_tried() -> None:
    """The strategies above leave none out."""
    assert set(KINDS.values()) == set(FIELDS)


@given(st.binary(max_size=64))
@example(b"\x01\0\0\0" + b"0")
@example(b"\x02\0\0\0" + b"[]")
@example((200_000).to_bytes(4, "little") + b"[" * 200_000)
def test_noise_is_refused(data: bytes) -> None:
    """Bytes that are no message raise an error of the program's own, never anything else."""
    with pytest.raises(TesseraError):
        decode(data)


@given(MESSAGES, st.data())
def test_a_field_of_another_type_is_refused(message: Message, data: st.DataObject) -> None:
    """One field replaced by any JSON: either it is as good as before, or the message is refused."""
    head, rest = header_of(encode(message))
    name = data.draw(st.sampled_from(sorted(head)))
    value = data.draw(JSON)
    was = head[name]
    assume(type(value) is not type(was) or isinstance(was, list))
    head[name] = value
    try:
        found = decode(with_header(head, rest))
    except TesseraError:
        return

    # What got through has the type that the record says: a number may be written without a fraction.
    assert (type(was), type(value)) == (float, int) or type(was) is list is type(value)
    assert found == decode(encode(found))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", 1.0),
        ("run", True),
        ("run", "1"),
        ("run", 1 << 63),
        ("run", None),
        ("spans", [[0, 1.0, 2.0]]),
        ("spans", [[0.5, 1.0, 2.0, 0.1]]),
        ("spans", [[-1, 1.0, 2.0, 0.1]]),
        ("spans", [[0, float("nan"), 2.0, 0.1]]),
        ("spans", [[0, 1.0, "2", 0.1]]),
        ("spans", {"0": []}),
        ("transfers", [[0, 1.0, 10**400]]),
        ("outputs", [["y", "float32", [2], 7]]),
        ("outputs", [["y", "float32", [-2], -8]]),
        ("outputs", [["y", "Tensor", [2], 8]]),
        ("outputs", [["y", "load", [2], 8]]),
        ("outputs", [["y", "float32", [2.0], 8]]),
        ("outputs", [["y", "float32", [1 << 40], 4 << 40]]),
        ("outputs", {"y": 1}),
        ("surplus", 1),
    ],
)
def test_a_wrong_field_is_refused(field: str, value: Any) -> None:
    """Each of these would have been believed by a check of the shape alone, or would end the reader."""
    head, rest = header_of(encode(Done(7, {}, {})))

    with pytest.raises(TesseraError, match="cannot be read"):
        decode(with_header(head | {field: value}, rest))


def test_a_missing_field_is_refused() -> None:
    """A record is not made of half a message."""
    with pytest.raises(TesseraError, match="cannot be read"):
        decode(with_header({"kind": "Cancel"}))


def test_a_tensor_that_comes_twice_is_refused() -> None:
    """Two tensors of one name are not joined to one."""
    one: Packed = pack(torch.ones(1))
    row = ["x", "float32", [1], 4]
    with pytest.raises(TesseraError, match="comes twice"):
        decode(with_header({"kind": "Welcome", "briefing": [row, row]}, one[2] * 2))


def test_a_truncated_message_is_refused() -> None:
    """A tensor that is cut off is not read as a shorter one."""
    whole = encode(Begin(1, 2, 3, 4, {"x": pack(torch.zeros(8))}, {}, False))

    with pytest.raises(TesseraError, match="truncated"):
        decode(whole[:-1])
    with pytest.raises(TesseraError, match="length is wrong"):
        decode(whole + b"!")


def test_programs_survive_the_way() -> None:
    """Those of a plan that crosses between devices; anything else is refused."""
    plan = made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)
    lanes = [list(lane) for lane in lower(plan)]
    packed = pack_programs(lanes)

    assert [tuple(lane) for lane in lanes] == unpack_programs(packed)
    kind, _, data = packed["programs"]
    for wrong in (data[:-1], b"[]]", b"{}", b"[[{}]]", data.replace(b'"src":0', b'"src":9', 1)):
        with pytest.raises(TesseraError, match="programs cannot be read"):
            unpack_programs({"programs": (kind, (len(wrong),), wrong)})
    with pytest.raises(TesseraError, match="programs cannot be read"):
        unpack_programs({})
