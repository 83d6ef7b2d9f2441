"""Known GPUs: data-sheet figures, sustained rates, rent and sources, from `gpus.json`.

Data-sheet peaks only scale the efficiencies in `fitted.py`. Sustained rates are medians of public
measurements. Memory is the advertised size in 1e9 bytes.
"""

from dataclasses import dataclass

from tessera.errors import check_known
from tessera.ir.files import packaged


@dataclass(frozen=True, slots=True)
class Effective:
    """Sustained rates and shortest times, bf16."""

    gemm_tflops: float
    # GEMM of at most 16 rows.
    weights_gbps: float
    # Prompts of 4096 tokens or more, counting the causal half.
    prefill_tflops: float
    # KV-cache reads.
    decode_gbps: float
    gemm_floor_us: float
    attention_floor_us: float


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    full_name: str
    arch: str
    # GPUs of one chip differ in clocks, memory and board only.
    chip: str
    # "hbm" or "gddr": efficiencies do not carry over.
    memory_kind: str
    compute_capability: str
    # Dense, fp32 accumulation; None without such units.
    bf16_tflops: float | None
    fp16_tflops: float
    fp8_tflops: float | None
    # Without TF32.
    fp32_tflops: float
    memory_bytes: int
    memory_gbps: float
    l2_bytes: int
    num_sms: int
    tdp_w: float
    # Per direction; AMD: Infinity Fabric.
    nvlink_gbps: float | None
    pcie_gen: int
    # (provider, USD per hour): RunPod, Lambda, AWS, GCP, estimate; the first is the default.
    prices: tuple[tuple[str, float], ...]
    effective: Effective | None
    spec_source: str
    # "high", or "medium" if sources disagree or there is only one.
    spec_confidence: str
    effective_source: str
    price_source: str
    note: str = ""

    @property
    def vendor(self) -> str:
        return self.full_name.split(maxsplit=1)[0]

    @property
    def usd_per_hour(self) -> float | None:
        return self.prices[0][1] if self.prices else None

    @property
    def price_provider(self) -> str:
        return self.prices[0][0] if self.prices else ""


def clock_ghz(spec: Gpu) -> float:
    """From the fp32 peak: two operations per lane and cycle."""
    old = spec.compute_capability.startswith("7.") or spec.compute_capability == "8.0"
    return spec.fp32_tflops * 1e3 / (2 * (64 if old else 128) * spec.num_sms)


GPUS = {one.name: one for one in packaged("profile", "gpus.json", tuple[Gpu, ...])}


def gpu(name: str, place: str = "") -> Gpu:
    check_known("GPU", name, GPUS, place)
    return GPUS[name]
