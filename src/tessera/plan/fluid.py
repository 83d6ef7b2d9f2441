"""FluidModel: drafts of a service for a load, rated by step times alone, without queues.

A request reads P prompt tokens, then takes A = G - 1 steps for its other answer tokens. A mixed device with
full steps of T tokens finishes T / (P + A) requests per step: n = T A / (P + A) answers and T - n prompt
tokens. With prompts devices, the mixed devices read prompt tokens in a share of their steps, such that as
many prompts are read as answers end. Few sequences answer in nearly all steps: a prompt is read in some large
ones as soon as a sequence has ended. Time per token is the mean step time of the slowest group.

`bound_per_s` bounds every policy: launches are divided among the devices at will, each at its cheapest step
size, without transfers. A lane over several devices holds pages where their layers or all attention run,
whichever is faster. Not modelled: waits inside a lane (`waits` stands for them), padding, lengths other than
their mean.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain, permutations, product

import numpy as np

from tessera.ir import MEMORY_SHARE, Cluster, Load, Role
from tessera.kernels import PAGE
from tessera.plan.arrays import Floats
from tessera.plan.host import FETCH
from tessera.plan.problem import cells_of, spread_us

# With one device per group; with a lane over all devices.
SINGLE, DATA_PARALLEL = "single", "data-parallel"
PREFILL_DECODE, FRACTIONAL = "prefill-decode", "prefill-decode-fractional"
LAYER_PIPELINE, ATTENTION_FFN = "layer-pipeline", "attention-ffn"
DIVIDED = (LAYER_PIPELINE, ATTENTION_FFN, "kernel-level")
# Within 0.01 % of the optimum on up to four devices.
BOUND_ROUNDS = 400
# Tokens of the smallest step.
TILE = 8
POLICIES = (SINGLE, DATA_PARALLEL, PREFILL_DECODE, FRACTIONAL, *DIVIDED)


@dataclass(frozen=True, slots=True)
class FluidConfig:
    # Tokens of a step; sizes per doubling.
    least_tokens: int = 32
    most_tokens: int = 8192
    per_doubling: int = 6
    most_sequences: int = 1024
    prompt_tokens: tuple[int, ...] = (512, 1024, 2048, 4096)
    # Least prompt tokens of a mixed step beside a prompts group.
    chunks: tuple[int, ...] = (16, 80, 144, 272, 528)
    # Prompts held by a prompts group per prompt of a step.
    backlog: float = 2.0
    # Steps in which a somewhat longer prompt is read as soon as a sequence has ended.
    reading_steps: tuple[int, ...] = (1, 2, 4)
    longer: float = 1.1
    few_sequences: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    # Sequences beyond those that answer, to fill mixed steps.
    waiting_share: float = 0.12
    waiting: int = 2
    # Steps in which a request that gives no answer token has a row: read, and until its row is given on.
    other_steps: int = 3
    memory_share: float = MEMORY_SHARE
    # Twice the relative standard deviation of a sequence's tokens.
    spread: float = 0.7
    # Share of time that devices of a lane wait; share that devices beside a host compute.
    waits: float = 0.1
    efficiency: float = 0.8
    # With captured steps: microbatches of a prompts group (one reads, one settles); least of a lane.
    prompt_microbatches: int = 2
    least_microbatches: int = 2
    num_rehearsed: int = 4
    num_drafts: int = 3
    # Smaller prompt steps are preferred within this share of the rate.
    prompt_gain: float = 0.02


FLUID = FluidConfig()
QUICK_FLUID = FluidConfig(per_doubling=2, most_sequences=128, num_drafts=1, num_rehearsed=1)


@dataclass(frozen=True, slots=True)
class StepPrice:
    # [kind of launch, device].
    us: Floats
    temporary_bytes: int

    def total_us(self, device: int) -> float:
        return float(self.us[:, device].sum())


# (tokens, sequences, mean length) -> price.
PriceStep = Callable[[int, int, int], StepPrice]


@dataclass(frozen=True, slots=True)
class ModelBytes:
    weights: int
    # Bytes of one token's pages in all layers.
    token: float
    # Attention window of each page table; 0: none.
    windows: tuple[int, ...] = (0,)
    # Kinds of launches in attention, where attention is apart.
    attention: tuple[bool, ...] = ()
    attention_weights: int = 0

    def held(self, tokens: int) -> int:
        """Positions in the pages of all tables."""
        return sum(min(tokens, window + PAGE) if window else tokens for window in self.windows)


@dataclass(frozen=True, slots=True)
class GroupDraft:
    role: Role
    devices: tuple[int, ...]
    sequences: int
    # Tokens of each step, ascending.
    sizes: tuple[int, ...]
    microbatches: int
    # With the unused page 0.
    pool_tokens: int
    length: int


@dataclass(frozen=True, slots=True)
class ServiceDraft:
    policy: str
    groups: tuple[GroupDraft, ...]
    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float

    @property
    def pool_tokens(self) -> int:
        return sum(group.pool_tokens for group in self.groups)

    @property
    def depth(self) -> tuple[int, int]:
        """(groups, microbatches)."""
        return len(self.groups), sum(group.microbatches for group in self.groups)


@dataclass(frozen=True, slots=True)
class StepMix:
    """Steps of a mixed group: some with prompt tokens, the others without."""

    group: GroupDraft
    # A mean step, and one with prompt tokens.
    price: StepPrice
    full: StepPrice
    # Requests that end per step.
    requests: float
    # Steps in which a prompt is read.
    reading_steps: int

    @property
    def slower(self) -> float:
        """Time of a step with prompt tokens over that of a mean step."""
        full, mean = (price.us[:, self.group.devices].sum() for price in (self.full, self.price))
        return float(full / mean)


# Size -> steps; sizes there are, by rounding; sizes that are always tried.
Way = tuple[Callable[[int], StepMix | None], Callable[[int], int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Seat:
    """Step times of a device at one size, without and with prompt tokens."""

    group: GroupDraft
    plain_us: float
    mixed_us: float
    chunk: int

    def step_us(self, share: float) -> float:
        return (1.0 - share) * self.plain_us + share * self.mixed_us


@dataclass(frozen=True, eq=False)
class FluidModel:
    load: Load
    cluster: Cluster
    price: PriceStep
    model: ModelBytes
    config: FluidConfig = FLUID
    # False: sequences stay on their device.
    can_move: bool = True
    # Empty: all.
    devices: tuple[int, ...] = ()
    runs_on_cpu: bool = True
    # True: drafts and plans that miss a limit are left out.
    is_strict: bool = True

    @property
    def answers(self) -> int:
        """Steps after the first token."""
        return max(0, self.load.output_tokens - 1)

    @property
    def length(self) -> int:
        return self.load.prompt_tokens + max(1, self.load.output_tokens // 2)

    def room_tokens(self, device: int) -> int:
        """Positions that fit beside the weights."""
        room = self.config.memory_share * self.cluster.devices[device].memory_bytes - self.model.weights
        return int(room / self.model.token) if self.model.token else 1 << 24

    def pool_tokens(self, sequences: int, length: int) -> int:
        """Pages for sequences of varying length, growth by a page, and page 0; in tokens."""
        margin = 1.0 + self.config.spread / math.sqrt(sequences)
        longest = 2 * (self.load.prompt_tokens + self.load.output_tokens) * len(self.model.windows)
        reading = self.load.prompt_tokens * sum(window > 0 for window in self.model.windows)
        held = sequences * self.model.held(length + PAGE) * margin + reading
        return _pages(max(held, longest)) * PAGE + PAGE

    def fits(self, device: int, pool_tokens: int, price: StepPrice) -> bool:
        return self.needed(pool_tokens, price) <= self.cluster.devices[device].memory_bytes

    def needed(self, pool_tokens: int, price: StepPrice) -> float:
        """Memory of a device that holds the model, for one microbatch."""
        held = self.model.weights + pool_tokens * self.model.token
        return max(held / self.config.memory_share, held + price.temporary_bytes)

    @property
    def least_bytes(self) -> float:
        """Memory of one device for the smallest service."""
        mixes = [self._steady((0,), 1, TILE)]
        mixes += [self._reading((0,), 1, steps, 1) for steps in self.config.reading_steps if self.answers]
        return min(self.needed(mix.group.pool_tokens, mix.price) for mix in mixes if mix is not None)

    @cached_property
    def used(self) -> tuple[int, ...]:
        return self.devices or tuple(range(len(self.cluster.devices)))

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        by_kind: dict[object, list[int]] = {}
        for number in self.used:
            device = self.cluster.devices[number]
            kind = (device.gpu, device.memory_bytes, device.kind, device.num_sms, device.usd_per_hour)
            by_kind.setdefault(kind, []).append(number)
        return tuple(tuple(numbers) for numbers in by_kind.values())

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Devices that hold the model, by kind."""
        held = [kind for kind in self.alike if self.room_tokens(kind[0]) > 2 * self.model.held(self.length)]
        return tuple(k for k in held if self.runs_on_cpu or not self.cluster.devices[k[0]].is_cpu)

    @cached_property
    def step_tokens(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(_rounded(size) for size in self._sizes(self.config.per_doubling)))

    @cached_property
    def sequence_counts(self) -> tuple[int, ...]:
        sizes = self._sizes(2 * self.config.per_doubling)
        return tuple(dict.fromkeys((*self.config.few_sequences, *map(_even, sizes))))

    def _sizes(self, per_doubling: int) -> list[float]:
        least, most = self.config.least_tokens, self.config.most_tokens
        num = int(per_doubling * math.log2(most / least))
        return [least * 2 ** (n / per_doubling) for n in range(num + 1)]

    def depths(self, policy: str) -> list[tuple[int, int]]:
        drafts = sorted(self._drafts(policy), key=lambda d: -d.tokens_per_s)
        return list(dict.fromkeys(draft.depth for draft in drafts))

    def drafts(
        self,
        policy: str,
        slack: float = 1.0,
        pool_tokens: float = math.inf,
        depth: tuple[int, int] | None = None,
    ) -> list[ServiceDraft]:
        """Drafts within the limits times `slack` and with smaller pools, best first."""
        kept = [d for d in self._drafts(policy) if depth in (None, d.depth)]
        if self.is_strict:
            kept = [d for d in kept if d.pool_tokens < pool_tokens and self.excess(d) <= slack]
        return sorted(kept, key=lambda d: -d.tokens_per_s)[: self.config.num_drafts]

    def nearest(self, policy: str) -> ServiceDraft | None:
        """To the limits; without limits, the one with the least time per token."""
        return min(self._drafts(policy), key=lambda d: (self.excess(d), d.tpot_ms, d.ttft_ms), default=None)

    def excess(self, draft: ServiceDraft) -> float:
        # An answer of one token has no time per token.
        return self.load.excess(draft.tpot_ms if self.answers else 0.0, draft.ttft_ms)

    def _drafts(self, policy: str) -> list[ServiceDraft]:
        if policy not in self._by_policy:
            make = {
                SINGLE: self._replicas, DATA_PARALLEL: self._replicas,
                PREFILL_DECODE: self._split, FRACTIONAL: self._split,
            }.get(policy, self._divided)  # fmt: skip
            self._by_policy[policy] = list(make(policy))
        return self._by_policy[policy]

    @cached_property
    def _by_policy(self) -> dict[str, list[ServiceDraft]]:
        return {}

    def _mixed(self, devices: tuple[int, ...], tokens: int, microbatches: int = 1) -> GroupDraft:
        """Every step has prompt tokens."""
        answering = self._answering(tokens)
        reading = self.config.other_steps * (tokens - answering) / self.load.prompt_tokens
        waiting = self.config.waiting + max(self.config.waiting_share * answering, reading)
        sequences = max(2, min(tokens, _even(answering + waiting)))
        sizes = (sequences, tokens) if tokens > sequences else (tokens,)
        pool = self.pool_tokens(sequences * microbatches, self.length)
        return GroupDraft(Role.MIXED, devices, sequences, sizes, microbatches, pool, self.length)

    def _answering(self, tokens: int) -> float:
        return tokens * self.answers / (self.answers + self.load.prompt_tokens)

    def _timed(self, policy: str, mix: StepMix, step_us: float) -> ServiceDraft:
        microbatches = mix.group.microbatches
        tpot_ms = 1e-3 * microbatches * step_us
        ttft_ms = tpot_ms * (0.5 + mix.reading_steps * mix.slower)
        return self._draft(policy, [mix.group], mix.requests * 1e6 / step_us, tpot_ms, ttft_ms)

    def _alone(self, device: int, policy: str) -> Iterator[ServiceDraft]:
        def draft(mix: StepMix) -> ServiceDraft | None:
            if not self.fits(device, mix.group.pool_tokens, mix.price):
                return None
            return self._timed(policy, mix, mix.price.total_us(device))

        yield from self._drafted((device,), 1, draft)

    def _drafted(
        self, devices: tuple[int, ...], microbatches: int, draft: Callable[[StepMix], ServiceDraft | None]
    ) -> Iterator[ServiceDraft]:
        """Drafts by tokens of a step, and by sequences: of sizes that are always tried, and of the largest
        that fits. `draft` returns None for what does not fit.
        """
        ways: list[Way] = [(partial(self._steady, devices, microbatches), _rounded, self.step_tokens)]
        if self.answers:
            ways += [
                (partial(self._reading, devices, microbatches, steps), _even, self.sequence_counts)
                for steps in self.config.reading_steps
            ]
        for make, rounded, tried in ways:

            @cache
            def at(size: int, make: Callable[[int], StepMix | None] = make) -> ServiceDraft | None:
                mix = make(size)
                return None if mix is None else draft(mix)

            sizes = sorted({rounded(size) for size in range(1, self.config.most_tokens + 1)} - {0})
            num = bisect_left(sizes, True, key=lambda size: at(size) is None)
            found = map(at, sorted({*tried, *sizes[:num][-1:]}))
            yield from (fitting for fitting in found if fitting is not None)

    def _steady(self, devices: tuple[int, ...], microbatches: int, tokens: int) -> StepMix | None:
        group = self._mixed(devices, tokens, microbatches)
        requests = tokens / (self.answers + self.load.prompt_tokens)
        chunk = tokens - self._answering(tokens)
        return self._mix(group, requests, math.ceil(self.load.prompt_tokens / max(1.0, chunk)), 1.0)

    def _reading(
        self, devices: tuple[int, ...], microbatches: int, steps: int, sequences: int
    ) -> StepMix | None:
        """A prompt is read in so many steps as soon as a sequence has ended."""
        chunk = math.ceil(self.config.longer * self.load.prompt_tokens / steps)
        sizes = sequences, _rounded(sequences + chunk, math.ceil)
        pool = self.pool_tokens(sequences * microbatches, self.length)
        group = GroupDraft(Role.MIXED, devices, sequences, sizes, microbatches, pool, self.length)
        requests = min(1.0 / steps, sequences / (self.answers + steps + self.config.other_steps - 1))
        return self._mix(group, requests, steps, steps * requests)

    def _mix(self, group: GroupDraft, requests: float, reading_steps: int, share: float) -> StepMix | None:
        """`share`: of the steps, those with prompt tokens. None: a step is too large."""
        tokens, sequences = group.sizes[-1], group.sequences
        if sequences > self.config.most_sequences or tokens > self.config.most_tokens:
            return None
        full = self.price(tokens, sequences, group.length)
        # Microbatches on the devices of a lane wait for one another.
        share = 1.0 - (1.0 - min(1.0, share)) ** min(len(group.devices), group.microbatches)
        plain = self.price(sequences, sequences, group.length) if share < 1.0 else full
        us = share * full.us + (1.0 - share) * plain.us
        return StepMix(group, StepPrice(us, full.temporary_bytes), full, requests, reading_steps)

    def _replicas(self, policy: str) -> Iterator[ServiceDraft]:
        """A group per device: for each time per token of some device, the best groups within it."""
        alone = {kind: list(self._alone(kind[0], policy)) for kind in self.kinds}
        if policy == SINGLE:
            yield from chain(*alone.values())
            return
        each = {kind: _undominated(options) for kind, options in alone.items()}
        rows = list(chain(*each.values()))
        firsts = {math.inf} if self.load.ttft_ms is None else {row.ttft_ms for row in rows}
        for limit, first in product(sorted({row.tpot_ms for row in rows}), sorted(firsts)):
            pairs = [
                (max(within, key=lambda row: row.tokens_per_s), kind)
                for kind, options in each.items()
                if (within := [x for x in options if x.tpot_ms <= limit and x.ttft_ms <= first])
            ]
            if sum(len(kind) for _, kind in pairs) > 1:
                yield ServiceDraft(
                    policy,
                    tuple(replace(x.groups[0], devices=(device,)) for x, kind in pairs for device in kind),
                    sum(row.tokens_per_s * len(kind) for row, kind in pairs),
                    max(row.tpot_ms for row, _ in pairs),
                    max(row.ttft_ms for row, _ in pairs),
                )

    def _draft(
        self, policy: str, groups: Sequence[GroupDraft], per_s: float, tpot_ms: float, ttft_ms: float
    ) -> ServiceDraft:
        return ServiceDraft(policy, tuple(groups), per_s * self.load.output_tokens, tpot_ms, ttft_ms)

    def _split(self, policy: str) -> Iterator[ServiceDraft]:
        if not self.can_move or not self.answers or sum(map(len, self.kinds)) < 2:
            return
        most_ms = self.load.ttft_ms or math.inf
        seats = {kind: list(self._seats(kind[0], policy)) for kind in self.kinds}
        for counts in product(*(range(len(kind) + 1) for kind in self.kinds)):
            parts = list(zip(self.kinds, counts, strict=True))
            readers = [device for kind, num in parts for device in kind[:num]]
            rest = {kind: kind[num:] for kind, num in parts if num < len(kind)}
            groups = [group for device in readers if (group := self._prompts(device)) is not None]
            prompts = [group for group in groups if self._first_ms(*group) <= most_ms] or groups
            options = [seats[kind] for kind in rest] if prompts else []
            for chosen in _combinations(options, may_drop=self.load.tpot_ms is not None):
                pairs = zip(chosen, rest.values(), strict=True)
                yield self._balanced(policy, prompts, [(seat, on) for seat, on in pairs if seat])

    def _first_ms(self, group: GroupDraft, tokens_per_s: float) -> float:
        """A step that runs, and the prompts that wait or, if that is longer, its own."""
        tokens = group.sizes[-1]
        return 1e3 * (0.5 * tokens + max(self.config.backlog * tokens, group.length)) / tokens_per_s

    def _seats(self, device: int, policy: str) -> Iterator[Seat]:
        role = Role.ANSWERS if policy == PREFILL_DECODE else Role.MIXED
        least = self.config.least_tokens
        plain = self.price(least, least, self.length)
        # Few sequences vary more than a draft knows.
        fewest = least if self.fits(device, self.pool_tokens(least, self.length), plain) else 1
        for sequences in (num for num in self.sequence_counts if num >= fewest):
            pool = self.pool_tokens(sequences, self.length)
            plain = self.price(sequences, sequences, self.length)
            if sequences > self.config.most_sequences or not self.fits(device, pool, plain):
                break
            plain_us = plain.total_us(device)
            if role is Role.ANSWERS:
                group = GroupDraft(role, (device,), sequences, (sequences,), 1, pool, self.length)
                yield Seat(group, plain_us, plain_us, 0)
                continue
            for chunk in self.config.chunks:
                tokens = _rounded(sequences + chunk, math.floor)
                if tokens <= sequences:
                    continue
                mixed = self.price(tokens, sequences, self.length)
                if self.fits(device, pool, mixed):
                    group = GroupDraft(role, (device,), sequences, (sequences, tokens), 1, pool, self.length)
                    yield Seat(group, plain_us, mixed.total_us(device), tokens - sequences)

    def _prompts(self, device: int) -> tuple[GroupDraft, float] | None:
        """A group and its prompt tokens per second; None: no group fits."""
        options: list[tuple[GroupDraft, float]] = []
        for tokens in self.config.prompt_tokens:
            sequences = math.ceil(2.0 * self.config.backlog * tokens / self.load.prompt_tokens) + 4
            pool = self.pool_tokens(sequences, self.load.prompt_tokens)
            price = self.price(tokens, min(tokens, sequences), self.load.prompt_tokens)
            sizes = (max(tokens, sequences),)
            group = GroupDraft(Role.PROMPTS, (device,), sequences, sizes, 1, pool, self.load.prompt_tokens)
            option = group, 1e6 * tokens / price.total_us(device)
            is_late = self._first_ms(*option) > (self.load.ttft_ms or math.inf)
            if (options and is_late) or not self.fits(device, pool, price):
                break
            options.append(option)
        least = (1.0 - self.config.prompt_gain) * max((rate for _, rate in options), default=0.0)
        return next((option for option in options if option[1] >= least), None)

    def _balanced(
        self,
        policy: str,
        prompts: Sequence[tuple[GroupDraft, float]],
        chosen: Sequence[tuple[Seat, tuple[int, ...]]],
    ) -> ServiceDraft:
        reading = sum(rate for _, rate in prompts)
        held = sum(self.config.backlog * group.sizes[-1] for group, _ in prompts)
        in_flight = held / self.load.prompt_tokens
        seats = sum(seat.group.sequences * len(on) for seat, on in chosen)
        filled = max(0.1, 1.0 - in_flight / seats)

        def rates(share: float) -> tuple[float, float]:
            read, answered = reading, 0.0
            for seat, on in chosen:
                steps_per_s = len(on) * 1e6 / seat.step_us(share)
                read += share * self._read(seat.chunk) * steps_per_s
                answered += filled * seat.group.sequences * steps_per_s
            return read / self.load.prompt_tokens, answered / self.answers

        low = 0.0
        high = 1.0 if any(seat.chunk for seat, _ in chosen) else 0.0
        for _ in range(20 if high else 0):
            middle = (low + high) / 2
            read, answered = rates(middle)
            low, high = (middle, high) if read < answered else (low, middle)
        per_s = min(rates(high))
        tpot_ms = max(seat.step_us(high) for seat, _ in chosen) * 1e-3
        ttft_ms = max(self._first_ms(*group) for group in prompts)
        groups = [group for group, _ in prompts]
        groups += [replace(seat.group, devices=(device,)) for seat, on in chosen for device in on]
        return self._draft(policy, groups, per_s, tpot_ms, ttft_ms)

    def _read(self, chunk: int) -> float:
        """Mean prompt tokens of a chunk: the last one of a prompt is not full."""
        return chunk * self.load.prompt_tokens / (self.load.prompt_tokens + chunk / 2)

    def _divided(self, policy: str) -> Iterator[ServiceDraft]:
        """Lanes over all devices, and over equal cells of them."""
        most = 1 if self.has_host else math.gcd(*map(len, self.alike))
        for copies in sorted({1, most}):
            cells = cells_of(self.alike, copies) if copies > 1 else (self.used,)
            for draft in replace(self, devices=cells[0])._lanes(policy):
                groups = tuple(replace(draft.groups[0], devices=cell) for cell in cells)
                yield replace(draft, groups=groups, tokens_per_s=copies * draft.tokens_per_s)

    def _lanes(self, policy: str) -> Iterator[ServiceDraft]:
        def draft(mix: StepMix) -> ServiceDraft | None:
            times = (self._host_us if self.has_host else self._lane_us)(policy, mix.price, mix.group)
            step_us = min(times, default=None)
            return None if step_us is None else self._timed(policy, mix, step_us)

        num = len(self.used)
        # A host reads its weights again for every microbatch.
        for in_flight in (1, 2) if self.has_host else (num, num + 1, 2 * num) if num > 1 else ():
            yield from self._drafted(self.used, in_flight, draft)

    def _lane_us(self, policy: str, price: StepPrice, group: GroupDraft) -> Iterator[float]:
        model, num = self.model, len(self.used)
        memory = np.array([self.cluster.devices[d].memory_bytes for d in self.used])
        rooms = self.config.memory_share * memory - group.microbatches * price.temporary_bytes
        pages = group.pool_tokens * model.token
        us = price.us[:, list(self.used)]
        busy = 1.0 - self.config.waits * num / group.microbatches
        if policy != ATTENTION_FFN:
            yield from _filled_us(np.zeros(num), us.sum(axis=0), rooms / (model.weights + pages), busy)
        if policy == LAYER_PIPELINE or not any(model.attention):
            return
        inside = np.array(model.attention)
        attention, rest = us[inside].sum(axis=0), us[~inside].sum(axis=0)
        for at, other in permutations(range(num), 2):
            has_attention = np.arange(num) == at
            caps = (rooms - has_attention * (model.attention_weights + pages)) / (
                model.weights - model.attention_weights
            )
            if caps[at] >= 0.0:
                caps = caps * (np.arange(num) == other) if policy == ATTENTION_FFN else caps
                yield from _filled_us(has_attention * attention, rest, caps, busy)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        return tuple(d for d in self.used if self.cluster.devices[d].is_cpu)

    @property
    def has_host(self) -> bool:
        return 0 < len(self.hosts) < len(self.used)

    def _outside(self, needed: float) -> float | None:
        """Share of the weights that GPUs cannot hold; None: not even the `needed` bytes fit."""
        cards = (d for d in self.used if d not in self.hosts)
        held = self.config.memory_share * sum(self.cluster.devices[d].memory_bytes for d in cards) - needed
        return None if held < 0 else 1.0 - min(1.0, held / max(1, self.model.weights))

    @property
    def is_short(self) -> bool:
        return self.has_host and self._outside(0.0) != 0.0

    def _host_us(self, policy: str, price: StepPrice, group: GroupDraft) -> Iterator[float]:
        """GPUs hold the pages and run what they can hold; the host runs a share of the rest; GPUs fetch the
        others meanwhile.
        """
        in_flight = group.microbatches
        outside = self._outside(group.pool_tokens * self.model.token + in_flight * price.temporary_bytes)
        if outside is None:
            return
        cards = [d for d in self.used if d not in self.hosts]
        links = [self.cluster.link(self.hosts[0], card) for card in cards]
        link_us = outside * self.model.weights / sum(1.0 / x.fetch_us(1.0) for x in links if x is not None)
        for fetched in (1.0,) if policy == FETCH else np.linspace(0.0, 1.0, 9).tolist():
            host_share = outside * (1.0 - fetched)
            card_us = (1.0 - host_share) * together_us(price, cards)
            host_us = host_share * together_us(price, self.hosts)
            longer_us = max(card_us, host_us) / self.config.efficiency
            busy_us = card_us + host_us if in_flight == 1 else longer_us
            yield max(busy_us, fetched * link_us)

    @cached_property
    def bound_per_s(self) -> float:
        return self.load.output_tokens * 1e6 / spread_us(self.least_us, BOUND_ROUNDS)

    @cached_property
    def least_us(self) -> Floats:
        """[kind of launch, device] per request."""
        room = sum(max(0, self.room_tokens(d)) for d in self.used)
        if not self.kinds:
            held = self.config.memory_share * sum(self.cluster.devices[d].memory_bytes for d in self.used)
            room = int((held - self.model.weights) / self.model.token) if self.model.token else room
        rows: list[Floats] = []
        most = max(2, min(self.config.most_sequences, room // self.model.held(self.length)))
        prompt, answers = self.load.prompt_tokens, self.answers
        for tokens in (*self.step_tokens, *self.config.prompt_tokens):
            group = self._mixed((0,), tokens)
            if group.sequences <= most or not rows:
                price = self.price(tokens, group.sequences, group.length)
                rows.append(price.us * ((answers + prompt) / tokens))
        sequences = max(size for size in (2, *self.step_tokens) if size <= most)
        answering = self.price(sequences, sequences, self.length).us * (answers / sequences)
        for tokens in self.config.prompt_tokens:
            read = max(2, math.ceil(tokens / prompt))
            rows.append(answering + self.price(max(tokens, read), read, prompt).us * (prompt / tokens))
        return np.asarray(np.min(rows, axis=0)[:, list(self.used)])


def _undominated(drafts: Sequence[ServiceDraft]) -> list[ServiceDraft]:
    """Without those that another one excels in rate and both times."""
    kept: list[ServiceDraft] = []
    for draft in sorted(drafts, key=lambda d: -d.tokens_per_s):
        if all(draft.tpot_ms < better.tpot_ms or draft.ttft_ms < better.ttft_ms for better in kept):
            kept.append(draft)
    return kept


def together_us(price: StepPrice, devices: Sequence[int]) -> float:
    return 1.0 / sum(1.0 / price.total_us(d) for d in devices)


def _filled_us(fixed: Floats, us: Floats, caps: Floats, busy: float) -> Iterator[float]:
    """Least time for work divided at will over devices, each with `fixed` work, up to its cap and busy for a
    share `busy`; none if the caps are too small.
    """
    if caps.clip(0.0, 1.0).sum() < 1.0:
        return
    low, high = float(fixed.max()), float((fixed + us).max())
    for _ in range(30):
        middle = (low + high) / 2
        shares = np.minimum((middle - fixed) / us, caps).clip(0.0)
        low, high = (low, middle) if shares.sum() >= 1.0 else (middle, high)
    yield high / busy


def _combinations(seats: Sequence[Sequence[Seat]], may_drop: bool) -> Iterator[tuple[Seat | None, ...]]:
    """A seat per kind: for each limit of plain step time, those with the most sequences within it."""
    limits = sorted({seat.plain_us for options in seats for seat in options})
    seen: set[tuple[Seat | None, ...]] = set()
    for limit in limits:
        alike = []
        for options in seats:
            within = [seat for seat in options if seat.plain_us <= limit]
            most = within[-1].group.sequences if within else 0
            alike.append([seat for seat in within if seat.group.sequences == most])
        for number in range(max(map(len, alike))) if may_drop or all(alike) else ():
            chosen = tuple(options[min(number, len(options) - 1)] if options else None for options in alike)
            if chosen not in seen:
                seen.add(chosen)
                yield chosen


def _pages(tokens: float) -> int:
    return math.ceil(tokens / PAGE)


def _even(number: float) -> int:
    step = 8 if number >= 32 else 2 if number > TILE else 1
    return step * math.ceil(number / step)


def _rounded(tokens: float, how: Callable[[float], int] = round) -> int:
    """A multiple of the tiles in which products are computed."""
    step = 64 if tokens >= 128 else 16 if tokens >= 32 else TILE
    return step * how(tokens / step)
