"""Which GPUs can be rented for a model, and why the others cannot.

Size: the work at one batch, priced on one device of each GPU, and what each GPU makes of it by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tessera.advise.records import Load, Market, Times
from tessera.errors import PlanInfeasible, TesseraError
from tessera.ir import Cluster, Costs, Trace, WorkUnit
from tessera.plan.rent import Limit, Offer, alone_bytes, limit_of
from tessera.profile import Gpu, gpu, known_gpus, make_cluster


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
            device.gpu: [sum(row[place].us for row in listed.costs) for listed in self.costs]
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
