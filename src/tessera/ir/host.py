"""NUMA nodes with their cores and memory, caches and vector instructions of this machine."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
CPUINFO, MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
# Where the system does not say.
CACHE_BYTES = 32 << 20
FLAGS = {
    "amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2",
    "sve": "SVE", "asimd": "NEON",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostNode:
    number: int
    # Cores that this process may use.
    cores: tuple[int, ...]
    memory_bytes: int


def host_nodes() -> tuple[HostNode, ...]:
    """One node where the system does not say."""
    usable, sizes = os.sched_getaffinity(0), dict[Path, int]()
    for path in sorted(NODES.glob("node[0-9]*")):
        words = _text(path / "meminfo").split()
        sizes[path] = int(words[words.index("MemTotal:") + 1]) if "MemTotal:" in words else 0
    total = memory_bytes()  # nodes may not count memory added at run time
    nodes = []
    for path, size in sizes.items():
        cores = tuple(c for c in _numbers(_text(path / "cpulist")) if c in usable)
        if cores and size:
            number = int(path.name.removeprefix("node"))
            nodes.append(HostNode(number, cores, total * size // sum(sizes.values())))
    return tuple(nodes) or (HostNode(0, tuple(sorted(usable)), total),)


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    words = _text(MEMINFO).split()
    return int(words[words.index("MemAvailable:") + 1]) << 10 if "MemAvailable:" in words else memory_bytes()


def cache_bytes() -> int:
    """Last-level caches of the cores that this process may use."""
    sizes: dict[str, int] = {}
    for core in os.sched_getaffinity(0):
        last = max((CPUS / f"cpu{core}/cache").glob("index[0-9]"), default=CPUS)
        sizes[_text(last / "shared_cpu_list")] = (
            int(_text(last / "size").strip().removesuffix("K") or 0) << 10
        )
    return sum(sizes.values()) or CACHE_BYTES


def instructions() -> tuple[str, ...]:
    lines = _text(CPUINFO).splitlines()
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(name for flag, name in FLAGS.items() if flag in flags) or (platform.machine(),)


def cpu_name() -> str:
    lines = (line.partition(":") for line in _text(CPUINFO).splitlines())
    return next(
        (name.strip() for key, _, name in lines if key.lower().startswith("model name")), platform.machine()
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _numbers(text: str) -> list[int]:
    """`0-2,8` -> 0, 1, 2, 8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)]
