"""advise: which cards carry a load, at what rate, price and latency. No GPU is needed; all is modelled.

The steps of a request are recorded without weights at two batches, interpolated at others, and priced on
every GPU. Two questions share this:

  rent   The cheapest cards that carry the load. First every set with a copy of the model on each card; then
         cheaper sets that share the launches of a request, as far as their bound carries the rate, planned
         cheapest first while there is time.
  have   What to do with given cards: the coarsest policy within the error of the prices; and what a copy of
         the model on one more card would add.

Not modelled: prompts of different lengths, and bursts, for which `RentedLoad.margin` is kept free.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tessera.advise.records import Advice, Candidate, Market, Regime, RentedLoad, Times
from tessera.capture.models import steps_of_model
from tessera.errors import PlanInfeasible, TesseraError
from tessera.flow import (
    LoadSteps,
    anchors_of,
    at_batches,
    choose_launches,
    make_batched_plan,
    plan_for,
    plan_recorded,
)
from tessera.ir import Cluster, Costs, Objective, Plan, Step, Variant, WorkUnit
from tessera.plan import BATCHES, LoadConfig, LoadPlan, Option, PlanConfig
from tessera.plan.rent import Basket, Limit, Offer, alone_bytes, baskets, limit_of, shortest_us
from tessera.profile import (
    Gpu,
    estimate,
    gpu,
    known_gpus,
    make_cluster,
    parse_devices,
    sureness,
    sureness_of,
    works,
)
from tessera.report import round_limits

Advance = Callable[[str], None]

# Ways to use cards, from the coarsest; policies that are not named are splits.
WAYS = ("one card", "data-parallel", "split", "kernel level")
KINDS = {"single": "one card", "data-parallel": "data-parallel", "plan": "kernel level"}
NUM_NEXT = 5
# Sets of cards that are advised: the choice and the runner-up.
NUM_ADVISED = 2
# Seconds after which no further set is planned; the longer where nothing carries the load yet.
SEARCH_S, LONGEST_S = 20.0, 120.0
# Cards that are planned together while copies carry the load: more take too long.
MAX_TOGETHER = 2
# After so many plans, a set is skipped that would have to come this much nearer to its bound than any before.
NUM_LEARNED, CHANCE = 2, 1.05


def advise(
    load: RentedLoad,
    market: Market,
    have: Sequence[str] = (),
    advance: Advance = lambda what: None,
    show: Advance = lambda text: None,
) -> tuple[Advice, tuple[Plan, ...]]:
    """What to rent, with a plan of each candidate; or how to use `have`, with the plan of the finest way.

    `show` gets answers as they come. PlanInfeasible says how far the best falls short.
    """
    if load.is_image and (load.ttft_ms is not None or load.tpot_ms is not None):
        raise TesseraError("an image has no tokens to wait for", "Leave --slo-ttft-ms and --slo-tpot-ms out.")
    names = tuple(gpu(name).name for name in (*have, *market.gpus))  # an unknown name is refused at once
    priced = PricedCards(load, market, names[: len(have)], advance)
    return _use(priced) if have else _Rent(priced, show).advice()


@dataclass(frozen=True, eq=False)
class Size:
    """The work at one batch, priced on one device of each GPU."""

    batch: int
    unit: WorkUnit
    costs: tuple[Costs, ...]

    @cached_property
    def limit(self) -> Limit:
        return limit_of(self.unit, self.costs)

    @cached_property
    def needs_bytes(self) -> float:
        """Weights, state and temporaries of one batch on one device."""
        first = make_cluster(self.costs[0].devices[:1], "pcie4")
        return alone_bytes(self.unit, self.on(first).costs, first)

    def step_us(self, name: str) -> list[float]:
        return [costs.total_us(self.limit.column_of[name]) for costs in self.costs]

    def alone_per_s(self, name: str) -> float:
        """Requests per second of one GPU with a copy of the model."""
        us = sum(us * n for us, n in zip(self.step_us(name), self.unit.counts, strict=True))
        return self.batch * 1e6 / us

    def times_ms(self, name: str) -> Times:
        steps = self.step_us(name)
        return (steps[0] / 1e3, steps[-1] / 1e3) if len(steps) > 1 else (None, None)

    def cost_error(self, name: str) -> float:
        """Relative error of the time of a request on one GPU."""
        column = self.limit.column_of[name]
        return sureness_of(
            (work, name, row[column], count)
            for graph, costs, count in zip(self.unit.graphs, self.costs, self.unit.counts, strict=True)
            for work, row in zip(works(graph.trace), costs.costs, strict=True)
        ).rel_error

    def on(self, cluster: Cluster) -> Variant:
        at = [self.limit.column_of[d.gpu] for d in cluster.devices]
        return Variant(
            self.unit,
            tuple(
                Costs(c.trace_digest, cluster.devices, tuple(tuple(row[i] for i in at) for row in c.costs))
                for c in self.costs
            ),
        )


class PricedCards:
    """The steps of a request at every batch, priced on every card in question."""

    def __init__(self, load: RentedLoad, market: Market, have: tuple[str, ...], advance: Advance) -> None:
        self.load, self.market, self.have, self.advance = load, market, have, advance
        steps, counts = _steps_of(load)
        self.batches = market.batches or BATCHES
        anchors = anchors_of(self.batches)
        self.is_compiled, self.note = choose_launches(at_batches(steps, anchors), market.launches)
        self.recorded = LoadSteps(steps, counts, anchors, advance, self.is_compiled)
        self.offers, self.skipped = self._offers()

    def sizes(self, most_bytes: float) -> list[Size]:
        """The work at each batch, up to the first that needs more memory."""
        devices = parse_devices(",".join(f"emu:{offer.gpu}" for offer in self.offers))
        sizes: list[Size] = []
        for batch in self.batches:
            self.advance(f"pricing batch {batch} on {len(devices)} GPUs")
            unit = self.recorded.at(batch)
            size = Size(batch, unit, tuple(estimate(g.trace, devices) for g in unit.graphs))
            if sizes and size.needs_bytes > most_bytes:
                break
            sizes.append(size)
        return sizes

    def keeps(self, size: Size, name: str) -> bool:
        """Whether one GPU holds the model and a batch, within the limits of latency."""
        fits = size.needs_bytes <= int(self.market.memory_bytes(name))
        return fits and self.load.excess(size.times_ms(name)) <= 1

    def best_alone(self, sizes: Iterable[Size], name: str) -> Size | None:
        """The batch at which one GPU with a copy of the model serves most requests."""
        kept = (size for size in sizes if self.keeps(size, name))
        return max(kept, key=lambda size: size.alone_per_s(name), default=None)

    def candidate(self, basket: Basket, option: Option, policy: str, cost_error: float) -> Candidate:
        """The figures of a plan on a set of cards."""
        usd = basket.usd_per_hour or None
        per_s = option.tokens_per_s / self.load.target.output_tokens
        return Candidate(
            gpus=basket.gpus,
            way="one card" if len(basket.gpus) == 1 else KINDS.get(policy, "split"),
            requests_per_s=per_s,
            is_enough=per_s >= self.load.needed_per_s * (1 - 1e-9),
            ttft_ms=None if self.load.is_image else option.ttft_ms,
            tpot_ms=option.tpot_ms,
            cost_error=cost_error,
            batch=option.batch,
            microbatches=option.microbatches,
            policy=policy,
            provider=basket.provider,
            usd_per_hour=usd,
            usd_per_1k_requests=None if usd is None else usd / 3.6 / per_s,
        )

    def copies(self, basket: Basket, sizes: Sequence[Size], names: Sequence[str]) -> Candidate:
        """The figures of copies of the model, one on each card at its batch; `names`: of the devices."""
        pairs = list(zip(sizes, basket.gpus, strict=True))
        times = zip(*(size.times_ms(name) for size, name in pairs), strict=True)
        first, each = (max((ms for ms in column if ms is not None), default=0.0) for column in times)
        per_s = sum(size.alone_per_s(name) for size, name in pairs)
        tokens_per_s = per_s * self.load.target.output_tokens
        policy = "data-parallel" if len(pairs) > 1 else "single"
        batch = {device: size.batch for device, (size, _) in zip(names, pairs, strict=True)}
        option = Option(policy, tokens_per_s, each, first, batch, len(pairs))
        error = max(size.cost_error(name) for size, name in pairs)
        made = self.candidate(basket, option, option.policy, error)
        return replace(made, tpot_ms=None) if self.load.is_image else made

    def _offers(self) -> tuple[list[Offer], dict[str, str]]:
        """GPUs that can be rented and can run the model, and the others with the reason."""
        market = self.market
        providers = sorted({p for g in known_gpus() for p, _ in g.prices})
        if market.provider and market.provider not in providers:
            message = f"no price of '{market.provider}' is known"
            raise TesseraError(message, f"Known: {', '.join(providers)}.", "--provider")
        views = (
            view
            for graph in self.recorded.at(self.recorded.anchors[0]).graphs
            for launch in graph.trace.launches
            for view in launch.outputs
        )
        uses_bf16 = any(view is not None and view.dtype == "bfloat16" for view in views)
        listed = [gpu(name) for name in market.gpus] or list(known_gpus())
        reasons = {one.name: _unfit(one, market.provider, uses_bf16) for one in listed}
        offers = [Offer(g.name, g.vendor, g.prices) for g in listed if not reasons[g.name]]
        skipped = {name: why for name, why in reasons.items() if why}
        if not offers:
            named = "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:4])
            raise PlanInfeasible(f"no GPU is left to rent ({named})", "Name others with --gpus.")
        return offers, skipped


def _unfit(one: Gpu, provider: str, uses_bf16: bool) -> str:
    if not one.prices:
        return "no price is known"
    if provider and provider not in dict(one.prices):
        return f"{provider} does not quote it"
    return "it has no units for bfloat16" if one.bf16_tflops is None and uses_bf16 else ""


def _steps_of(load: RentedLoad) -> tuple[list[Step], list[int]]:
    """The steps of one request at any batch, and how often each runs."""
    if load.is_image:
        return [Step(load.model, steps_of_model(load.model)[0], 1, load.prompt)], [load.output]
    prefill = Step(load.model, "prefill", 1, load.prompt, 0, load.output)
    return [prefill, Step(load.model, "decode", 1, load.prompt + load.output)], [1, load.output]


def _use(priced: PricedCards) -> tuple[Advice, tuple[Plan, ...]]:
    market, target = priced.market, priced.load.target
    prices = [dict(gpu(name).prices) for name in priced.have]
    rents = [p.get(market.provider) if market.provider else min(p.values(), default=None) for p in prices]
    usd = 0.0 if None in rents else sum(rent or 0.0 for rent in rents)
    basket = Basket(priced.have, market.provider, usd)
    config = LoadConfig(priced.batches, max_microbatches=market.microbatches, search=market.search)
    config = replace(config, advance=priced.advance)
    planned = plan_recorded(priced.recorded, market.cluster(basket), target, config)
    error = sureness(planned.plan).rel_error
    best = _best_of_each((*planned.baselines, planned.chosen))
    ways = [priced.candidate(basket, best[way], best[way].policy, error) for way in WAYS if way in best]
    most = max(way.requests_per_s for way in ways)
    advised = next(n for n, way in enumerate(ways) if way.requests_per_s * (1 + error) >= most)
    ways[advised] = replace(ways[advised], is_advised=True)
    advice = Advice(
        load=priced.load,
        candidates=tuple(ways),
        price_source=gpu(priced.have[0]).price_source,
        notes=(priced.note,) if priced.note else (),
        is_compiled=priced.is_compiled,
        have=priced.have,
        by_tpot=tuple(_regimes(planned, error, target.output_tokens)),
        next_cards=_next_cards(priced, ways[advised].requests_per_s),
    )
    return advice, (planned.plan,)


def _next_cards(priced: PricedCards, there_per_s: float) -> tuple[Candidate, ...]:
    """A copy of the model on one more card of each kind; what carries the rate cheapest comes first."""
    needed = priced.load.needed_per_s
    sizes = priced.sizes(max(priced.market.memory_bytes(offer.gpu) for offer in priced.offers))
    cards = []
    for basket in baskets(priced.offers, 1, priced.market.provider):
        if size := priced.best_alone(sizes, basket.gpus[0]):
            card = priced.copies(basket, [size], basket.gpus)
            cards.append(replace(card, is_enough=there_per_s + card.requests_per_s >= needed))

    def order(card: Candidate) -> tuple[bool, float]:
        is_wanted = card.is_enough and there_per_s < needed
        return not is_wanted, (card.usd_per_hour if is_wanted else card.usd_per_1k_requests) or 0.0

    return tuple(sorted(cards, key=order)[:NUM_NEXT])


def _best_of_each(options: Iterable[Option]) -> dict[str, Option]:
    best: dict[str, Option] = {}
    for option in options:
        way = KINDS.get(option.policy, "split")
        best[way] = max(best.get(way, option), option, key=lambda o: o.tokens_per_s)
    return best


def _regimes(planned: LoadPlan, error: float, tokens: int) -> Iterable[Regime]:
    most = max(planned.options, key=lambda o: (o.tokens_per_s, -o.tpot_ms))
    for limit in round_limits(min(o.tpot_ms for o in planned.options), most.tpot_ms):
        within = _best_of_each(option for option in planned.options if option.tpot_ms <= limit)
        rates = {way: within[way].tokens_per_s / tokens for way in WAYS if way in within}
        best = max(rates.values())
        yield Regime(limit, rates, next(way for way in rates if rates[way] * (1 + error) >= best))


class _Rent:
    def __init__(self, priced: PricedCards, show: Advance) -> None:
        self._priced, self._load, self._market, self._show = priced, priced.load, priced.market, show
        self._listed = baskets(priced.offers, self._market.max_devices, self._market.provider)
        self._most_bytes = max(map(self._memory_bytes, self._listed))
        self._sizes = priced.sizes(self._most_bytes)
        self._choices: list[tuple[Candidate, Plan]] = []
        # The best that was planned and does not carry the load.
        self._near: Candidate | None = None
        self._num_planned = 0
        # Cheaper sets that might carry the load and were not planned.
        self._num_left = 0
        # The largest share of its bound that a plan has reached.
        self._reached = 0.0

    def advice(self) -> tuple[Advice, tuple[Plan, ...]]:
        self._search()
        if not self._choices:
            raise self._shortfall()
        listed, plans = zip(*sorted(self._choices, key=lambda x: x[0].usd_per_hour or 0.0), strict=True)
        cheaper = (
            f"{self._num_left} cheaper sets that might carry it together were not planned, for lack of time."
        )
        notes = (cheaper if self._num_left else "", self._priced.note)
        advice = Advice(
            load=self._load,
            candidates=(replace(listed[0], is_advised=True), *listed[1:]),
            price_source=gpu(self._priced.offers[0].gpu).price_source,
            notes=tuple(note for note in notes if note),
            is_compiled=self._priced.is_compiled,
            skipped=self._priced.skipped,
            num_sets=len(self._listed),
            num_planned=self._num_planned,
        )
        return advice, plans

    def _search(self) -> None:
        began, last_s = time.perf_counter(), 0.0  # the next plan may take as long as the last one
        copies = self._copies()
        dearest = float("inf")
        if copies:
            dearest = copies[0][1].usd_per_hour
            self._tell(*copies[0], " apart")
        for basket in self._listed:
            if basket.usd_per_hour >= dearest or len(self._choices) == NUM_ADVISED:
                break
            size = self._promising(basket) if len(basket.gpus) > 1 else None
            if size is None:
                continue
            now, has_one = time.perf_counter(), bool(copies or self._choices)
            is_late = now + last_s - began > (SEARCH_S if has_one else LONGEST_S)
            if is_late or (has_one and len(basket.gpus) > MAX_TOGETHER):
                self._num_left += 1
                continue
            self._plan(basket, size)
            last_s = time.perf_counter() - now
        for _, basket in copies[: NUM_ADVISED - len(self._choices)]:
            self._priced.advance(f"planning {basket}")
            self._choices.append(self._plan_copies(basket))

    def _tell(self, per_s: float, basket: Basket, how: str = "") -> None:
        self._show(f"{basket} at {basket.usd_per_hour:.2f} USD an hour carries {per_s:.4g}/s{how}")

    def _memory_bytes(self, basket: Basket) -> float:
        return sum(map(self._market.memory_bytes, basket.gpus))

    def _copies(self) -> list[tuple[float, Basket]]:
        """(requests per second, set) of the cheapest sets that carry the load with a copy on each card."""
        best = {}
        for name in {name for basket in self._listed for name in basket.gpus}:
            size = self._priced.best_alone(self._sizes, name)
            best[name] = size.alone_per_s(name) if size else 0.0
        rated = ((sum(best[name] for name in basket.gpus), basket) for basket in self._listed)
        enough = (
            (per_s, basket)
            for per_s, basket in rated
            if per_s >= self._load.needed_per_s and all(best[name] > 0 for name in basket.gpus)
        )
        return [x for x, _ in zip(enough, range(NUM_ADVISED), strict=False)]

    def _promising(self, basket: Basket) -> Size | None:
        """The batch with the highest bound at which a set might carry the load; None if there is none."""
        memory, best, best_per_s = self._memory_bytes(basket), None, 0.0
        has_learned = self._num_planned >= NUM_LEARNED and self._reached
        needed = self._load.needed_per_s / (min(1.0, CHANCE * self._reached) if has_learned else 1.0)
        for size in self._sizes:
            if size.needs_bytes > memory:
                break
            if size.batch * size.limit.upper_bound_per_s(basket.gpus) < needed:
                continue
            limit = size.batch * size.limit.per_s(basket.gpus)
            if limit >= max(needed, best_per_s) and self._may_keep(size, basket):
                best, best_per_s = size, limit
        return best

    def _may_keep(self, size: Size, basket: Basket) -> bool:
        """False if no plan keeps the limits of latency even for one batch with free transfers."""
        if len(size.costs) < 2:
            return True
        columns = sorted({size.limit.column_of[name] for name in basket.gpus})
        first, each = (
            shortest_us(graph, costs, columns, len(basket.gpus)) / 1e3
            for graph, costs in zip(size.unit.graphs, size.costs, strict=True)
        )
        return self._load.excess((first, each)) <= 1

    def _plan(self, basket: Basket, size: Size) -> None:
        """Plan a set at one batch; it is a choice if it carries the load."""
        priced, cluster = self._priced, self._market.cluster(basket)
        priced.advance(f"planning {basket} at batch {size.batch}")
        self._num_planned += 1
        variants = {x.batch: x for x in self._sizes}
        config = LoadConfig(
            (size.batch,), max_microbatches=self._market.microbatches, search=self._market.search
        )
        try:
            planned = plan_for(lambda b: variants[b].on(cluster), cluster, self._load.target, config)
        except PlanInfeasible:
            return
        chosen, error = planned.chosen, sureness(planned.plan).rel_error
        candidate = priced.candidate(basket, chosen, chosen.policy, error)
        per_s = candidate.requests_per_s
        self._reached = max(self._reached, per_s / size.batch / size.limit.per_s(basket.gpus))
        if candidate.is_enough:
            self._choices.append((candidate, planned.plan))
            self._tell(per_s, basket)
        elif self._near is None or per_s > self._near.requests_per_s:
            self._near = candidate

    def _plan_copies(self, basket: Basket) -> tuple[Candidate, Plan]:
        """Copies at the smallest batches that carry the load together, with the plan of that policy."""
        best: dict[str, Size] = {}
        for number in range(1, len(self._sizes) + 1):
            sizes = {name: self._priced.best_alone(self._sizes[:number], name) for name in basket.gpus}
            best = {name: size for name, size in sizes.items() if size}
            per_s = sum(best[name].alone_per_s(name) for name in basket.gpus if name in best)
            if len(best) == len(sizes) and per_s >= self._load.needed_per_s:
                break
        chosen, cluster = [best[name] for name in basket.gpus], self._market.cluster(basket)
        by_batch = {size.batch: size.on(cluster) for size in chosen}
        policy = "data-parallel" if len(chosen) > 1 else None
        search = self._market.search
        config = PlanConfig(
            Objective.THROUGHPUT, len(chosen), policy=policy, shown_microbatches=(), search=search
        )
        plan = make_batched_plan([by_batch[b] for b in sorted(by_batch)], cluster, config).plan
        return self._priced.copies(basket, chosen, cluster.names), plan

    def _shortfall(self) -> PlanInfeasible:
        """Which constraint is missed, and by how much."""
        load, smallest = self._load, self._sizes[0]
        rate = f"{load.needed_per_s:.4g} {load.unit}/s"
        what = f"no set of up to {self._market.max_devices} of these GPUs carries {rate}"
        remedy = "Raise --max-devices, or lower the rate or the margin."
        if smallest.needs_bytes > self._most_bytes:
            needs = f"the model needs {smallest.needs_bytes / 1e9:.3g} GB at the smallest batch"
            holds = f"the largest set has {self._most_bytes / 1e9:.3g} GB"
            return PlanInfeasible(f"{needs}; {holds}", "Raise --max-devices, or allow larger GPUs.")
        if self._near is not None:
            near = f"{' + '.join(self._near.gpus)} carries {self._near.requests_per_s:.4g}"
            return PlanInfeasible(f"{what}: {near}", remedy)
        has_slo = (load.ttft_ms, load.tpot_ms) != (None, None)
        names = {name for basket in self._listed for name in basket.gpus}
        fastest = min(names, key=lambda name: load.excess(smallest.times_ms(name)))
        first, each = smallest.times_ms(fastest)
        bounds = (
            (size.batch * size.limit.upper_bound_per_s(basket.gpus), str(basket))
            for size in self._sizes
            for basket in self._listed[-64:]
        )
        limit, name = max(bounds)
        if has_slo and load.excess((first, each)) > 1:
            why = f"{fastest} takes {first:.4g} ms to the first token and {each:.4g} ms a token by itself"
        elif has_slo and limit >= load.needed_per_s:
            why = f"at any latency, and with free transfers, {name} carries {limit:.4g}"
        else:
            return PlanInfeasible(f"{what}: even with free transfers {name} carries {limit:.4g}", remedy)
        return PlanInfeasible(f"{what} within the latency asked for; {why}", f"Loosen it, or: {remedy}")
