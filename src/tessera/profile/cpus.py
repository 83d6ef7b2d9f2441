"""Known CPUs beside a GPU, `emu:cpu-xeon-8480`, with modelled times.

A launch takes a fixed time plus the larger of its bytes and operations, at shares of the data sheet's peaks:
those of bf16 products on a 16-core Xeon with AMX (61 GB/s of cold weights at 1 to 32 rows, 3.5 TFLOP/s at
128), rounded. No CPU of this table was measured.
"""

from dataclasses import dataclass

from tessera.errors import check_known
from tessera.ir import Cost, Source
from tessera.ir.files import packaged
from tessera.profile.counts import OpClass, Work

BYTES_SHARE, AMX_SHARE, VECTOR_SHARE = 0.6, 0.15, 0.5
# Dispatch of an operator and start of its threads.
LAUNCH_US = 5.0
REL_ERROR = 0.5
PREFIX = "cpu-"


@dataclass(frozen=True, slots=True)
class Cpu:
    name: str
    full_name: str
    # "AMX" or "AVX-512 BF16".
    instructions: str
    # Dense, at the clock under load.
    bf16_tflops: float
    fp32_tflops: float
    # One module of 32 GB (desktop: 64 GB) per channel: an assumption.
    memory_bytes: int
    memory_gbps: float
    pcie_gen: int
    tdp_w: float
    source: str


CPUS = {cpu.name: cpu for cpu in packaged("profile", "cpus.json", tuple[Cpu, ...])}


def cpu(name: str, place: str = "") -> Cpu:
    check_known("CPU", name, CPUS, place)
    return CPUS[name]


def price_on_cpu(work: Work, spec: Cpu) -> Cost:
    if work.op is OpClass.ALLOCATION:
        return Cost(0.0, Source.CLASS, 0.0)
    is_matrix = work.op in (OpClass.GEMM, OpClass.GROUPED) and "16" in work.dtype
    share = AMX_SHARE if is_matrix and spec.instructions == "AMX" else VECTOR_SHARE
    peak = spec.bf16_tflops if is_matrix else spec.fp32_tflops
    bytes_us = (work.num_bytes + work.cpu_bytes) / (BYTES_SHARE * spec.memory_gbps * 1e3)
    us = LAUNCH_US + max(bytes_us, work.flops / (share * peak * 1e6))
    return Cost(us, Source.CLASS, REL_ERROR, f"{spec.full_name} by its data sheet")
