"""Load, Market, Choice, Advice: what is asked and what is answered."""

import math
from dataclasses import dataclass

from tessera.errors import TesseraError
from tessera.ir import Plan
from tessera.plan.rent import Basket

# Milliseconds to the first token, and of a token after it; None where there are no tokens.
Times = tuple[float | None, float | None]

# What is asked of a model where nothing is said: tokens of a prompt and of an answer; of a diffusion model
# the tokens of an image of 1024 x 1024 pixels, and the steps that its makers recommend.
TOKENS = (1024, 256)
IMAGE = (4096, 40)


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served."""

    model: str
    rate_per_s: float
    # Tokens of a prompt and of an answer; of a diffusion model, tokens of an image and denoising steps.
    prompt: int
    output: int
    # Objectives of latency; None: any.
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    # Share of the rate that is kept free above it.
    margin: float = 0.1
    # Is a request an image?
    is_image: bool = False

    @property
    def needed_per_s(self) -> float:
        """The rate with its margin."""
        return self.rate_per_s * (1 + self.margin)

    @property
    def unit(self) -> str:
        """What is counted, for people."""
        return "images" if self.is_image else "requests"

    @property
    def words(self) -> str:
        """What one of them is."""
        if self.is_image:
            return f"images of {self.prompt} tokens in {self.output} steps"
        return f"{self.prompt} + {self.output} tokens"

    def excess(self, times_ms: Times) -> float:
        """The largest part of an objective that (first token, a token after it) take; above one: missed."""
        pairs = zip((self.ttft_ms, self.tpot_ms), times_ms, strict=True)
        return max((ms / slo for slo, ms in pairs if slo is not None and ms is not None), default=0.0)

    def is_kept(self, times_ms: Times) -> bool:
        """Do these times keep the objectives of latency?"""
        return self.excess(times_ms) <= 1.0


@dataclass(frozen=True, slots=True)
class Market:
    """What may be rented, and how it is used."""

    # Names of GPUs; empty: all that have a price.
    gpus: tuple[str, ...] = ()
    max_devices: int = 4
    provider: str = ""
    link: str = "pcie4"
    # Microbatches in flight, at most; None: as many as help.
    microbatches: int | None = None
    # Batches to choose among; empty: powers of two, as far as memory goes.
    batches: tuple[int, ...] = ()
    # Share of a GPU's memory that the model may fill; the rest is the driver's and the allocator's.
    memory_share: float = 0.9
    # "compiled", "eager", or empty: compiled where they are known.
    launches: str = ""


@dataclass(frozen=True)
class Choice:
    """A basket that carries the load, with its plan."""

    basket: Basket
    # Rows of a microbatch on each device, by the device's name.
    batch: dict[str, int]
    microbatches: int
    plan: Plan
    # Requests per second that it could carry.
    capacity_per_s: float
    ttft_ms: float | None
    tpot_ms: float | None

    @property
    def times_ms(self) -> Times:
        """To the first token, and a token after it."""
        return self.ttft_ms, self.tpot_ms

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
    is_compiled: bool = False
    # Why launches are not compiled ones, if that was not asked for.
    note: str = ""


def in_ms(ms: float) -> str:
    """For people: four digits, and never an exponent."""
    return f"{ms:.4g} ms" if ms < 1e4 else f"{ms:.0f} ms"


def check(load: Load, market: Market) -> None:
    """Refuses what is no load or no market."""
    for name, value in (("--rate", load.rate_per_s), ("--prompt", load.prompt), ("--output", load.output)):
        if not 0 < value < math.inf:
            raise TesseraError(f"{value} is no load", "Give a number above zero.", name)
    for name, slo in (("--slo-ttft-ms", load.ttft_ms), ("--slo-tpot-ms", load.tpot_ms)):
        if slo is not None and not 0 < slo < math.inf:
            raise TesseraError(
                f"{slo} ms is no objective", "Give a number above zero, or leave it out.", name
            )
    if load.is_image and (load.ttft_ms is not None or load.tpot_ms is not None):
        raise TesseraError("an image has no tokens to wait for", "Leave the objectives of latency out.")
    if market.max_devices < 1:
        raise TesseraError(f"{market.max_devices} devices carry nothing", "Allow one.", "--max-devices")
    if market.microbatches is not None and market.microbatches < 1:
        raise TesseraError(
            f"{market.microbatches} batches in flight carry nothing", "Allow one.", "--microbatches"
        )
    if market.batches and min(market.batches) < 1:
        raise TesseraError("a batch has at least one request", "Write them as 1,4,16.", "--batches")
    if not 0 < market.memory_share <= 1:
        raise TesseraError(f"{market.memory_share} is no share", "Give 0 to 1.", "--memory-share")
    if not 0 <= load.margin < math.inf:
        raise TesseraError(f"{load.margin} is no margin", "Give zero or more, as 0.1.", "--margin")
