"""advise: a load in, the cheapest GPUs that carry it out, on a machine without any.

The model's steps are recorded at several batches without weights, and every launch is priced on every GPU
that has a rent. Baskets of GPUs are looked at from the cheapest: those that cannot carry the rate even with
free transfers are discarded, the others are planned by the policy `quick` and simulated. The first that
carries the rate (and keeps the objectives of latency) is the advice, the next the runner-up. To keep the
search short, a basket is also passed over if it would have to come nearer to its limit, by a twentieth, than
any basket planned before it; so a cheaper one may be missed that splits far better than those did. The last
few plans are kept for baskets whose GPUs carry the rate each by itself, so that a runner-up is found.

A work unit is one batch of requests that go together. Its first token comes after the batch has filled
(batch - 1 arrivals) and been prefilled; both phases are stretched by the time that a full system makes a
batch wait, by Little's law. All figures are modelled. Not modelled: batches that change while they run,
prompts of unlike lengths, and arrivals in bursts, for which `margin` is kept free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tessera.advise.offers import offers_of
from tessera.advise.records import Advice, Choice, Load, Market, check
from tessera.capture import known_models, record_step
from tessera.errors import PlanInfeasible
from tessera.flow import make_unit
from tessera.ir import BufferKind, Cluster, Costs, Objective, Step, Trace, WorkUnit
from tessera.plan import PlanConfig, solve
from tessera.plan.rent import Basket, Limit, baskets, limit_of, phases_us
from tessera.profile import estimate, gpu, make_cluster, parse_devices
from tessera.simulate import SteadyRates

# Baskets that are planned before the search gives up; each takes seconds.
MAX_PLANNED = 8
# Batches of one basket that are planned, and plans after which baskets are passed over by experience.
MAX_BATCHES, NUM_LEARNED = 2, 3
# Plans kept for sets that carry the rate without dividing a request.
NUM_KEPT = 2
# How much better than any before it a basket is given the chance to be.
CHANCE = 1.05
# Sets that are advised: the choice and the runner-up.
NUM_ADVISED = 2

Advance = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class _Size:
    """The work at one batch, priced on one device of each GPU."""

    batch: int
    unit: WorkUnit
    costs: tuple[Costs, ...]

    @cached_property
    def limit(self) -> Limit:
        return limit_of(self.unit, self.costs)

    @cached_property
    def weight_bytes(self) -> int:
        return _total(self.unit, BufferKind.WEIGHT)

    @cached_property
    def state_bytes(self) -> int:
        return _total(self.unit, BufferKind.STATE)

    def apart_per_s(self, gpus: Sequence[str], market: Market) -> float:
        """Requests per second of the GPUs that can, each doing whole batches of its own."""
        slots = -(-market.slots // len(gpus))
        need = self.weight_bytes + slots * self.state_bytes
        able = [g for g in gpus if need <= gpu(g).memory_bytes * market.memory_share]
        return self.batch * sum(self.limit.per_s((g,)) for g in able)

    def on(self, cluster: Cluster) -> tuple[Costs, ...]:
        """The prices of the devices of a cluster."""
        at = [self.limit.column_of[d.gpu] for d in cluster.devices]
        return tuple(
            Costs(c.trace_digest, cluster.devices, tuple(tuple(row[i] for i in at) for row in c.costs))
            for c in self.costs
        )


def _total(unit: WorkUnit, kind: BufferKind) -> int:
    sizes = {b.name: b.size_bytes for g in unit.graphs for b in g.trace.buffers if b.kind is kind}
    return sum(sizes.values())


def advise(load: Load, market: Market, advance: Advance = lambda what: None) -> Advice:
    """The cheapest baskets that carry the load; PlanInfeasible says how far the best falls short."""
    check(load, market)
    traces = {}
    for batch in market.batches:
        advance(f"recording {load.model} at batch {batch}")
        traces[batch] = _record(load, batch)
    offers, skipped = offers_of(market, traces[market.batches[0]])
    devices = parse_devices(",".join(f"emu:{offer.gpu}" for offer in offers))
    sizes = []
    for batch, steps in traces.items():
        advance(f"pricing batch {batch} on {len(offers)} GPUs")
        unit = make_unit(steps, _counts(load, steps))
        sizes.append(_Size(batch, unit, tuple(estimate(g.trace, devices) for g in unit.graphs)))
    listed = baskets(offers, market.max_devices, market.provider)
    found = _search(load, market, sizes, listed, advance)
    if not found.choices:
        raise _shortfall(load, market, sizes, listed, found)
    source = gpu(offers[0].gpu).price_source
    return Advice(tuple(found.choices), tuple(skipped), len(listed), found.num_planned, source, found.caveat)


def _record(load: Load, batch: int) -> list[Trace]:
    """The steps of one batch of requests: prefill and decode, or the denoising step of a diffusion model."""
    kinds = known_models().get(load.model, ("prefill", "decode"))
    if "decode" in kinds:
        first = Step(load.model, "prefill", batch, load.prompt, 0, load.output)
        second = Step(load.model, "decode", batch, load.prompt + load.output)
        return [record_step(first, "fake"), record_step(second, "fake")]
    return [record_step(Step(load.model, kinds[0], batch, load.prompt), "fake")]


def _needed(load: Load) -> float:
    """The rate with its margin."""
    return load.rate_per_s * (1 + load.margin)


def _counts(load: Load, traces: Sequence[Trace]) -> tuple[int, ...]:
    return (1, load.output) if len(traces) > 1 else (load.output,)


@dataclass
class _Found:
    """What the search knows so far."""

    choices: list[Choice]
    # The best that does not carry the load.
    near: Choice | None = None
    num_planned: int = 0
    # The largest share of its limit that a basket has reached.
    reached: float = 0.0

    @property
    def is_over(self) -> bool:
        return len(self.choices) == NUM_ADVISED or self.num_planned >= MAX_PLANNED

    @property
    def may_try(self) -> bool:
        """Are there plans left for baskets that might not carry the rate?"""
        return self.num_planned < MAX_PLANNED - NUM_KEPT

    @property
    def caveat(self) -> str:
        """Why there may be something cheaper; empty if there is no such reason."""
        if self.may_try:
            return ""
        tried = MAX_PLANNED - NUM_KEPT
        if len(self.choices) < NUM_ADVISED:
            return f"the search ended after {self.num_planned} plans; no runner-up was found by then"
        return f"after {tried} plans only sets were tried whose GPUs carry the rate each by itself"

    @property
    def hope(self) -> float:
        """The share of its limit that a basket may be hoped to reach."""
        has_learned = (
            self.num_planned >= NUM_LEARNED and self.reached > 0
        )  # what does not fit teaches nothing
        return min(1.0, CHANCE * self.reached) if has_learned else 1.0


def _search(load: Load, market: Market, sizes: list[_Size], listed: list[Basket], advance: Advance) -> _Found:
    """Baskets that carry the load, cheapest first."""
    found = _Found([])
    for basket in listed:
        for limit, size in _promising(load, market, sizes, basket, found.hope):
            if found.is_over:
                return found
            if not found.may_try and size.apart_per_s(basket.gpus, market) < _needed(load):
                continue
            advance(f"planning {basket} at batch {size.batch}")
            found.num_planned += 1
            choice = _plan(load, market, size, basket)
            if choice is None:
                continue
            found.reached = max(found.reached, choice.capacity_per_s / limit)
            if _is_met(load, choice):
                found.choices.append(choice)
                break
            if found.near is None or choice.capacity_per_s > found.near.capacity_per_s:
                found.near = choice
    return found


def _promising(
    load: Load, market: Market, sizes: list[_Size], basket: Basket, hope: float
) -> list[tuple[float, _Size]]:
    """(limit in requests per second, batch) at which the basket may carry the rate, most promising first."""
    memory = sum(gpu(name).memory_bytes for name in basket.gpus) * market.memory_share
    needed = _needed(load) / hope
    rated = []
    for size in sizes:
        fits = size.weight_bytes + market.slots * size.state_bytes <= memory
        if fits and size.batch * size.limit.hope_per_s(basket.gpus) >= needed:
            limit = size.batch * size.limit.per_s(basket.gpus)
            if limit >= needed:
                rated.append((limit, size))
    ranked = sorted(rated, key=lambda x: -x[0])
    # With latency to keep, the smaller batches matter as much as the faster ones.
    return ranked if load.ttft_ms or load.tpot_ms else ranked[:MAX_BATCHES]


def _plan(load: Load, market: Market, size: _Size, basket: Basket) -> Choice | None:
    """The basket's plan at one batch; None if it does not fit."""
    cluster = _cluster(basket, market)
    config = PlanConfig(Objective.THROUGHPUT, market.slots, policy="quick", shown_slots=())
    try:
        made = solve(size.unit, size.on(cluster), cluster, config, SteadyRates())
    except PlanInfeasible:
        return None
    capacity = size.batch * made.simulated_per_s
    phases = phases_us(made)
    stretch = max(1.0, market.slots * 1e6 / made.simulated_per_s / made.latency_us)
    ttft = tpot = None
    if "prefill" in phases:
        filling_ms = (size.batch - 1) / load.rate_per_s * 1e3
        ttft = filling_ms + stretch * phases["prefill"] / 1e3
        tpot = stretch * phases["decode"] / 1e3
    return Choice(basket, size.batch, made, capacity, ttft, tpot)


def _cluster(basket: Basket, market: Market) -> Cluster:
    devices = parse_devices(",".join(f"emu:{name}" for name in basket.gpus))
    rents = {name: dict(gpu(name).prices)[basket.provider] for name in basket.gpus}
    usable = tuple(
        replace(d, memory_bytes=int(d.memory_bytes * market.memory_share), usd_per_hour=rents[d.gpu])
        for d in devices
    )
    return make_cluster(usable, market.link)


def _is_met(load: Load, choice: Choice) -> bool:
    if choice.capacity_per_s < _needed(load):
        return False
    pairs = ((load.ttft_ms, choice.ttft_ms), (load.tpot_ms, choice.tpot_ms))
    return all(slo is None or got is None or got <= slo for slo, got in pairs)


def _shortfall(
    load: Load, market: Market, sizes: list[_Size], listed: list[Basket], found: _Found
) -> PlanInfeasible:
    """Which constraint, and by how much."""
    near = found.near
    needed = _needed(load)
    what = f"no set of up to {market.max_devices} of these GPUs carries {needed:.4g} requests/s"
    remedy = "Raise --max-devices, or lower the rate or the margin."
    least = min(size.weight_bytes + market.slots * size.state_bytes for size in sizes)
    most = max(sum(gpu(n).memory_bytes for n in b.gpus) for b in listed) * market.memory_share
    if least > most:
        have = f"the largest set has {most / 1e9:.3g} GB that may be filled"
        memory = f"the model needs {least / 1e9:.3g} GB at the smallest batch; {have}"
        return PlanInfeasible(memory, "Raise --max-devices, allow larger GPUs, or lower --slots.")
    if near is not None and near.capacity_per_s >= needed:
        times = f"{near.ttft_ms:.4g} ms to the first token and {near.tpot_ms:.4g} ms a token"
        slow = f"{near.basket} does with {times}, at batch {near.batch}"
        return PlanInfeasible(f"{what} within the latency asked for; {slow}", "Loosen it, or add batches.")
    if near is None and not found.may_try:
        what = f"none of {found.num_planned} sets planned, the cheapest first, holds the model in its memory"
        return PlanInfeasible(what, "Name fewer or larger GPUs with --gpus, or smaller --batches.")
    if near is not None and not found.may_try:
        what = f"none of {found.num_planned} sets planned, the cheapest first, carries {needed:.4g}/s"
        carries = f"{near.basket} carries {near.capacity_per_s:.4g}"
        return PlanInfeasible(f"{what}: {carries}", "Name fewer or larger GPUs with --gpus.")
    if near is not None:
        return PlanInfeasible(f"{what}: {near.basket} carries {near.capacity_per_s:.4g}", remedy)
    limit, basket = max((s.batch * s.limit.hope_per_s(b.gpus), str(b)) for s in sizes for b in listed[-64:])
    return PlanInfeasible(f"{what}: even with free transfers {basket} carries {limit:.4g}", remedy)
