"""Cost, Costs: what each launch costs on each device, and where the number came from."""

from dataclasses import dataclass
from enum import StrEnum

from tessera.ir.cluster import Device

# A launch that takes longer than a day is a mistake; sums of such figures would also lose the small ones.
MAX_COST_US = 24 * 3600 * 1e6


class Source(StrEnum):
    """Where a number came from, best first."""

    MEASURED = "measured"  # timed on that device
    TABLE = "table"  # interpolated in a public measured table
    FITTED = "fitted"  # a model fitted to measurements of that GPU
    CLASS = "class"  # a model fitted to other GPUs, applied to this one's data sheet


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one launch on one device."""

    us: float
    source: Source
    # Expected relative error: 0.1 means that one should count on 10 %.
    rel_error: float
    # Of a table: which one, and how far its nearest point was. Of a launch that does more than move bytes and
    # multiply: what was added, and where that was measured. Else empty.
    detail: str = ""

    @property
    def is_sane(self) -> bool:
        """Finite, not negative, and no longer than a day; NaN is none of these."""
        return 0 <= self.us <= MAX_COST_US


@dataclass(frozen=True)
class Costs:
    """The price list of one trace."""

    # Digest of the trace that was priced; a plan made with another trace refuses these costs.
    trace_digest: str
    devices: tuple[Device, ...]
    # costs[launch][device]
    costs: tuple[tuple[Cost, ...], ...]

    def us(self, launch: int, device: int) -> float:
        """Microseconds of one launch on one device."""
        return self.costs[launch][device].us

    def total_us(self, device: int) -> float:
        """The whole step on one device, one launch after the other."""
        return sum(row[device].us for row in self.costs)
