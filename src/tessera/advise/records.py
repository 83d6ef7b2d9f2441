"""Records of `advise`. Importable without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from tessera.ir import MEMORY_SHARE, Cluster, Load, Objective
from tessera.ir.timeline import HIDDEN
from tessera.plan import FULL, SearchConfig
from tessera.plan.rent import Basket
from tessera.profile import GPUS, Gpu, gpu, parse_devices, wire


@dataclass(frozen=True, slots=True)
class ModelLoad:
    model: str
    load: Load
    # compiled, eager, or empty: compiled where cached.
    launches: str = ""
    search: SearchConfig = FULL
    memory_share: float = MEMORY_SHARE
    objective: Objective = Objective.THROUGHPUT
    random_weights: bool = False
    # By module: how often each expert is chosen.
    frequencies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    # Only for steps that no service runs.
    batch: int | None = None
    microbatches: int | None = None
    image_steps: int = 1
    # Share of the best draft from which a policy is planned; 0: all are.
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class RentedLoad:
    model: str
    rate_per_s: float
    # Tokens; for an image, its tokens and denoising steps.
    prompt: int
    output: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    # Share of the rate that is kept free above it.
    margin: float = 0.1
    is_image: bool = False

    @property
    def needed_per_s(self) -> float:
        return self.rate_per_s * (1 + self.margin)

    @property
    def unit(self) -> str:
        return "images" if self.is_image else "requests"

    @property
    def title(self) -> str:
        size = f"{self.prompt} + {self.output} tokens"
        if self.is_image:
            size = f"images of {self.prompt} tokens in {self.output} steps"
        return f"{self.rate_per_s:g} {self.unit}/s of {self.model}, {size}"

    @property
    def tokens(self) -> int:
        """An image counts as one."""
        return 1 if self.is_image else self.output

    @property
    def has_limits(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


@dataclass(frozen=True, slots=True)
class Market:
    # Empty: all that have a price.
    gpus: tuple[str, ...] = ()
    max_devices: int = 4
    provider: str = ""
    # In place of the providers' prices.
    prices: Mapping[str, float] = field(default_factory=dict)
    link: str = "pcie4"
    memory_share: float = MEMORY_SHARE
    launches: str = ""
    search: SearchConfig = FULL

    def prices_of(self, one: Gpu) -> tuple[tuple[str, float], ...]:
        """A price that was given holds at every provider."""
        if one.name not in self.prices:
            return one.prices
        providers = sorted({name for other in GPUS.values() for name, _ in other.prices})
        return tuple((name, self.prices[one.name]) for name in providers)

    def cluster(self, basket: Basket) -> Cluster:
        devices = parse_devices(",".join(f"emu:{name}" for name in basket.gpus))
        prices = (dict(self.prices_of(gpu(d.gpu))).get(basket.provider, d.usd_per_hour) for d in devices)
        rented = (replace(d, usd_per_hour=usd) for d, usd in zip(devices, prices, strict=True))
        return wire(tuple(rented), [self.link])


@dataclass(frozen=True, slots=True)
class Candidate:
    """Cards and a way to use them: what that carries, costs and takes (modelled)."""

    gpus: tuple[str, ...]
    way: str
    # Images per second for an image; at full load.
    requests_per_s: float
    # The rate with its margin is carried.
    is_enough: bool
    # For an image: None, and the time of the whole image.
    ttft_ms: float | None
    tpot_ms: float | None
    # None for a draft.
    cost_error: float | None
    batch: Annotated[dict[str, int], HIDDEN]
    microbatches: Annotated[int, HIDDEN]
    policy: Annotated[str, HIDDEN]
    provider: str = ""
    usd_per_hour: float | None = None
    usd_per_1k_requests: float | None = None
    is_advised: bool = False

    @property
    def error(self) -> float:
        return self.cost_error or 0.0


@dataclass(frozen=True, slots=True)
class Regime:
    """Rates of all ways within a time per token, and the coarsest way that is near the best."""

    tpot_ms: float
    requests_per_s: dict[str, float]
    best: str


@dataclass(frozen=True)
class Advice:
    load: Annotated[RentedLoad, HIDDEN]
    # rent: cheapest first; have: from the coarsest way.
    candidates: tuple[Candidate, ...]
    price_source: str
    notes: tuple[str, ...]
    is_compiled: Annotated[bool, HIDDEN]
    # rent only: why GPUs were not considered; sets that were looked at, and that were planned.
    skipped: dict[str, str] = field(default_factory=dict)
    num_sets: Annotated[int, HIDDEN] = 0
    num_planned: Annotated[int, HIDDEN] = 0
    # have only.
    have: tuple[str, ...] = ()
    by_tpot: tuple[Regime, ...] = ()
    next_cards: tuple[Candidate, ...] = ()

    @property
    def advised(self) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.is_advised)
