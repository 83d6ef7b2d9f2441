"""Messages between engine and workers: what is sent is what arrives, and nothing else is believed."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tessera.errors import TesseraError
from tessera.execute.messages import Begin, Cancel, Done, Failed, Message, decode, encode
from tessera.execute.packing import pack, unpack


def test_tensors_survive_the_way() -> None:
    """Types, shapes and bits of several tensors in two fields, an empty one among them."""
    tensors = {"a": torch.randn(2, 3).bfloat16(), "empty": torch.empty(0, 4), "b": torch.arange(5)}
    sent = Done(7, {n: pack(t) for n, t in tensors.items()}, {"s": pack(torch.ones(3))}, [[1, 2.0, 3.0, 0.5]])
    found = decode(encode(sent))

    assert isinstance(found, Done)
    assert sent == found
    for name, tensor in tensors.items():
        assert torch.equal(tensor, unpack(found.outputs[name]))


@pytest.mark.parametrize(
    "message", [Cancel(3), Failed("no", "try"), Begin(1, 2, 3, 4, {}, {"x": pack(torch.zeros(2))}, True)]
)
def test_every_field_arrives(message: Message) -> None:
    """Equal by value after the round trip."""
    assert message == decode(encode(message))


@given(st.binary(max_size=64))
@example(b"\x01\0\0\0" + b"0")
@example(b"\x02\0\0\0" + b"[]")
@example((200_000).to_bytes(4, "little") + b"[" * 200_000)
def test_noise_is_refused(data: bytes) -> None:
    """Bytes that are no message raise an error of the program's own, never anything else."""
    with pytest.raises(TesseraError):
        decode(data)


def test_a_truncated_message_is_refused() -> None:
    """A tensor that is cut off is not read as a shorter one."""
    whole = encode(Begin(1, 2, 3, 4, {"x": pack(torch.zeros(8))}, {}, False))

    with pytest.raises(TesseraError, match="truncated"):
        decode(whole[:-1])
