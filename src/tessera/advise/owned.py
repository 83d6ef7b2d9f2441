"""owned: cards that are there, a model and a load in; what to do with them and which card to rent next out.

What to do: every policy at its own best batch within memory and the limits, as `tessera plan MODEL` has them.
Advised is the coarsest way that is within the error of the costs of the best: a finer one has to be worth its
trouble. The same is asked for every round limit of time per token.

What to rent next: one more card of each kind that can be rented, with requests of its own beside what is
there, which any router can do; a plan over all of them is at least as good. All figures are modelled.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tessera.advise.search import Load, Market, Size, check, cluster_of, offers_of, steps_of
from tessera.errors import TesseraError
from tessera.flow import LoadSteps, anchors_of, choose_launches, make_load_plan
from tessera.plan import BATCHES, LoadConfig, LoadPlan, Option, Target
from tessera.profile import estimate, gpu, parse_devices, sureness
from tessera.report import round_limits

# From the coarsest; other policies are splits.
WAYS = ("one card", "data-parallel", "split", "kernel level")
KINDS = {"single": "one card", "data-parallel": "data-parallel", "plan": "kernel level"}
# Cards to rent next that are told.
NUM_NEXT = 5


@dataclass(frozen=True, slots=True)
class Way:
    """One way to use the cards, at its own best batch."""

    # Of WAYS, and the policy that is best of that kind.
    name: str
    policy: str
    requests_per_s: float
    # Of an image: steps.
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    batch: dict[str, int]
    # Does it carry the rate with its margin?
    carries: bool
    # Rent while a thousand requests are served at full load; None where no price is known.
    usd_per_1k_requests: float | None


@dataclass(frozen=True, slots=True)
class Regime:
    """What is best within a time per token: tokens per second of every way that keeps to it."""

    tpot_ms: float
    tokens_per_s: dict[str, float]
    best: str


@dataclass(frozen=True, slots=True)
class NextCard:
    """One more card, beside what is there."""

    gpu: str
    provider: str
    usd_per_hour: float
    adds_per_s: float
    # Is the rate carried with it?
    carries: bool

    @property
    def usd_per_1k_requests(self) -> float:
        """Of those that it adds."""
        return self.usd_per_hour / 3.6 / self.adds_per_s


@dataclass(frozen=True)
class OwnedAdvice:
    """What to do with cards that are there."""

    cards: tuple[str, ...]
    found: LoadPlan
    # From the coarsest.
    ways: tuple[Way, ...]
    advised: Way
    # Relative error of the costs.
    error: float
    regimes: tuple[Regime, ...]
    # Cheapest of those that carry the rate first; then by what a request costs there.
    next_cards: tuple[NextCard, ...]
    # Rent of the cards that are there; None where the price of some is not known, and of which.
    usd_per_hour: float | None
    unpriced: tuple[str, ...]
    price_source: str
    note: str = ""

    @property
    def gain(self) -> float | None:
        """Of what is advised over data-parallel; None where that does not apply."""
        parallel = next((w for w in self.ways if w.name == "data-parallel"), None)
        return self.advised.tokens_per_s / parallel.tokens_per_s if parallel else None


def use(
    load: Load, market: Market, cards: Sequence[str], advance: Callable[[str], None] = lambda what: None
) -> OwnedAdvice:
    """Plans the cards that are there; PlanInfeasible where they cannot hold the model or keep the limits."""
    check(load, market)
    if not cards:
        raise TesseraError("no card was named", "Name what you have, as h20,l40s.", "--have")
    names = tuple(gpu(name).name for name in cards)
    steps, counts = steps_of(load)
    batches = market.batches or BATCHES
    anchors = anchors_of(batches)
    is_compiled, note = choose_launches(steps, anchors, market.launches)
    target = Target(1 if load.is_image else load.output, load.tpot_ms, load.ttft_ms)
    cluster = cluster_of(names, market)
    config = LoadConfig(batches, max_microbatches=market.microbatches, advance=advance, search=market.search)
    found = make_load_plan(steps, cluster, target, config, is_compiled)
    recorded = LoadSteps(steps, counts, anchors, advance, is_compiled)
    rents = {name: _rent(name, market) for name in names}
    unpriced = tuple(name for name, rent in rents.items() if rent is None)
    usd = None if unpriced else sum(rents[name] or 0.0 for name in names)
    listed = [o for o in found.baselines if o is not found.chosen]
    ways = tuple(_ways(load, [*listed, found.chosen], usd))
    error = sureness(found.plan).rel_error
    advised = _coarsest(ways, error)
    return OwnedAdvice(
        names,
        found,
        ways,
        advised,
        error,
        tuple(_regimes(found, error)),
        _next(load, market, recorded, batches, advised.requests_per_s, advance),
        usd,
        unpriced,
        gpu(names[0]).price_source,
        note,
    )


def _rent(name: str, market: Market) -> float | None:
    prices = dict(gpu(name).prices)
    return prices.get(market.provider) if market.provider else min(prices.values(), default=None)


def _ways(load: Load, options: Sequence[Option], usd_per_hour: float | None) -> list[Way]:
    """The best of each kind. A request is so many tokens, and an image so many steps, as the load says."""
    best = _best(options)
    found = []
    for name in (name for name in WAYS if name in best):
        o = best[name]
        per_s = o.tokens_per_s / load.output
        usd = None if usd_per_hour is None else usd_per_hour / 3.6 / per_s
        carries = per_s >= load.needed_per_s
        found.append(Way(name, o.policy, per_s, o.tokens_per_s, o.tpot_ms, o.ttft_ms, o.batch, carries, usd))
    return found


def _best(options: Iterable[Option]) -> dict[str, Option]:
    """Of each kind."""
    best: dict[str, Option] = {}
    for option in options:
        kind = KINDS.get(option.policy, "split")
        best[kind] = max(best.get(kind, option), option, key=lambda o: o.tokens_per_s)
    return best


def _coarsest(ways: Sequence[Way], error: float) -> Way:
    """The first that the best does not exceed by more than the error."""
    best = max(way.tokens_per_s for way in ways)
    return next(way for way in ways if way.tokens_per_s * (1 + error) >= best)


def _regimes(found: LoadPlan, error: float) -> list[Regime]:
    most = max(found.options, key=lambda o: (o.tokens_per_s, -o.tpot_ms))
    listed = []
    for limit in round_limits(min(o.tpot_ms for o in found.options), most.tpot_ms):
        within = _best(option for option in found.options if option.tpot_ms <= limit)
        rates = {kind: option.tokens_per_s for kind, option in within.items()}
        best = max(rates.values())
        coarsest = next(name for name in WAYS if rates.get(name, 0.0) * (1 + error) >= best)
        listed.append(Regime(limit, rates, coarsest))
    return listed


def _next(
    load: Load,
    market: Market,
    recorded: LoadSteps,
    batches: Sequence[int],
    there_per_s: float,
    advance: Callable[[str], None],
) -> tuple[NextCard, ...]:
    """What another card of each kind adds by itself, at its best batch within the limits."""
    offers, _ = offers_of(market, [g.trace for g in recorded.at(recorded.anchors[0]).graphs])
    devices = parse_devices(",".join(f"emu:{offer.gpu}" for offer in offers))
    best: dict[str, float] = {}
    for batch in batches:
        advance(f"pricing batch {batch} on {len(offers)} GPUs")
        unit = recorded.at(batch)
        size = Size(batch, unit, tuple(estimate(g.trace, devices) for g in unit.graphs))
        for offer in offers:
            if size.keeps(load, offer.gpu, market):
                best[offer.gpu] = max(best.get(offer.gpu, 0.0), size.alone_per_s(offer.gpu))
    found = []
    for offer in offers:
        if offer.gpu in best:
            quoted = [x for x in offer.prices if market.provider in ("", x[0])]
            provider, usd = min(quoted, key=lambda x: x[1])
            carries = there_per_s + best[offer.gpu] >= load.needed_per_s
            found.append(NextCard(offer.gpu, provider, usd, best[offer.gpu], carries))

    def order(card: NextCard) -> tuple[bool, float]:
        is_enough = card.carries and there_per_s < load.needed_per_s
        return not is_enough, card.usd_per_hour if is_enough else card.usd_per_1k_requests

    return tuple(sorted(found, key=order)[:NUM_NEXT])
