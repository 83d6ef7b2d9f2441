"""advise: a load in, the cheapest GPUs that carry it out, on a machine without any.

The model's steps are recorded at two batches without weights, written down for the others, and every launch
is priced on every GPU that has a rent. Then, from what is known at once to what takes seconds:

  apart      every basket of GPUs, each serving requests of its own at its own best batch: sums of times that
             are known, so all baskets are looked at. The cheapest is an answer before anything is planned
  together   baskets cheaper than that, in which GPUs share the launches of a request. Those that cannot carry
             the rate even with free transfers are discarded, the others (pairs, unless nothing is known yet)
             planned as `tessera plan MODEL` does, cheapest first, while there is time

So the advice is never dearer than the cheapest card, or set of cards, that carries the load by itself, at the
same limits of memory and latency. All figures are modelled. Not modelled: prompts of unlike lengths, and
arrivals in bursts, for which `margin` is kept free.

`offers_of`: the GPUs that can be rented for a model; a `Size` is the work at one batch, priced on one device
of each, and what each makes of it by itself.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tessera.capture.models import steps_of_model
from tessera.errors import PlanInfeasible, TesseraError
from tessera.flow import ANCHORS, LoadSteps, choose_launches, make_batched_plan, plan_for
from tessera.ir import Cluster, Costs, Objective, Plan, Step, Trace, Variant, WorkUnit
from tessera.plan import BATCHES, FULL, LoadConfig, LoadPlan, PlanConfig, SearchConfig, Target
from tessera.plan.rent import Basket, Limit, Offer, alone_bytes, baskets, limit_of, shortest_us
from tessera.profile import Gpu, estimate, gpu, known_gpus, make_cluster, parse_devices

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
    search: SearchConfig = FULL


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


def offers_of(market: Market, traces: Sequence[Trace]) -> tuple[list[Offer], list[tuple[str, str]]]:
    """GPUs that can be rented and can run the model, and the others with the reason."""
    wanted = [gpu(name) for name in market.gpus] or list(known_gpus())
    providers = {p for g in known_gpus() for p, _ in g.prices}
    if market.provider and market.provider not in providers:
        known = ", ".join(sorted(providers))
        raise TesseraError(f"no price of '{market.provider}' is known", f"Known: {known}.", "--provider")
    offers, skipped = [], []
    for one in wanted:
        why = _unfit(one, market, traces)
        if why:
            skipped.append((one.name, why))
        else:
            offers.append(Offer(one.name, one.vendor, one.prices))
    if not offers:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped[:4])
        raise PlanInfeasible(f"no GPU is left to rent ({reasons})", "Name others with --gpus.")
    return offers, skipped


def _unfit(one: Gpu, market: Market, traces: Sequence[Trace]) -> str:
    if not one.prices:
        return "no price is known"
    if market.provider and market.provider not in dict(one.prices):
        return f"{market.provider} does not quote it"
    if one.bf16_tflops is None and _uses_bf16(traces):
        return "it has no units for bfloat16"
    return ""


def _uses_bf16(traces: Sequence[Trace]) -> bool:
    return any(
        view is not None and view.dtype == "bfloat16"
        for trace in traces
        for launch in trace.launches
        for view in launch.outputs
    )


@dataclass(frozen=True, eq=False)
class Size:
    """The work at one batch."""

    batch: int
    unit: WorkUnit
    costs: tuple[Costs, ...]

    @cached_property
    def limit(self) -> Limit:
        """What no placement can exceed."""
        return limit_of(self.unit, self.costs)

    @cached_property
    def needs_bytes(self) -> float:
        """Weights, and state and temporaries of one batch, on one device."""
        first = make_cluster(self.costs[0].devices[:1], "pcie4")
        return alone_bytes(self.unit, self.on(first), first)

    @cached_property
    def _step_us(self) -> dict[str, list[float]]:
        """GPU -> microseconds of each step."""
        devices = self.costs[0].devices
        return {
            device.gpu: [costs.total_us(place) for costs in self.costs]
            for place, device in enumerate(devices)
        }

    def fits(self, name: str, market: Market) -> bool:
        """Does one GPU hold the model and a batch?"""
        return self.needs_bytes <= int(gpu(name).memory_bytes * market.memory_share)

    def alone_per_s(self, name: str) -> float:
        """Requests per second of one GPU by itself."""
        taken = sum(us * n for us, n in zip(self._step_us[name], self.unit.counts, strict=True))
        return self.batch * 1e6 / taken

    def times_ms(self, name: str) -> Times:
        """(to the first token, a token after it) of one GPU by itself."""
        steps = self._step_us[name]
        if len(steps) < 2:
            return None, None
        return steps[0] / 1e3, steps[-1] / 1e3

    def keeps(self, load: Load, name: str, market: Market) -> bool:
        """May one GPU serve this batch by itself?"""
        return self.fits(name, market) and load.is_kept(self.times_ms(name))

    def on(self, cluster: Cluster) -> tuple[Costs, ...]:
        """The prices of the devices of a cluster."""
        column_of = {device.gpu: n for n, device in enumerate(self.costs[0].devices)}
        at = [column_of[d.gpu] for d in cluster.devices]
        return tuple(
            Costs(c.trace_digest, cluster.devices, tuple(tuple(row[i] for i in at) for row in c.costs))
            for c in self.costs
        )


def apart(load: Load, market: Market, sizes: Sequence[Size], gpus: Sequence[str]) -> tuple[float, list[int]]:
    """(requests per second, batch of each GPU) if every GPU serves requests of its own, at its best batch.

    Of the batches that carry the load together, the smallest: they make nobody wait longer.
    """
    per_s, chosen = 0.0, [0] * len(gpus)
    best = [0.0] * len(gpus)
    for size in sizes:
        for place, name in enumerate(gpus):
            rate = size.alone_per_s(name)
            if rate > best[place] and size.keeps(load, name, market):
                best[place], chosen[place] = rate, size.batch
        per_s = sum(best)
        if per_s >= load.needed_per_s:
            break
    return per_s, chosen


# Seconds after which no further basket is planned; where nothing carries the load yet, the longer.
SEARCH_S, LONGEST_S = 20.0, 120.0
# Cards that are planned together while sets that carry the load apart are known: more take too long.
MAX_TOGETHER = 2
# Batches at which one basket is planned.
MAX_BATCHES = 1
# Plans after which a basket is passed over that would have to come nearer to its limit, by a twentieth, than
# any before it.
NUM_LEARNED, CHANCE = 2, 1.05
# Sets that are advised: the choice and the runner-up.
NUM_ADVISED = 2

Advance = Callable[[str], None]
# A basket that carries the load, as soon as it is known: what is known of it, in words.
Show = Callable[[str], None]


def advise(
    load: Load, market: Market, advance: Advance = lambda what: None, show: Show = lambda text: None
) -> Advice:
    """The cheapest baskets that carry the load; PlanInfeasible says how far the best falls short."""
    check(load, market)
    for name in market.gpus:
        gpu(name)  # a name that nobody knows is told before anything is recorded
    steps, counts = steps_of(load)
    batches = market.batches or BATCHES
    anchors = market.batches or ANCHORS
    is_compiled, note = choose_launches(steps, anchors, market.launches)
    recorded = LoadSteps(steps, counts, anchors, advance, is_compiled)
    offers, skipped = offers_of(market, [g.trace for g in recorded.at(recorded.anchors[0]).graphs])
    devices = parse_devices(",".join(f"emu:{offer.gpu}" for offer in offers))
    listed = baskets(offers, market.max_devices, market.provider)
    most = max(_memory(basket, market) for basket in listed)
    search = _BasketSearch(load, market, [], advance, show)
    for batch in batches:
        advance(f"pricing batch {batch} on {len(offers)} GPUs")
        unit = recorded.at(batch)
        size = Size(batch, unit, tuple(estimate(g.trace, devices) for g in unit.graphs))
        if search.sizes and size.needs_bytes > most:
            break
        search.sizes.append(size)
    search.run(listed)
    if not search.choices:
        raise search.shortfall(listed)
    source = gpu(offers[0].gpu).price_source
    made = tuple(search.choices)
    figures = len(listed), search.num_planned
    return Advice(made, tuple(skipped), *figures, source, search.caveat, is_compiled, note)


def steps_of(load: Load) -> tuple[list[Step], list[int]]:
    """The steps of one request at any batch, and how often each runs."""
    if load.is_image:
        return [Step(load.model, steps_of_model(load.model)[0], 1, load.prompt)], [load.output]
    prefill = Step(load.model, "prefill", 1, load.prompt, 0, load.output)
    return [prefill, Step(load.model, "decode", 1, load.prompt + load.output)], [1, load.output]


def _memory(basket: Basket, market: Market) -> float:
    return sum(gpu(name).memory_bytes for name in basket.gpus) * market.memory_share


@dataclass
class _BasketSearch:
    load: Load
    market: Market
    # By batch, ascending.
    sizes: list[Size]
    advance: Advance
    show: Show
    choices: list[Choice] = field(default_factory=list)
    num_planned: int = 0
    # Cheaper baskets that might carry the load and were not planned.
    num_left: int = 0
    # The best that was planned and does not carry the load.
    near: Choice | None = None
    # The largest share of its limit that a basket has reached.
    reached: float = 0.0

    def run(self, listed: Sequence[Basket]) -> None:
        """Finds the choice and the runner-up."""
        began, taken = time.perf_counter(), 0.0  # the last plan, as the next one may
        sure = self._sure(listed)
        if sure:
            per_s, basket = sure[0]
            self.show(f"{basket} at {basket.usd_per_hour:.2f} USD an hour carries {per_s:.4g}/s apart")
        dearest = sure[0][1].usd_per_hour if sure else float("inf")
        for basket in listed:
            if basket.usd_per_hour >= dearest or len(self.choices) == NUM_ADVISED:
                break
            if len(basket.gpus) < 2 or not (promising := self._promising(basket)):
                continue
            now = time.perf_counter()
            has_one = bool(sure or self.choices)
            is_late = now + taken - began > (SEARCH_S if has_one else LONGEST_S)
            if is_late or (has_one and len(basket.gpus) > MAX_TOGETHER):
                self.num_left += 1
                continue
            self._try(basket, promising)
            taken = time.perf_counter() - now
        for _, basket in sure[: NUM_ADVISED - len(self.choices)]:
            self.advance(f"planning {basket}")
            self.choices.append(self._apart(basket))
        self.choices.sort(key=lambda choice: choice.basket.usd_per_hour)

    @property
    def caveat(self) -> str:
        """Why there may be something cheaper; empty if there is no such reason."""
        if not self.num_left:
            return ""
        return f"{self.num_left} cheaper sets that might carry it together were not planned, for lack of time"

    def _sure(self, listed: Sequence[Basket]) -> list[tuple[float, Basket]]:
        """(requests per second, basket) of the cheapest baskets that carry the load each card by itself."""
        found = []
        best = {name: self._alone(name) for name in {n for basket in listed for n in basket.gpus}}
        for basket in listed:
            per_s = sum(best[name] for name in basket.gpus)
            # A card that can do nothing by itself is not rented.
            if per_s >= self.load.needed_per_s and all(best[name] > 0 for name in basket.gpus):
                found.append((per_s, basket))
                if len(found) == NUM_ADVISED:
                    break
        return found

    def _alone(self, name: str) -> float:
        rates = (s.alone_per_s(name) for s in self.sizes if s.keeps(self.load, name, self.market))
        return max(rates, default=0.0)

    def _promising(self, basket: Basket) -> list[int]:
        """The batches at which the basket might carry the load, the most hopeful few."""
        memory, hopes = _memory(basket, self.market), []
        share = min(1.0, CHANCE * self.reached) if self.num_planned >= NUM_LEARNED and self.reached else 1.0
        for size in self.sizes:
            if size.needs_bytes > memory:
                break
            if size.batch * size.limit.upper_bound_per_s(basket.gpus) * share < self.load.needed_per_s:
                continue
            limit = size.batch * size.limit.per_s(basket.gpus)
            if limit * share >= self.load.needed_per_s and self._is_quick(size, basket):
                hopes.append((limit, size.batch))
        return sorted(batch for _, batch in sorted(hopes, reverse=True)[:MAX_BATCHES])

    def _is_quick(self, size: Size, basket: Basket) -> bool:
        """False where no plan keeps the limits even for a batch alone and with free transfers."""
        if len(size.costs) < 2:
            return True
        columns = sorted({size.limit.column_of[name] for name in basket.gpus})
        first, each = (
            shortest_us(graph, costs, columns, len(basket.gpus)) / 1e3
            for graph, costs in zip(size.unit.graphs, size.costs, strict=True)
        )
        return self.load.is_kept((first, each))

    def _try(self, basket: Basket, batches: Sequence[int]) -> None:
        """Plans a basket; it is a choice if it carries the load."""
        self.advance(f"planning {basket} at batch {', '.join(map(str, batches))}")
        self.num_planned += 1
        try:
            choice = self._planned(basket, batches)
        except PlanInfeasible:
            return
        limit = max(s.batch * s.limit.per_s(basket.gpus) for s in self.sizes if s.batch in batches)
        self.reached = max(self.reached, choice.capacity_per_s / limit)
        if choice.capacity_per_s >= self.load.needed_per_s * (1 - 1e-9):
            self.choices.append(choice)
            self.show(
                f"{basket} at {basket.usd_per_hour:.2f} USD an hour carries {choice.capacity_per_s:.4g}/s"
            )
        elif self.near is None or choice.capacity_per_s > self.near.capacity_per_s:
            self.near = choice

    def _apart(self, basket: Basket) -> Choice:
        """Every card with requests of its own: its figures are known, and its plan is the coarse policy's."""
        cluster = cluster_of(basket.gpus, self.market, basket.provider)
        per_s, chosen = apart(self.load, self.market, self.sizes, basket.gpus)
        sizes = {size.batch: size for size in self.sizes}
        variants = [Variant(sizes[b].unit, sizes[b].on(cluster)) for b in sorted({*chosen})]
        policy = "data-parallel" if len(chosen) > 1 else None
        config = PlanConfig(
            Objective.THROUGHPUT, len(chosen), policy=policy, shown_microbatches=(), search=self.market.search
        )
        made = make_batched_plan(variants, cluster, config).plan
        times = [sizes[b].times_ms(name) for b, name in zip(chosen, basket.gpus, strict=True)]
        first, each = (
            None if self.load.is_image else max(ms for ms in column if ms is not None)
            for column in zip(*times, strict=True)
        )
        batch = dict(zip(cluster.names, chosen, strict=True))
        return Choice(basket, batch, len(chosen), made, per_s, first, each)

    def _planned(self, basket: Basket, batches: Sequence[int]) -> Choice:
        cluster, load = cluster_of(basket.gpus, self.market, basket.provider), self.load
        sizes = {size.batch: size for size in self.sizes}

        def variant_at(batch: int) -> Variant:
            return Variant(sizes[batch].unit, sizes[batch].on(cluster))

        target = Target(1 if load.is_image else load.output, load.tpot_ms, load.ttft_ms)
        found: LoadPlan | None = None
        for batch in batches:  # each by itself: what lies between was not priced
            config = LoadConfig(
                (batch,), max_microbatches=self.market.microbatches, search=self.market.search
            )
            made = plan_for(variant_at, cluster, target, config)
            if found is None or made.chosen.tokens_per_s > found.chosen.tokens_per_s:
                found = made
        assert found is not None
        option = found.chosen
        times = (None, None) if load.is_image else (option.ttft_ms, option.tpot_ms)
        per_s = option.tokens_per_s / target.output_tokens
        return Choice(basket, option.batch, option.microbatches, found.plan, per_s, *times)

    def shortfall(self, listed: Sequence[Basket]) -> PlanInfeasible:
        """Which constraint, and by how much."""
        load, market = self.load, self.market
        needed = f"{load.needed_per_s:.4g} {load.unit}/s"
        what = f"no set of up to {market.max_devices} of these GPUs carries {needed}"
        remedy = "Raise --max-devices, or lower the rate or the margin."
        most = max(_memory(basket, market) for basket in listed)
        if self.sizes[0].needs_bytes > most:
            have = f"the largest set has {most / 1e9:.3g} GB that may be filled"
            memory = f"the model needs {self.sizes[0].needs_bytes / 1e9:.3g} GB at the smallest batch; {have}"
            return PlanInfeasible(memory, "Raise --max-devices, or allow larger GPUs.")
        if self.near is not None:
            near = f"{self.near.basket} carries {self.near.capacity_per_s:.4g}"
            return PlanInfeasible(f"{what}: {near}", remedy)
        if load.ttft_ms is not None or load.tpot_ms is not None:
            names = {name for basket in listed for name in basket.gpus}
            fastest = min(names, key=lambda name: load.excess(self.sizes[0].times_ms(name)))
            first, each = self.sizes[0].times_ms(fastest)
            if first is not None and each is not None and load.excess((first, each)) > 1:
                slow = (
                    f"{fastest} takes {in_ms(first)} to the first token and {in_ms(each)} a token by itself"
                )
                return PlanInfeasible(
                    f"{what} within the latency asked for; {slow}", f"Loosen it, or: {remedy}"
                )
        hopes = (
            (s.batch * s.limit.upper_bound_per_s(b.gpus), str(b)) for s in self.sizes for b in listed[-64:]
        )
        limit, name = max(hopes)
        if limit >= load.needed_per_s and (load.ttft_ms, load.tpot_ms) != (None, None):
            slow = f"at any latency, and with free transfers, {name} carries {limit:.4g}"
            return PlanInfeasible(f"{what} within the latency asked for; {slow}", f"Loosen it, or: {remedy}")
        return PlanInfeasible(f"{what}: even with free transfers {name} carries {limit:.4g}", remedy)


def cluster_of(gpus: Sequence[str], market: Market, provider: str = "") -> Cluster:
    """Cards to plan for, at the rents of a provider if one is named."""
    devices = parse_devices(",".join(f"emu:{name}" for name in gpus))
    usable = tuple(
        replace(
            d,
            memory_bytes=int(d.memory_bytes * market.memory_share),
            usd_per_hour=dict(gpu(d.gpu).prices)[provider] if provider else d.usd_per_hour,
        )
        for d in devices
    )
    return make_cluster(usable, market.link)
