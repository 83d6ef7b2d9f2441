"""Raters: what a set of cards gives for a load, drafted in milliseconds or planned in seconds.

`ServiceRater` plans the service that carries the load. `StepRater` plans images and models whose state is
kept by row, as steps at the best batch; it drafts copies of the model alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tessera.advise.records import Market, RentedLoad
from tessera.capture.models import steps_of_model
from tessera.errors import CaptureError
from tessera.flow import ANCHORS, LoadSteps, at_batches, batch_search, choose_launches, plan_steps
from tessera.ir import Cluster, Load, Objective, Plan, ServicePlan, Step, Trace
from tessera.plan import QUICK, Comparison, Option, PlanConfig, Target
from tessera.plan.batches import BATCHES, BatchSearch
from tessera.plan.fluid import DATA_PARALLEL, FLUID, POLICIES, QUICK_FLUID, SINGLE, FluidModel
from tessera.plan.rent import Limit
from tessera.plan.service import compared, draft_option
from tessera.planning import ServedSteps, make_service_plan
from tessera.profile import estimate
from tessera.serve.rehearse import rehearse

Advance = Callable[[str], None]

# Memory of a card in bounds: a set divides the model.
UNLIMITED = 1 << 50
# Share of the best draft from which a policy is planned.
WORTH = 0.9
# Policies that are always planned, so that others have something to be compared with.
COPIES = (SINGLE, DATA_PARALLEL)


class Rater(Protocol):
    @property
    def is_compiled(self) -> bool: ...

    @property
    def note(self) -> str:
        """Why launches are not compiled."""

    @property
    def trace(self) -> Trace:
        """A step of the model."""

    def limit(self, cards: Cluster) -> Limit:
        """Bounds of sets of these cards, one of each kind."""

    def drafts(self, cluster: Cluster, within_ms: float | None = None) -> list[Option]:
        """The best draft of every policy; within another time per token."""

    def fastest(self, cluster: Cluster) -> Option | None:
        """The draft with the least time per token."""

    def plan(self, cluster: Cluster) -> tuple[ServicePlan | Plan, Comparison]: ...


def rater_of(load: RentedLoad, market: Market, cards: Cluster, advance: Advance) -> Rater:
    if not load.is_image:
        try:
            return ServiceRater.of(load, market, cards, advance)
        except CaptureError:  # state by row: no steps of mixed tokens
            pass
    return StepRater.of(load, market, advance)


@dataclass(frozen=True, eq=False)
class ServiceRater:
    load: Load
    market: Market
    steps: ServedSteps
    note: str

    @staticmethod
    def of(load: RentedLoad, market: Market, cards: Cluster, advance: Advance) -> "ServiceRater":
        steps = ServedSteps(load.model, cards, advance=advance)
        steps.is_compiled, note = choose_launches(steps.anchors, market.launches)
        _ = steps.family
        wanted = Load(load.prompt, load.output, tpot_ms=load.tpot_ms, ttft_ms=load.ttft_ms)
        return ServiceRater(wanted, market, steps, note)

    @property
    def is_compiled(self) -> bool:
        return self.steps.is_compiled

    @property
    def trace(self) -> Trace:
        return self.steps.family.recordings[0].trace

    def limit(self, cards: Cluster) -> Limit:
        roomy = tuple(replace(device, memory_bytes=UNLIMITED) for device in cards.devices)
        least = self._fluid(replace(cards, devices=roomy)).least_us
        return Limit({d.gpu: n for n, d in enumerate(cards.devices)}, least)

    def drafts(self, cluster: Cluster, within_ms: float | None = None) -> list[Option]:
        fluid = self._fluid(cluster)
        if within_ms is not None:
            fluid = replace(fluid, load=replace(self.load, tpot_ms=within_ms))
        drafts = (fluid.drafts(policy)[:1] for policy in POLICIES)
        return [draft_option(draft, cluster) for best in drafts for draft in best]

    def fastest(self, cluster: Cluster) -> Option | None:
        drafts = (self._fluid(cluster).fastest(policy) for policy in POLICIES)
        options = [draft_option(draft, cluster) for draft in drafts if draft is not None]
        return min(options, key=lambda o: (o.tpot_ms, o.ttft_ms), default=None)

    def plan(self, cluster: Cluster) -> tuple[ServicePlan, Comparison]:
        drafts = self.drafts(cluster)
        least = WORTH * max((o.tokens_per_s for o in drafts), default=0.0)
        names = [o.policy for o in drafts if o.tokens_per_s >= least or o.policy in COPIES]
        plan = make_service_plan(
            self.steps.on(cluster),
            self.load,
            rehearse,
            self.market.search,
            memory_share=self.market.memory_share,
            policies=names or POLICIES,
        )
        return plan, compared(plan)

    def _fluid(self, cluster: Cluster) -> FluidModel:
        config = QUICK_FLUID if self.market.search is QUICK else FLUID
        config = replace(config, memory_share=self.market.memory_share)
        steps = self.steps.on(cluster)
        return FluidModel(self.load, cluster, steps.price, steps.model_bytes, config)


@dataclass(frozen=True, eq=False)
class StepRater:
    target: Target
    market: Market
    recorded: LoadSteps
    note: str
    advance: Advance

    @staticmethod
    def of(load: RentedLoad, market: Market, advance: Advance) -> "StepRater":
        steps, counts = _steps_of(load)
        is_compiled, note = choose_launches(at_batches(steps, ANCHORS), market.launches)
        recorded = LoadSteps(steps, counts, ANCHORS, advance, is_compiled)
        return StepRater(Target(load.tokens, load.tpot_ms, load.ttft_ms), market, recorded, note, advance)

    @property
    def is_compiled(self) -> bool:
        return self.recorded.is_compiled

    @property
    def trace(self) -> Trace:
        return self.recorded.at(ANCHORS[0]).graphs[0].trace

    def limit(self, cards: Cluster) -> Limit:
        return Limit({d.gpu: n for n, d in enumerate(cards.devices)}, self._least_us(cards))

    def _least_us(self, cards: Cluster) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
        """[launch, card]: least time of a row over all batches."""
        rows = []
        for batch in BATCHES:
            unit = self.recorded.at(batch)
            costs = [estimate(graph.trace, cards.devices) for graph in unit.graphs]
            us = [
                np.array([[cost.us for cost in row] for row in priced.costs]) * (count / batch)
                for priced, count in zip(costs, unit.counts, strict=True)
            ]
            rows.append(np.concatenate(us))
        return np.asarray(np.min(rows, axis=0), dtype=np.float64)

    def drafts(self, cluster: Cluster, within_ms: float | None = None) -> list[Option]:
        target = replace(self.target, tpot_ms=within_ms or self.target.tpot_ms)
        copies = self._search(cluster, target).copies(BATCHES)
        if copies or within_ms is not None:
            return copies
        found = self.plan(cluster)[1]  # too large for one card
        return [*found.baselines, found.chosen]

    def fastest(self, cluster: Cluster) -> Option | None:
        copies = self._search(cluster, replace(self.target, tpot_ms=None, ttft_ms=None)).copies(BATCHES[:1])
        return min(copies, key=lambda o: (o.tpot_ms, o.ttft_ms), default=None)

    def plan(self, cluster: Cluster) -> tuple[Plan, Comparison]:
        return plan_steps(self.recorded, cluster, self.target, self._config, advance=self.advance)

    @property
    def _config(self) -> PlanConfig:
        market = self.market
        return PlanConfig(Objective.THROUGHPUT, search=market.search, memory_share=market.memory_share)

    def _search(self, cluster: Cluster, target: Target) -> BatchSearch:
        return batch_search(self.recorded, cluster, target, self._config)


def _steps_of(load: RentedLoad) -> tuple[Sequence[Step], Sequence[int]]:
    """The steps of one request at any batch, and how often each runs."""
    if load.is_image:
        return [Step(load.model, steps_of_model(load.model)[0], 1, load.prompt)], [load.output]
    prefill = Step(load.model, "prefill", 1, load.prompt, 0, load.output)
    return [prefill, Step(load.model, "decode", 1, load.prompt + load.output)], [1, load.output]
