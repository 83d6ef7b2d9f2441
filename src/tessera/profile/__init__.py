"""Cost of every launch on every device, with source and expected error."""

from tessera.profile.counts import OpClass, Work, class_of
from tessera.profile.coverage import (
    Covered,
    best_sources,
    borrowed,
    coverage,
    rejected_tables,
    sureness,
    sureness_of,
)
from tessera.profile.devices import LINKS, cap_memory, parse_devices, wire
from tessera.profile.estimate import notes, works
from tessera.profile.gpus import GPUS, Gpu, gpu
from tessera.profile.table_files import SYSTEMS
from tessera.profile.tables import Tables, installed_tables, missing_note

__all__ = [
    "GPUS", "LINKS", "SYSTEMS", "Covered", "Gpu", "OpClass",
    "Tables", "Work", "best_sources", "borrowed", "cap_memory", "class_of", "coverage", "gpu",
    "installed_tables", "missing_note", "notes", "parse_devices",
    "rejected_tables", "sureness", "sureness_of", "wire", "works",
]  # fmt: skip
