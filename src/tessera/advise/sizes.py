"""Size: the work at one batch, priced on one device of each GPU, and what is known of it before planning."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tessera.advise.records import Load, Market, Times
from tessera.ir import BufferKind, Cluster, Costs, WorkUnit
from tessera.plan.rent import Basket, Limit, limit_of, shortest_us
from tessera.profile import gpu


@dataclass(frozen=True, eq=False)
class Size:
    """The work at one batch."""

    batch: int
    unit: WorkUnit
    costs: tuple[Costs, ...]
    # (kinds of GPU, how many devices) -> kind of step -> its shortest time.
    _floors: dict[tuple[frozenset[str], int], dict[str, float]] = field(default_factory=dict)

    @cached_property
    def limit(self) -> Limit:
        """What no placement can exceed."""
        return limit_of(self.unit, self.costs)

    @cached_property
    def weight_bytes(self) -> int:
        """Of all weights."""
        return _total(self.unit, BufferKind.WEIGHT)

    @cached_property
    def state_bytes(self) -> int:
        """Of one batch in flight."""
        return _total(self.unit, BufferKind.STATE)

    def needs_bytes(self, slots: int) -> int:
        """Weights, and the state of so many batches."""
        return self.weight_bytes + slots * self.state_bytes

    def apart_per_s(self, gpus: Sequence[str], market: Market) -> float:
        """Requests per second of the GPUs that can, each doing whole batches of its own."""
        return self.batch * sum(self.limit.per_s((g,)) for g in self._able(gpus, market))

    def _able(self, gpus: Sequence[str], market: Market) -> list[str]:
        """The GPUs that hold the model, each with its part of the batches in flight."""
        need = self.needs_bytes(_each(market, gpus))
        return [g for g in gpus if need <= gpu(g).memory_bytes * market.memory_share]

    def is_sure(self, load: Load, basket: Basket, market: Market) -> bool:
        """True if the GPUs carry the load without dividing a request, and each keeps the objectives."""
        apart = self.apart_per_s(basket.gpus, market)
        if apart < load.needed_per_s or not load.has_objective:
            return apart >= load.needed_per_s
        stretch = load.stretch(apart, _each(market, basket.gpus))
        kinds = set(basket.gpus)
        return kinds == set(self._able(basket.gpus, market)) and all(
            load.is_kept(self._times_ms(load, frozenset((kind,)), 1, stretch)) for kind in kinds
        )

    def on(self, cluster: Cluster) -> tuple[Costs, ...]:
        """The prices of the devices of a cluster."""
        at = [self.limit.column_of[d.gpu] for d in cluster.devices]
        return tuple(
            Costs(c.trace_digest, cluster.devices, tuple(tuple(row[i] for i in at) for row in c.costs))
            for c in self.costs
        )

    def filling_ms(self, load: Load) -> float:
        """How long the first request of a batch waits for the last."""
        return (self.batch - 1) / load.rate_per_s * 1e3

    def least_ms(self, load: Load, basket: Basket, market: Market) -> Times:
        """(to the first token, a token after it) that no plan undercuts; None where there are no tokens."""
        num = len(basket.gpus)
        limit = self.batch * self.limit.per_s(basket.gpus)
        # Several GPUs may serve others beside a batch without slowing it.
        stretch = load.stretch(limit, market.slots) if num == 1 else 1.0
        return self._times_ms(load, frozenset(basket.gpus), num, stretch)

    def _times_ms(self, load: Load, kinds: frozenset[str], num: int, stretch: float) -> Times:
        if (kinds, num) not in self._floors:
            columns = [self.limit.column_of[name] for name in sorted(kinds)]
            self._floors[kinds, num] = {
                graph.trace.step.kind: shortest_us(graph, costs, columns, num)
                for graph, costs in zip(self.unit.graphs, self.costs, strict=True)
            }
        floors = self._floors[kinds, num]
        if "prefill" not in floors:
            return None, None
        first = self.filling_ms(load) + stretch * floors["prefill"] / 1e3
        return first, stretch * floors["decode"] / 1e3


def _each(market: Market, gpus: Sequence[str]) -> int:
    """Batches in flight on one of several GPUs that do not work together."""
    return -(-market.slots // len(gpus))


def _total(unit: WorkUnit, kind: BufferKind) -> int:
    sizes = {b.name: b.size_bytes for g in unit.graphs for b in g.trace.buffers if b.kind is kind}
    return sum(sizes.values())
