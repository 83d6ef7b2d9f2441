"""Messages between engine and workers: what is sent is what arrives, and nothing else is believed."""

import random
from typing import Any, get_args

import msgspec
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import engine_factory as made
from tessera.errors import TesseraError
from tessera.execute.lower import lower
from tessera.execute.messages import (
    Begin,
    Cancel,
    Cancelled,
    Clear,
    Configured,
    Done,
    DropLanes,
    Failed,
    Hello,
    LateInputs,
    Leave,
    LinkClose,
    LinkFrame,
    LinkOpen,
    LoadLanes,
    Message,
    MovePages,
    PageFrame,
    PageTaken,
    PeerLost,
    Progress,
    Relink,
    StoreGet,
    StoreValue,
    Want,
    WeightBytes,
    Welcome,
    Where,
    WorkerReady,
    decode,
    encode,
    fingerprint,
    pack,
    unpack,
)

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(-1e9, 1e9)
TEXTS = st.text(max_size=8)
PACKED = st.lists(st.integers(0, 3), max_size=3).map(lambda shape: pack(torch.zeros(shape)))
TENSORS = st.dictionaries(TEXTS, PACKED, max_size=2)
BYTES = st.binary(max_size=4)
INDEX = st.integers(0, 1 << 40)
INDEXES = st.lists(INDEX, max_size=3)
PARTS = st.lists(st.tuples(TEXTS, INDEX), max_size=2)
PLACE = st.tuples(NUMBERS, NUMBERS)


def rows(*parts: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Tables whose rows start with an index."""
    return st.lists(st.tuples(INDEX, *parts), max_size=2)


# Fields of every kind, in their order.
FIELDS: dict[type, list[st.SearchStrategy[Any]]] = {
    Hello: [NUMBERS, TEXTS, TEXTS],
    Welcome: [BYTES],
    Want: [TEXTS, NUMBERS],
    WeightBytes: [BYTES.map(memoryview)],
    Configured: [],
    Leave: [],
    LinkOpen: [INDEX, INDEX],
    LinkClose: [],
    LinkFrame: [INDEX, INDEX, FLOATS],
    MovePages: [INDEX, INDEX, PLACE, PLACE, PARTS, INDEXES, INDEXES],
    PageFrame: [*[INDEX] * 3, PLACE, st.lists(st.tuples(TEXTS, INDEX, INDEXES), max_size=2), INDEX],
    PageTaken: [INDEX],
    WorkerReady: [FLOATS, NUMBERS, TEXTS],
    StoreGet: [TEXTS],
    StoreValue: [TEXTS, BYTES],
    LoadLanes: [st.just(((),)), st.just(()), st.just(((1.5,),))],
    DropLanes: [INDEXES, INDEXES],
    Relink: [NUMBERS, NUMBERS, TEXTS],
    Where: [],
    Progress: [rows(NUMBERS, NUMBERS)],
    Cancelled: [NUMBERS],
    Begin: [
        *[NUMBERS] * 4,
        *[TENSORS] * 2,
        *[st.booleans()] * 2,
        st.lists(TEXTS, max_size=2).map(tuple),
        st.booleans(),
    ],
    LateInputs: [NUMBERS, TENSORS],
    Clear: [NUMBERS, NUMBERS],
    Cancel: [NUMBERS],
    Done: [NUMBERS, TENSORS, TENSORS, rows(FLOATS, FLOATS, FLOATS), rows(FLOATS, FLOATS), FLOATS, FLOATS],
    Failed: [TEXTS, TEXTS],
    PeerLost: [NUMBERS, TEXTS, NUMBERS],
}
MESSAGES: st.SearchStrategy[Message] = st.one_of(*[st.builds(k, *parts) for k, parts in FIELDS.items()])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)


def fields_of(message: Message) -> dict[str, Any]:
    """An encoded message as plain values."""
    plain: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return plain


def test_tensors_survive_the_way() -> None:
    """Types, shapes and bits of several tensors in two fields, an empty one among them."""
    tensors = {"a": torch.randn(2, 3).bfloat16(), "empty": torch.empty(0, 4), "b": torch.arange(5)}
    sent = Done(7, {n: pack(t) for n, t in tensors.items()}, {"s": pack(torch.ones(3))}, [(1, 2.0, 3.0, 0.5)])
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
    assert set(get_args(Message)) == set(FIELDS)


@given(st.binary(max_size=64))
@example(b"\x91" * 200_000)
@example(msgspec.msgpack.encode({"kind": "Hello", "rank": 0, "digest": 1}))
@example(b"\x81\xa4kind\xa3\xff\xff\xff")
def test_noise_is_refused(data: bytes) -> None:
    """Bytes that are no message raise an error of the program's own, never anything else."""
    with pytest.raises(TesseraError):
        decode(data)


@given(MESSAGES, st.data())
def test_a_field_of_another_type_is_refused(message: Message, data: st.DataObject) -> None:
    """One field replaced by any JSON: either it is as good as before, or the message is refused."""
    plain = fields_of(message)
    name = data.draw(st.sampled_from(sorted(plain)))
    value = data.draw(JSON)
    was = plain[name]
    assume(type(value) is not type(was) or isinstance(was, list | dict))
    try:
        found = decode(msgspec.msgpack.encode(plain | {name: value}))
    except TesseraError:
        return

    # What got through has the type that the record says: a number may be written without a fraction.
    assert (type(was), type(value)) == (float, int) or type(was) is type(value)
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
        ("spans", [[0, float("inf"), 2.0, 0.1]]),
        ("spans", [[0, 1.0, "2", 0.1]]),
        ("spans", {"0": []}),
        ("transfers", [[0, 1.0, 2.0**60]]),
        ("outputs", {"y": ["float32", [2], b"1234567"]}),
        ("outputs", {"y": ["float32", [-2], b"12345678"]}),
        ("outputs", {"y": ["Tensor", [2], b"12345678"]}),
        ("outputs", {"y": ["load", [2], b"12345678"]}),
        ("outputs", {"y": ["float32", [2.0], b"12345678"]}),
        ("outputs", {"y": ["float32", [1 << 40], b"12345678"]}),
        ("outputs", {"y": ["float32", [2], b"12345678", 1]}),
        ("outputs", ["y", 1]),
        ("surplus", 1),
    ],
)
def test_a_wrong_field_is_refused(field: str, value: Any) -> None:
    """Each of these would have been believed by a check of the shape alone, or would end the reader."""
    plain = fields_of(Done(7, {}, {}))

    with pytest.raises(TesseraError, match=f"cannot be read.*{field}"):
        decode(msgspec.msgpack.encode(plain | {field: value}))


def test_a_missing_field_is_refused() -> None:
    """A record is not made of half a message."""
    with pytest.raises(TesseraError, match=r"cannot be read.*run"):
        decode(msgspec.msgpack.encode({"kind": "Cancel"}))


def test_a_truncated_message_is_refused() -> None:
    """A tensor that is cut off is not read as a shorter one."""
    whole = encode(Begin(1, 2, 3, 4, {"x": pack(torch.zeros(8))}, {}, False))

    with pytest.raises(TesseraError, match="truncated"):
        decode(whole[:-1])
    with pytest.raises(TesseraError, match="trailing"):
        decode(whole + b"!")


def test_programs_survive_the_way() -> None:
    """Those of a plan that crosses between devices; anything else is refused."""
    plan = made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)
    lanes = LoadLanes(lower(plan), tuple(g.trace for g in plan.graphs), ((1.5, 2.0), ()))
    data = encode(lanes)

    assert lanes == decode(data)
    plain = msgspec.msgpack.decode(data)
    wrongs: list[Any] = [{}, [[{}]], b"\xff", {"programs": [[{}]]}]
    for wrong in wrongs:
        with pytest.raises(TesseraError, match="cannot be read"):
            decode(msgspec.msgpack.encode(plain | {"programs": wrong}))
    broken = decode(data.replace(b"src\x00", b"src\x09", 1))
    assert isinstance(broken, LoadLanes)
    with pytest.raises(TesseraError):
        broken.verify()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_strides_are_packed(dtype: torch.dtype) -> None:
    """A column, one element of it, none, and elements that share memory."""
    whole = torch.arange(8.0).reshape(2, 4).to(dtype)

    for tensor in (whole[:, 1], whole[:1, 1], whole[:0, 1], whole[:, :1].expand(2, 3), whole.t()):
        assert torch.equal(tensor, unpack(pack(tensor)))
        assert fingerprint(tensor) == fingerprint(tensor.clone(memory_format=torch.contiguous_format))
