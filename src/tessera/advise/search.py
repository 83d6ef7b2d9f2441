"""advise: a load in, the cheapest GPUs that carry it out, on a machine without any.

The model's steps are recorded at several batches without weights, and every launch is priced on every GPU
that has a rent. Baskets of GPUs are looked at from the cheapest: those that cannot carry the rate even with
free transfers are discarded, the others are planned by the policy `quick` and simulated. The first that
carries the rate (and keeps the objectives of latency) is the advice, the next the runner-up. To keep the
search short, a basket is also passed over if it would have to come nearer to its limit, by a twentieth, than
any basket planned before it; so a cheaper one may be missed that splits far better than those did. The last
few plans are kept for baskets whose GPUs carry the rate each by itself, so that a runner-up is found. Of
several batches that would carry the rate on one basket the smallest is taken: it makes nobody wait longer.

A work unit is one batch of requests that go together. Its first token comes after the batch has filled
(batch - 1 arrivals) and been prefilled. Both phases are stretched by the others in flight, as if the basket
were one server that they share: by 1 / (1 - offered rate / capacity), at most by what a full system makes a
batch wait by Little's law. A basket on which one batch alone misses an objective, or
would unless it were slowed down less than any planned before it, is passed over. All figures
are modelled. Not modelled: the wait for a free slot, batches that change while they run, prompts of unlike
lengths, and arrivals in bursts, for which `margin` is kept free.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tessera.advise.offers import offers_of
from tessera.advise.records import Advice, Choice, Load, Market, Times, check, in_ms
from tessera.advise.sizes import Size
from tessera.capture import known_models, record_step
from tessera.errors import PlanInfeasible
from tessera.flow import make_unit
from tessera.ir import Cluster, Objective, Step, Trace
from tessera.plan import PlanConfig, solve
from tessera.plan.rent import Basket, baskets, phases_us
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


def advise(load: Load, market: Market, advance: Advance = lambda what: None) -> Advice:
    """The cheapest baskets that carry the load; PlanInfeasible says how far the best falls short."""
    check(load, market)
    for name in market.gpus or ():
        gpu(name)  # a name that nobody knows is told before anything is recorded
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
        sizes.append(Size(batch, unit, tuple(estimate(g.trace, devices) for g in unit.graphs)))
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
    # The smallest multiple of its shortest time that a basket has taken.
    slowed: float = math.inf

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
    def has_learned(self) -> bool:
        """What does not fit teaches nothing."""
        return self.num_planned >= NUM_LEARNED and self.reached > 0

    @property
    def hope(self) -> float:
        """The share of its limit that a basket may be hoped to reach."""
        return min(1.0, CHANCE * self.reached) if self.has_learned else 1.0

    @property
    def slowness(self) -> float:
        """The multiple of its shortest time that a basket may be hoped to take."""
        has_learned = self.has_learned and self.slowed < math.inf
        return max(1.0, self.slowed / CHANCE) if has_learned else 1.0


def _search(load: Load, market: Market, sizes: list[Size], listed: list[Basket], advance: Advance) -> _Found:
    """Baskets that carry the load, cheapest first."""
    found = _Found([])
    for basket in listed:
        for limit, size in _promising(load, market, sizes, basket, found):
            if found.is_over:
                return found
            advance(f"planning {basket} at batch {size.batch}")
            found.num_planned += 1
            choice = _plan(load, market, size, basket)
            if choice is None:
                continue
            found.reached = max(found.reached, choice.capacity_per_s / limit)
            least = load.excess(size.least_ms(load, basket, market))
            if least and len(basket.gpus) > 1:  # one GPU meets its shortest time, and says nothing of several
                found.slowed = min(found.slowed, load.excess(choice.times_ms) / least)
            if choice.capacity_per_s >= load.needed_per_s and load.is_kept(choice.times_ms):
                found.choices.append(choice)
                break
            found.near = max(found.near or choice, choice, key=lambda one: _nearness(load, one))
    return found


def _nearness(load: Load, choice: Choice) -> tuple[bool, float]:
    """Larger is nearer: the rate comes first, then the latency."""
    if choice.capacity_per_s < load.needed_per_s:
        return False, choice.capacity_per_s
    return True, -load.excess(choice.times_ms)


def _promising(
    load: Load, market: Market, sizes: list[Size], basket: Basket, found: _Found
) -> list[tuple[float, Size]]:
    """(limit in requests per second, batch) at which the basket may carry the load, smallest batch first."""
    memory = sum(gpu(name).memory_bytes for name in basket.gpus) * market.memory_share
    rated, sure = [], []
    for size in sorted(sizes, key=lambda x: x.batch):
        if size.needs_bytes(market.slots) > memory:
            continue
        if size.batch * size.limit.hope_per_s(basket.gpus) < load.needed_per_s:
            continue
        limit = size.batch * size.limit.per_s(basket.gpus)
        is_sure = size.is_sure(load, basket, market)
        if is_sure or (found.may_try and _is_hopeful(load, market, size, basket, limit, found)):
            rated.append((limit, size))
            sure += [len(rated)] if is_sure else []
    if sure:  # no larger one is needed
        return rated[: sure[0]]
    if load.has_objective:  # the larger batches may keep what the smaller ones do not
        return rated
    best = sorted(rated, key=lambda x: -x[0])[:MAX_BATCHES]
    return sorted(best, key=lambda x: x[1].batch)


def _is_hopeful(load: Load, market: Market, size: Size, basket: Basket, limit: float, found: _Found) -> bool:
    """Would the basket carry the load if it came a little nearer to its limits than any before it?"""
    if limit * found.hope < load.needed_per_s:
        return False
    return load.excess(size.least_ms(load, basket, market)) * found.slowness <= 1.0


def _plan(load: Load, market: Market, size: Size, basket: Basket) -> Choice | None:
    """The basket's plan at one batch; None if it does not fit."""
    cluster = _cluster(basket, market)
    config = PlanConfig(Objective.THROUGHPUT, market.slots, policy="quick", shown_slots=())
    try:
        made = solve(size.unit, size.on(cluster), cluster, config, SteadyRates())
    except PlanInfeasible:
        return None
    capacity = size.batch * made.simulated_per_s
    phases = phases_us(made)
    full = max(1.0, market.slots * 1e6 / made.simulated_per_s / made.latency_us)
    stretch = load.stretch(capacity, full)
    ttft = tpot = None
    if "prefill" in phases:
        ttft = size.filling_ms(load) + stretch * phases["prefill"] / 1e3
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


def _shortfall(
    load: Load, market: Market, sizes: list[Size], listed: list[Basket], found: _Found
) -> PlanInfeasible:
    """Which constraint, and by how much."""
    near, needed = found.near, load.needed_per_s
    what = f"no set of up to {market.max_devices} of these GPUs carries {needed:.4g} requests/s"
    remedy = "Raise --max-devices, or lower the rate or the margin."
    if not found.may_try:
        what = (
            f"none of {found.num_planned} plans, of the cheapest sets first, carries {needed:.4g} requests/s"
        )
        remedy = "Name fewer or larger GPUs with --gpus."
    least = min(size.needs_bytes(market.slots) for size in sizes)
    most = max(sum(gpu(n).memory_bytes for n in b.gpus) for b in listed) * market.memory_share
    if least > most:
        have = f"the largest set has {most / 1e9:.3g} GB that may be filled"
        memory = f"the model needs {least / 1e9:.3g} GB at the smallest batch; {have}"
        return PlanInfeasible(memory, "Raise --max-devices, allow larger GPUs, or lower --slots.")
    if near is not None and near.capacity_per_s >= needed:
        times = f"{_times(near.times_ms)}, at batch {near.batch}"
        slow = f"{near.basket} does with {times}"
        return PlanInfeasible(f"{what} within the latency asked for; {slow}", f"Loosen it, or: {remedy}")
    if near is not None:
        return PlanInfeasible(f"{what}: {near.basket} carries {near.capacity_per_s:.4g}", remedy)
    if found.num_planned:
        what = f"none of {found.num_planned} plans, of the cheapest sets first, fits into the memory"
        return PlanInfeasible(what, "Name fewer or larger GPUs with --gpus, or smaller --batches.")
    limit, basket = max((s.batch * s.limit.hope_per_s(b.gpus), str(b)) for s in sizes for b in listed[-64:])
    if limit >= needed:
        return _too_slow(load, market, what, sizes, listed)
    return PlanInfeasible(f"{what}: even with free transfers {basket} carries {limit:.4g}", remedy)


def _too_slow(
    load: Load, market: Market, what: str, sizes: list[Size], listed: list[Basket]
) -> PlanInfeasible:
    """No set was worth planning, for its latency: the fastest, and what it takes at least."""
    timed = [(s.least_ms(load, b, market), b) for s in sizes for b in listed]
    remedy = "Loosen it, raise --max-devices, or name larger GPUs with --gpus or smaller --batches."
    times, basket = min(timed, key=lambda x: load.excess(x[0]))
    slow = f"{basket} takes {_times(times)} for one batch alone, even with free transfers"
    return PlanInfeasible(f"{what} within the latency asked for; {slow}", remedy)


def _times(times_ms: Times) -> str:
    first, each = ("n/a" if ms is None else in_ms(ms) for ms in times_ms)
    return f"{first} to the first token and {each} a token"
