"""Measured here: what launches take on the devices of this machine, kept in a store between commands.

measure              a trace on one device, by a timer that `flow` hands in
combine              measured prices where there are any, the best model where not
Store, default_store where measurements are kept
"""

from tessera.profile.measured.combine import combine, needs_measuring
from tessera.profile.measured.measure import (
    Distinct,
    Measured,
    Missed,
    Reconciled,
    Timer,
    clocks_named,
    cold_buffers,
    count_distinct,
    distinct,
    measure,
    reconcile,
)
from tessera.profile.measured.store import Clocks, Machine, Store, Timing, default_store, timing, until

__all__ = [
    "Clocks", "Distinct", "Machine", "Measured", "Missed", "Reconciled", "Store", "Timer", "Timing",
    "clocks_named", "cold_buffers", "combine", "count_distinct", "default_store", "distinct", "measure",
    "needs_measuring", "reconcile", "timing", "until",
]  # fmt: skip
