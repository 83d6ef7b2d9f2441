"""The GPUs Tessera knows: data-sheet figures, sustained rates, rent, and who says so.

`gpus.json` holds one row per GPU. A data-sheet peak is never a price by itself: it only scales the
efficiencies of `tessera.profile.fitted`. Sustained rates are medians of public measurements and are
absent for a GPU that nobody measured. Memory is the advertised size in units of 1e9 bytes, a little less
than drivers report on most cards.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from tessera.errors import UnknownName

# Whose price is the default, first that quotes one.
PROVIDERS = ("RunPod", "Lambda", "AWS", "GCP")


@dataclass(frozen=True, slots=True)
class Effective:
    """Rates that long kernels sustain, and the shortest times seen; bf16."""

    gemm_tflops: float
    # Weights streamed by a GEMM of at most 16 rows.
    weights_gbps: float
    # Attention over prompts of 4096 tokens or more; half of the square is counted, as it is causal.
    prefill_tflops: float
    # KV cache streamed by decode attention.
    decode_gbps: float
    gemm_floor_us: float
    attention_floor_us: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model."""

    # Short key, as in "emu:a100".
    name: str
    full_name: str
    arch: str
    # GPUs of one chip differ in clocks, memory and board only.
    chip: str
    # "hbm" or "gddr": efficiencies do not carry over from one to the other.
    memory_kind: str
    compute_capability: str
    # Dense tensor rates, fp32 accumulation; None where the hardware has no such units.
    bf16_tflops: float | None
    fp16_tflops: float
    fp8_tflops: float | None
    # Plain fp32, no TF32.
    fp32_tflops: float
    memory_bytes: int
    memory_gbps: float
    l2_bytes: int
    num_sms: int
    tdp_w: float
    # Per direction; None without NVLink (or, on AMD, Infinity Fabric).
    nvlink_gbps: float | None
    pcie_gen: int
    # (provider, USD per hour), default first.
    prices: tuple[tuple[str, float], ...]
    effective: Effective | None
    spec_source: str
    # "high", or "medium" where sources disagree or a figure rests on one page.
    spec_confidence: str
    effective_source: str
    price_source: str
    note: str = ""

    @property
    def vendor(self) -> str:
        """Who makes it."""
        return self.full_name.split(maxsplit=1)[0]

    @property
    def usd_per_hour(self) -> float | None:
        """The default rent, None where nobody quotes one."""
        return self.prices[0][1] if self.prices else None

    @property
    def price_provider(self) -> str:
        """Whose rent `usd_per_hour` is; empty where nobody quotes one."""
        return self.prices[0][0] if self.prices else ""


@cache
def _table() -> dict[str, Gpu]:
    text = files("tessera.profile").joinpath("gpus.json").read_text(encoding="utf-8")
    doc = json.loads(text)
    return {row["name"]: _gpu(row, doc) for row in doc["gpus"]}


def _gpu(row: dict[str, Any], doc: dict[str, Any]) -> Gpu:
    sources = {
        "prices": sorted(row["prices"], key=lambda price: PROVIDERS.index(price[0])),
        "effective_source": doc["effective_source"] if row["effective"] else "not measured",
        "price_source": doc["price_source"],
    }
    return msgspec.convert(row | sources, Gpu)


def clock_ghz(spec: Gpu) -> float:
    """The boost clock, from the data sheet's fp32 rate: two operations a lane and cycle."""
    old = spec.compute_capability.startswith("7.") or spec.compute_capability == "8.0"
    return spec.fp32_tflops * 1e3 / (2 * (64 if old else 128) * spec.num_sms)


def known_gpus() -> tuple[Gpu, ...]:
    """Every GPU, in the order of the table."""
    return tuple(_table().values())


def gpu(name: str) -> Gpu:
    """The GPU of that key; an unknown key answers with the known ones."""
    if name not in _table():
        raise UnknownName("GPU", name, _table())
    return _table()[name]
