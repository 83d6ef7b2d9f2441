"""advise: which cards carry a load, at what rate, price and latency. No GPU is needed; all is modelled.

   rent   The cheapest cards that carry the load. Sets are drafted from the cheapest on if their bound carries
          the rate, planned and rehearsed if their draft does.
   have   What to do with given cards: the coarsest policy within the error of the prices; and what a copy of
          the model on one more card would add.

Not modelled: bursts, for which `RentedLoad.margin` is kept free.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from tessera.advise.raters import Advance, Rater, rater_of
from tessera.advise.records import Advice, Candidate, Market, ModelLoad, Regime, RentedLoad
from tessera.errors import PlanInfeasible, TesseraError
from tessera.ir import Cluster, Load, Plan, ServicePlan
from tessera.ir.units import digits, total
from tessera.plan import Comparison, Option
from tessera.plan.comparison import times_text
from tessera.plan.rent import Basket, Limit, Offer, baskets
from tessera.profile import GPUS, Gpu, gpu, parse_devices, sureness, wire
from tessera.report import round_limits

Planned = tuple[ServicePlan | Plan, Comparison]

# From the coarsest.
WAYS = ("one card", "data-parallel", "split", "kernel level")
KINDS = {
    "single": "one card",
    "data-parallel": "data-parallel",
    "prefill-decode": "split",
    "prefill-decode-fractional": "split",
    "layer-pipeline": "split",
    "attention-ffn": "split",
}
NUM_NEXT = 5
# Share of the best draft from which a policy is planned.
WORTH = 0.9
# The choice and the runner-up.
NUM_ADVISED = 2
# Plans carry up to this much more than drafts.
DRAFT_ERROR = 1.1
# No set is planned later than this; the longer limit holds where nothing carries the load yet.
SEARCH_S, LONGEST_S = 25.0, 120.0


def advise(
    load: RentedLoad,
    market: Market,
    have: Sequence[str] = (),
    advance: Advance = lambda what: None,
    show: Advance = lambda text: None,
) -> tuple[Advice, tuple[Planned, ...]]:
    """What to rent, with a plan of each candidate; or how to use `have`, with its best plan.

    `show` gets answers as they come. PlanInfeasible says how far the best falls short.
    """
    if load.is_image and load.has_limits:
        raise TesseraError("an image has no tokens to wait for", "Leave --slo-ttft-ms and --slo-tpot-ms out.")
    names = tuple(gpu(name).name for name in (*have, *market.gpus))  # an unknown name is refused at once
    cards = RatedCards(load, market, names[: len(have)], advance)
    return _use(cards) if have else _Rent(cards, show).advice()


class RatedCards:
    def __init__(self, load: RentedLoad, market: Market, have: tuple[str, ...], advance: Advance) -> None:
        self.load, self.market, self.have, self.advance = load, market, have, advance
        gpus = [gpu(name) for name in market.gpus] or list(GPUS.values())
        priced = [g for g in gpus if market.prices_of(g)] or gpus
        answers = Load(load.prompt, load.output, tpot_ms=load.tpot_ms, ttft_ms=load.ttft_ms)
        demand = ModelLoad(
            load.model, answers, market.launches, market.search, market.memory_share,
            image_steps=load.output, worth=WORTH,
        )  # fmt: skip
        self.rater: Rater = rater_of(demand, _cluster([g.name for g in priced]), advance)
        self.offers, self.skipped = self._offers(gpus)

    @cached_property
    def limit(self) -> Limit:
        return self.rater.limit(_cluster([offer.gpu for offer in self.offers]))

    def candidate(self, basket: Basket, option: Option, cost_error: float | None = None) -> Candidate:
        usd, per_s = basket.usd_per_hour or None, option.tokens_per_s / self.load.tokens
        return Candidate(
            gpus=basket.gpus,
            way="one card" if len(basket.gpus) == 1 else KINDS.get(option.policy, "kernel level"),
            requests_per_s=per_s,
            is_enough=per_s >= self.load.needed_per_s * (1 - 1e-9),
            ttft_ms=None if self.load.is_image else option.ttft_ms,
            tpot_ms=None if self.load.is_image else option.tpot_ms,
            cost_error=cost_error,
            batch=option.batch,
            microbatches=option.microbatches,
            policy=option.policy,
            provider="--price"
            if all(name in self.market.prices for name in basket.gpus)
            else basket.provider,
            usd_per_hour=usd,
            usd_per_1k_requests=None if usd is None else usd / 3.6 / per_s,
        )

    def _offers(self, gpus: Sequence[Gpu]) -> tuple[list[Offer], dict[str, str]]:
        """GPUs that can be rented and can run the model; the others with the reason."""
        market = self.market
        providers = sorted({p for g in GPUS.values() for p, _ in g.prices})
        if market.provider and market.provider not in providers:
            message = f"no price of '{market.provider}' is known"
            raise TesseraError(message, f"Known: {', '.join(providers)}.", "--provider")
        views = (view for launch in self.rater.trace.launches for view in launch.outputs)
        uses_bf16 = any(view is not None and view.dtype == "bfloat16" for view in views)
        reasons = {g.name: _unfit(g, market, uses_bf16) for g in gpus}
        offers = [Offer(g.name, g.vendor, market.prices_of(g)) for g in gpus if not reasons[g.name]]
        skipped = {name: reason for name, reason in reasons.items() if reason}
        if not offers:
            why = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:4])
            raise PlanInfeasible(f"no GPU is left to rent ({why})", "Name others with --gpus.")
        return offers, skipped


def _cluster(names: Sequence[str]) -> Cluster:
    return wire(parse_devices(",".join(f"emu:{name}" for name in names)), ["pcie4"])


def _unfit(one: Gpu, market: Market, uses_bf16: bool) -> str:
    prices = dict(market.prices_of(one))
    if not prices:
        return f"no price is known; give one with --price {one.name}=USD"
    if market.provider and market.provider not in prices:
        return f"{market.provider} does not quote it"
    return "it has no units for bfloat16" if one.bf16_tflops is None and uses_bf16 else ""


def _error(plan: ServicePlan | Plan) -> float:
    plans = plan.plans if isinstance(plan, ServicePlan) else (plan,)
    return max(sureness(one).rel_error for one in plans)


def _use(cards: RatedCards) -> tuple[Advice, tuple[Planned, ...]]:
    market, load = cards.market, cards.load
    prices = [dict(market.prices_of(gpu(name))) for name in cards.have]
    rents = (
        p.get(market.provider, None if market.provider else min(p.values(), default=None)) for p in prices
    )
    basket = Basket(cards.have, market.provider, total(rents) or 0.0)
    cluster = market.cluster(basket)
    plan, comparison = cards.rater.plan(cluster)
    error = _error(plan)
    best = _best_of_each((*comparison.baselines, comparison.chosen))
    ways = [cards.candidate(basket, best[way], error) for way in WAYS if way in best]
    most = max(way.requests_per_s for way in ways)
    advised = next(n for n, way in enumerate(ways) if way.requests_per_s * (1 + error) >= most)
    ways[advised] = replace(ways[advised], is_advised=True)
    advice = Advice(
        load=load,
        candidates=tuple(ways),
        price_source=gpu(cards.have[0]).price_source,
        notes=(cards.rater.note,) if cards.rater.note else (),
        is_compiled=cards.rater.is_compiled,
        have=cards.have,
        by_tpot=tuple(_regimes(cards, cluster, comparison, error)),
        next_cards=_next_cards(cards, ways[advised].requests_per_s),
    )
    return advice, ((plan, comparison),)


def _next_cards(cards: RatedCards, current_per_s: float) -> tuple[Candidate, ...]:
    """A copy of the model on one more card of the same maker; what carries the rate cheapest comes first."""
    needed = cards.load.needed_per_s
    candidates = []
    offers = [offer for offer in cards.offers if offer.maker == gpu(cards.have[0]).vendor]
    for basket in baskets(offers, 1, cards.market.provider):
        drafts = cards.rater.drafts(cards.market.cluster(basket))
        option = max(drafts, key=lambda o: o.tokens_per_s, default=None)
        if option is not None:
            card = cards.candidate(basket, option)
            candidates.append(replace(card, is_enough=current_per_s + card.requests_per_s >= needed))

    def order(card: Candidate) -> tuple[bool, float]:
        closes_gap = card.is_enough and current_per_s < needed
        return not closes_gap, (card.usd_per_hour if closes_gap else card.usd_per_1k_requests) or 0.0

    return tuple(sorted(candidates, key=order)[:NUM_NEXT])


def _best_of_each(options: Iterable[Option]) -> dict[str, Option]:
    best: dict[str, Option] = {}
    for option in options:
        way = KINDS.get(option.policy, "kernel level")
        best[way] = max(best.get(way, option), option, key=lambda o: o.tokens_per_s)
    return best


def _regimes(cards: RatedCards, cluster: Cluster, comparison: Comparison, error: float) -> Iterable[Regime]:
    fastest = cards.rater.fastest(cluster)
    slowest = max(o.tpot_ms for o in (*comparison.baselines, comparison.chosen))
    if fastest is None or not slowest or cards.load.is_image:  # no time per token in answers of one
        return
    for limit in round_limits(fastest.tpot_ms, slowest):
        within = _best_of_each(cards.rater.drafts(cluster, limit))
        rates = {way: within[way].tokens_per_s / cards.load.tokens for way in WAYS if way in within}
        if rates:
            best = max(rates.values())
            yield Regime(limit, rates, next(way for way in rates if rates[way] * (1 + error) >= best))


@dataclass
class _Rent:
    cards: RatedCards
    show: Advance
    choices: list[tuple[Candidate, Planned]] = field(default_factory=list)
    # The best set that does not carry the load.
    near: Candidate | None = None
    num_planned: int = 0
    # Sets that might carry the load and were not planned.
    num_left: int = 0

    @cached_property
    def sets(self) -> list[Basket]:
        market = self.cards.market
        return baskets(self.cards.offers, market.max_devices, market.provider)

    def advice(self) -> tuple[Advice, tuple[Planned, ...]]:
        self._search()
        if not self.choices:
            raise self._shortfall()
        candidates, plans = zip(*sorted(self.choices, key=lambda x: x[0].usd_per_hour or 0.0), strict=True)
        is_alone = len(candidates) < NUM_ADVISED and self.num_left
        alone = "A runner-up was not planned, for lack of time." if is_alone else ""
        rater = self.cards.rater
        advice = Advice(
            load=self.cards.load,
            candidates=(replace(candidates[0], is_advised=True), *candidates[1:]),
            price_source=gpu(self.cards.offers[0].gpu).price_source,
            notes=tuple(note for note in (alone, rater.note) if note),
            is_compiled=rater.is_compiled,
            skipped=self.cards.skipped,
            num_sets=len(self.sets),
            num_planned=self.num_planned,
        )
        return advice, plans

    def _search(self) -> None:
        """Plan sets from the cheapest on, until two carry the load."""
        cards, load = self.cards, self.cards.load
        began, last_s = time.perf_counter(), 0.0
        for basket in self.sets:
            if len(self.choices) == NUM_ADVISED:
                break
            if cards.limit.per_s(basket.gpus, rounds=1) < load.needed_per_s:
                continue
            drafts: list[Option] = []
            with suppress(PlanInfeasible):
                drafts = cards.rater.drafts(cards.market.cluster(basket))
            if not drafts:
                continue
            option = max(drafts, key=lambda o: o.tokens_per_s)
            if DRAFT_ERROR * option.tokens_per_s < load.needed_per_s * load.tokens:
                self._note(cards.candidate(basket, option))
                continue
            now = time.perf_counter()
            # The next plan may take as long as the last one.
            if now + last_s - began > (SEARCH_S if self.choices else LONGEST_S):
                self.num_left += 1
                break
            self._plan(basket)
            last_s = time.perf_counter() - now

    def _note(self, candidate: Candidate) -> None:
        if self.near is None or candidate.requests_per_s > self.near.requests_per_s:
            self.near = candidate

    def _plan(self, basket: Basket) -> None:
        self.cards.advance(f"planning {basket}")
        self.num_planned += 1
        try:
            plan, comparison = self.cards.rater.plan(self.cards.market.cluster(basket))
        except PlanInfeasible:
            return
        candidate = self.cards.candidate(basket, comparison.chosen, _error(plan))
        if not candidate.is_enough:
            self._note(candidate)
        else:
            self.choices.append((candidate, (plan, comparison)))
            usd, per_s = basket.usd_per_hour, candidate.requests_per_s
            self.show(f"{basket} at {usd:.2f} USD an hour carries {digits(per_s)}/s")

    def _shortfall(self) -> PlanInfeasible:
        """Which constraint is missed, and by how much."""
        load, cards = self.cards.load, self.cards
        rate = f"{digits(load.needed_per_s)} {load.unit}/s"
        what = f"no set of up to {cards.market.max_devices} of these GPUs carries {rate}"
        remedy = "Raise --max-devices, or lower the rate or the margin."
        limit, name = max((cards.limit.per_s(b.gpus), str(b)) for b in self.sets[-64:])
        if limit < load.needed_per_s:
            return PlanInfeasible(f"{what}: even with free transfers {name} carries {digits(limit)}", remedy)
        if self.num_left:
            message = f"no set that carries {rate} was found in {LONGEST_S:.0f} s"
            return PlanInfeasible(message, "Name fewer GPUs with --gpus, or give --effort quick.")
        if self.near is not None:
            near = f"the best, {' + '.join(self.near.gpus)}, carries {digits(self.near.requests_per_s)}"
            return PlanInfeasible(f"{what}: {near}", remedy)
        fastest = self._fastest()
        if fastest is not None and load.has_limits:
            times = times_text(fastest.tpot_ms, fastest.ttft_ms)
            message = f"{what} within the latency asked for; the fastest takes {times}"
            return PlanInfeasible(message, f"Loosen it, or: {remedy}")
        return PlanInfeasible(f"{what}: the model does not fit", "Raise --max-devices, or allow larger GPUs.")

    def _fastest(self) -> Option | None:
        alone = [b for b in self.sets if len(b.gpus) == 1]
        options = (self.cards.rater.fastest(self.cards.market.cluster(b)) for b in alone)
        return min((o for o in options if o is not None), key=lambda o: o.tpot_ms, default=None)
