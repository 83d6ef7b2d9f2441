"""Load, Market, Choice, Advice: what is asked and what is answered."""

from dataclasses import dataclass

from tessera.errors import TesseraError
from tessera.ir import Plan
from tessera.plan.rent import Basket


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served."""

    model: str
    rate_per_s: float
    prompt: int
    output: int
    # Objectives of latency; None: any.
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    # Share of the rate that is kept free above it.
    margin: float = 0.1


@dataclass(frozen=True, slots=True)
class Market:
    """What may be rented, and how it is used."""

    # Names of GPUs; empty: all that have a price.
    gpus: tuple[str, ...] = ()
    max_devices: int = 4
    provider: str = ""
    link: str = "pcie4"
    slots: int = 4
    batches: tuple[int, ...] = (1, 8, 64)
    # Share of a GPU's memory that the model may fill; the rest is the driver's and the allocator's.
    memory_share: float = 0.9


@dataclass(frozen=True)
class Choice:
    """A basket that carries the load, with its plan."""

    basket: Basket
    batch: int
    plan: Plan
    # Requests per second that it could carry.
    capacity_per_s: float
    ttft_ms: float | None
    tpot_ms: float | None

    @property
    def usd_per_1k_requests(self) -> float:
        """Rent while a thousand requests are served at full load."""
        return self.basket.usd_per_hour / 3.6 / self.capacity_per_s


@dataclass(frozen=True)
class Advice:
    """What to rent, and what was passed over."""

    choices: tuple[Choice, ...]
    # (GPU, why it was not considered)
    skipped: tuple[tuple[str, str], ...]
    num_baskets: int
    num_planned: int
    price_source: str
    # Empty, or why there may be something cheaper.
    caveat: str = ""


def check(load: Load, market: Market) -> None:
    """Refuses what is no load or no market."""
    for name, value in (("--rate", load.rate_per_s), ("--prompt", load.prompt), ("--output", load.output)):
        if not value > 0:
            raise TesseraError(f"{value} is no load", "Give more than zero.", name)
    for name, slo in (("--slo-ttft-ms", load.ttft_ms), ("--slo-tpot-ms", load.tpot_ms)):
        if slo is not None and not slo > 0:
            raise TesseraError(f"{slo} ms cannot be met", "Give more than zero.", name)
    if market.max_devices < 1:
        raise TesseraError(f"{market.max_devices} devices carry nothing", "Allow one.", "--max-devices")
    if not market.batches or min(market.batches) < 1:
        raise TesseraError("a batch has at least one request", "Write them as 1,4,16.", "--batches")
    if not 0 < market.memory_share <= 1:
        raise TesseraError(f"{market.memory_share} is no share", "Give 0 to 1.", "--memory-share")
    if load.margin < 0:
        raise TesseraError(f"{load.margin} is no margin", "Give zero or more.", "--margin")
