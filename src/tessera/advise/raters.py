"""Raters: what a set of cards gives for a load, drafted in milliseconds or planned in seconds.

`StepRater` plans models that no service runs in steps of tokens, at the best batch; its drafts are copies of
the whole model.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from tessera.advise.records import ModelLoad
from tessera.capture import place_of
from tessera.capture.models import steps_of_model
from tessera.errors import CaptureError
from tessera.flow import ANCHORS, LoadSteps, at_anchors, batch_search, choose_launches, plan_steps, price
from tessera.ir import Cluster, Load, Plan, ServicePlan, Step, Trace
from tessera.plan import Comparison, Option, PlanConfig
from tessera.plan.batches import BATCHES, BatchSearch
from tessera.plan.fluid import DATA_PARALLEL, POLICIES, SINGLE, FluidModel
from tessera.plan.rent import Limit
from tessera.plan.service import compared, draft_option
from tessera.planning import ServedSteps, is_served, make_service_plan
from tessera.serve.rehearse import rehearse

Advance = Callable[[str], None]

# Memory of a card in bounds: a set divides the model.
UNLIMITED = 1 << 50
# Always planned: others are compared with them.
COPIES = (SINGLE, DATA_PARALLEL)


def rater_of(demand: ModelLoad, cards: Cluster, advance: Advance) -> "Rater":
    """`cards` have all kinds of devices that are asked for later."""
    if demand.load.output_tokens and is_served(demand.model):
        with suppress(CaptureError):  # one token of each sequence a step
            return ServiceRater(demand, cards, advance)
    return StepRater(demand, advance)


class ServiceRater:
    def __init__(self, demand: ModelLoad, cards: Cluster, advance: Advance) -> None:
        self.demand = demand
        self.steps = ServedSteps(demand.model, cards, demand.random_weights, advance=advance)
        self.steps.frequencies = demand.frequencies
        self.is_compiled, self.note = choose_launches(self.steps.anchors, demand.launches)
        self.steps.is_compiled = self.is_compiled
        _ = self.steps.family

    @property
    def trace(self) -> Trace:
        """The last step of a request."""
        return self.steps.family.recordings[0].trace

    def limit(self, cards: Cluster) -> Limit:
        """Bounds of sets of these cards, one of each kind."""
        roomy = tuple(replace(device, memory_bytes=UNLIMITED) for device in cards.devices)
        least = self._fluid(replace(cards, devices=roomy)).least_us
        return Limit({d.gpu: n for n, d in enumerate(cards.devices)}, least)

    def drafts(self, cluster: Cluster, within_ms: float | None = None) -> list[Option]:
        """The best draft of every policy, within another time per token."""
        fluid = self._fluid(cluster)
        if within_ms is not None:
            fluid = replace(fluid, load=replace(fluid.load, tpot_ms=within_ms))
        drafts = (fluid.drafts(policy)[:1] for policy in POLICIES)
        return [draft_option(draft, cluster) for best in drafts for draft in best]

    def fastest(self, cluster: Cluster) -> Option | None:
        """The draft with the least time per token."""
        drafts = (self._fluid(cluster).nearest(policy) for policy in POLICIES)
        options = [draft_option(draft, cluster) for draft in drafts if draft is not None]
        return min(options, key=lambda o: (o.tpot_ms, o.ttft_ms), default=None)

    def plan(self, cluster: Cluster) -> tuple[ServicePlan, Comparison]:
        demand, steps = self.demand, self.steps.on(cluster)
        policies = self._worthwhile(cluster) if demand.worth else POLICIES
        plan = make_service_plan(
            steps, demand.load, rehearse, demand.search, demand.objective, demand.memory_share, policies
        )
        return plan, compared(plan, demand.objective)

    def _worthwhile(self, cluster: Cluster) -> Sequence[str]:
        drafts = self.drafts(cluster)
        least = self.demand.worth * max((o.tokens_per_s for o in drafts), default=0.0)
        return [o.policy for o in drafts if o.tokens_per_s >= least or o.policy in COPIES] or POLICIES

    def _fluid(self, cluster: Cluster) -> FluidModel:
        demand = self.demand
        return self.steps.on(cluster).fluid_model(demand.load, demand.search, demand.memory_share)


class StepRater:
    def __init__(self, demand: ModelLoad, advance: Advance) -> None:
        self.demand, self.advance = demand, advance
        steps = _steps_of(demand)
        is_image = steps[-1].kind != "decode"
        tokens = 1 if is_image else demand.load.output_tokens
        counts = [1] * (len(steps) - 1) + [demand.image_steps if is_image else max(1, tokens)]
        self.is_compiled, self.note = choose_launches(at_anchors(steps), demand.launches)
        self.recorded = LoadSteps(steps, counts, ANCHORS, advance, self.is_compiled)
        self.load = replace(demand.load, output_tokens=tokens)

    @property
    def trace(self) -> Trace:
        return self.recorded.at(ANCHORS[0]).graphs[-1].trace

    def limit(self, cards: Cluster) -> Limit:
        """By the least time of a row over all batches."""
        rows = []
        for batch in BATCHES:
            unit = self.recorded.at(batch)
            us = [
                np.array([[cost.us for cost in row] for row in priced.costs]) * (count / batch)
                for priced, count in zip(price(unit, cards), unit.counts, strict=True)
            ]
            rows.append(np.concatenate(us))
        return Limit({d.gpu: n for n, d in enumerate(cards.devices)}, np.min(rows, axis=0))

    def drafts(self, cluster: Cluster, within_ms: float | None = None) -> list[Option]:
        load = replace(self.load, tpot_ms=within_ms or self.load.tpot_ms)
        copies = self._search(cluster, load).copies(BATCHES)
        if copies or within_ms is not None:
            return copies
        comparison = self.plan(cluster)[1]  # too large for one card
        return [*comparison.baselines, comparison.chosen]

    def fastest(self, cluster: Cluster) -> Option | None:
        copies = self._search(cluster, replace(self.load, tpot_ms=None, ttft_ms=None)).copies(BATCHES[:1])
        return min(copies, key=lambda o: (o.tpot_ms, o.ttft_ms), default=None)

    def plan(self, cluster: Cluster) -> tuple[Plan, Comparison]:
        batches = (self.demand.batch,) if self.demand.batch else BATCHES
        depths = (self.demand.microbatches,) if self.demand.microbatches else ()
        return plan_steps(self.recorded, cluster, self.load, self._config, batches, depths, self.advance)

    @property
    def _config(self) -> PlanConfig:
        demand = self.demand
        return PlanConfig(demand.objective, search=demand.search, memory_share=demand.memory_share)

    def _search(self, cluster: Cluster, load: Load) -> BatchSearch:
        return batch_search(self.recorded, cluster, load, self._config)


Rater = ServiceRater | StepRater


def _steps_of(demand: ModelLoad) -> list[Step]:
    kinds, load = steps_of_model(demand.model), demand.load
    any_step = Step(place_of(demand.model), kinds[0], 1, load.prompt_tokens, 0, 0, demand.random_weights)
    if "decode" not in kinds:
        return [any_step]
    decode = replace(any_step, kind="decode", context=load.prompt_tokens + load.output_tokens)
    if not load.output_tokens or "prefill" not in kinds:
        return [decode]
    return [replace(any_step, kind="prefill", reserve=load.output_tokens), decode]
