"""Sizes of elements."""

ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "uint64": 8,
    "float32": 4, "int32": 4, "uint32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Size of one element; one byte for the small types."""
    return ITEM_BYTES.get(dtype, 1)
