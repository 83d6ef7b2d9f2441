"""Profile: what every launch costs on every device, where the number came from, and how sure it is.

parse_devices, make_cluster   words -> devices and links
estimate                      trace x devices -> costs, without any of the hardware
notes                         what a reader of those costs should know
known_gpus, gpu, coverage     the table of GPUs, and how each class is priced on one of them
"""

from tessera.profile.counts import OpClass, Work, class_of, work_of
from tessera.profile.devices import LINKS, LinkPreset, make_cluster, parse_devices
from tessera.profile.estimate import estimate, notes, works
from tessera.profile.fitted import Model, coverage
from tessera.profile.gpus import Effective, Gpu, gpu, known_gpus

__all__ = [
    "LINKS", "Effective", "Gpu", "LinkPreset", "Model", "OpClass", "Work", "class_of", "coverage", "estimate",
    "gpu", "known_gpus", "make_cluster", "notes", "parse_devices", "work_of", "works",
]  # fmt: skip
