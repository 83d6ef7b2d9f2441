"""Known CPUs beside a GPU, `emu:cpu-xeon-8480`: data sheets, and times modelled by bytes and operations.

A launch takes a fixed time plus the larger of its bytes and its operations, at shares of the data sheet's
peaks. Shares are those of bf16 products with cold weights on a 16-core Xeon with AMX (61 GB/s of weights at 1
to 32 rows, 3.5 TFLOP/s at 128), rounded; no CPU of this table was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.errors import UnknownName
from tessera.ir import Cost, Source
from tessera.profile.counts import OpClass, Work

# Share of the memory bandwidth, and of the peaks of AMX and of vector units.
BYTES_SHARE, AMX_SHARE, VECTOR_SHARE = 0.6, 0.15, 0.5
# Dispatch of an operator and start of its threads.
LAUNCH_US = 5.0
REL_ERROR = 0.5
PREFIX = "cpu-"


@dataclass(frozen=True, slots=True)
class Cpu:
    # Key as in "emu:cpu-xeon-8480".
    name: str
    full_name: str
    # "AMX" or "AVX-512 BF16": instructions of 16-bit products.
    instructions: str
    # Dense peaks at the clock under load.
    bf16_tflops: float
    fp32_tflops: float
    # One memory module of 32 GB (desktop: 64 GB) per channel: an assumption.
    memory_bytes: int
    memory_gbps: float
    pcie_gen: int
    tdp_w: float
    source: str


CPUS = {
    cpu.name: cpu
    for cpu in (
        Cpu(
            "cpu-epyc-9654", "AMD EPYC 9654", "AVX-512 BF16", 18.4, 9.2, 384_000_000_000, 460.8, 5, 360.0,
            "96 cores at 3.0 GHz with 32 fp32 and 64 bf16 operations a cycle; 12 channels of DDR5-4800",
        ),
        Cpu(
            "cpu-xeon-8480", "Intel Xeon Platinum 8480+", "AMX", 229.0, 7.2, 256_000_000_000, 307.2, 5, 350.0,
            "56 cores at 2.0 GHz with 64 fp32 and 2,048 bf16 operations a cycle; 8 channels of DDR5-4800",
        ),
        Cpu(
            "cpu-ryzen-7950x", "AMD Ryzen 9 7950X", "AVX-512 BF16", 4.6, 2.3, 128_000_000_000, 83.2, 5, 170.0,
            "16 cores at 4.5 GHz with 32 fp32 and 64 bf16 operations a cycle; 2 channels of DDR5-5200",
        ),
    )
}  # fmt: skip


def cpu(name: str) -> Cpu:
    if name not in CPUS:
        raise UnknownName("CPU", name, CPUS)
    return CPUS[name]


def price_on_cpu(works: Sequence[Work], name: str) -> list[Cost]:
    spec = cpu(name)
    return [_price(work, spec) for work in works]


def _price(work: Work, spec: Cpu) -> Cost:
    if work.op is OpClass.ALLOCATION:
        return Cost(0.0, Source.CLASS, 0.0)
    is_matrix = work.op in (OpClass.GEMM, OpClass.GROUPED) and "16" in work.dtype
    share = AMX_SHARE if is_matrix and spec.instructions == "AMX" else VECTOR_SHARE
    peak = spec.bf16_tflops if is_matrix else spec.fp32_tflops
    bytes_us = work.num_bytes / (BYTES_SHARE * spec.memory_gbps * 1e3)
    us = LAUNCH_US + max(bytes_us, work.flops / (share * peak * 1e6))
    return Cost(us, Source.CLASS, REL_ERROR, f"{spec.full_name} by its data sheet")
