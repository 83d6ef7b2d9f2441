"""Kernel, Region, Access: code, and which bytes one run of it touches.

A region is a strided set of bytes inside one buffer: `item_bytes` bytes at
`start + sum(i_d * stride_d)` for every index tuple. Ranges are half-open. Two regions
overlap iff they share a byte; where that is too dear to decide they are said to overlap,
so an answer of False is a proof and an answer of True is not.
"""

from dataclasses import dataclass
from enum import StrEnum

# Above this many runs of bytes, overlap is decided by the enclosing intervals alone.
MAX_RUNS = 4096


class Origin(StrEnum):
    """Where a kernel's code came from, hence how its accesses are proved."""

    ATEN = "aten"  # an operator of a vendor library: proved from its schema
    TRITON = "triton"  # proved from its PTX, rebuilt from source for each device
    PTX = "ptx"  # proved from its PTX, loaded by the driver


@dataclass(frozen=True, slots=True)
class Kernel:
    """Code: an ATen overload or a PTX entry."""

    # "aten.mm.default" for operators, the entry's name for PTX.
    name: str
    origin: Origin
    # Operator schema with alias annotations; empty for PTX.
    schema: str = ""
    # PTX text; empty for operators.
    ptx: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """A strided set of bytes of one buffer."""

    start: int
    item_bytes: int
    # (count, stride in bytes), outermost first; counts above 1, strides positive, and no two
    # dimensions that could be written as one. `region` builds this form.
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def stop(self) -> int:
        """One past the last byte touched."""
        return self.start + sum((n - 1) * stride for n, stride in self.dims) + self.item_bytes

    @property
    def num_bytes(self) -> int:
        """How many bytes are touched, counting a byte once for every index that reaches it."""
        size = self.item_bytes
        for n, _ in self.dims:
            size *= n
        return size

    @property
    def is_dense(self) -> bool:
        """True iff every byte between start and stop is touched."""
        return not self.dims

    def overlaps(self, other: "Region") -> bool:
        """True unless the two regions provably share no byte."""
        if self.stop <= other.start or other.stop <= self.start:
            return False
        if self.is_dense and other.is_dense:
            return True
        mine, theirs = self._runs(), other._runs()
        if mine is None or theirs is None:
            return True
        return _runs_meet(mine, theirs)

    def covers(self, other: "Region") -> bool:
        """True only if every byte of `other` is in this region."""
        return self == other or (self.is_dense and self.start <= other.start and other.stop <= self.stop)

    def _runs(self) -> list[tuple[int, int]] | None:
        """Sorted half-open runs, or None when there are too many to list."""
        count = 1
        for n, _ in self.dims:
            count *= n
        if count > MAX_RUNS:
            return None
        starts = [self.start]
        for n, stride in self.dims:
            starts = [s + i * stride for s in starts for i in range(n)]
        return sorted((s, s + self.item_bytes) for s in starts)


def region(start: int, item_bytes: int, dims: tuple[tuple[int, int], ...]) -> Region | None:
    """The normal form of a strided set; None when it is empty. Dimensions are (count, byte stride)."""
    if any(n == 0 for n, _ in dims) or item_bytes == 0:
        return None
    for n, stride in dims:  # a negative stride touches the same bytes from the other end
        start += (n - 1) * stride if stride < 0 else 0
    live = sorted(((n, abs(s)) for n, s in dims if n > 1 and s != 0), key=lambda d: (d[1], d[0]))
    merged: list[tuple[int, int]] = []
    for n, stride in live:
        if not merged and stride <= item_bytes:
            item_bytes += (n - 1) * stride
        elif merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * n, merged[-1][1])
        else:
            merged.append((n, stride))
    return Region(start, item_bytes, tuple(reversed(merged)))


def _runs_meet(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][1] <= b[j][0]:
            i += 1
        elif b[j][1] <= a[i][0]:
            j += 1
        else:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Access:
    """One launch touches one region of one buffer."""

    buffer: int
    region: Region
    read: bool = False
    write: bool = False
    atomic: bool = False
