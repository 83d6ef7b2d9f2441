"""compare: all policies of one case, each at its own best configuration, by what `tessera plan MODEL` does.

Whole requests are planned as a service and rehearsed. Steps alone (prefills, decodes, denoising) and requests
of models with state by row are planned at their best batch. Of these, the single placement is the published
mixed-integer program (HiGHS, with bounded work), the latency policy the placement of the shortest makespan;
both are made at the points where the plan and the best coarse policy of one batch are, and judged as all
others are, within the same memory and the same limit of time.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.paper.library import Library
from benchmarks.paper.records import Case, Load, Outcome, Reached, wired

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.flow import LoadSteps, choose_launches, plan_steps, price
from tessera.ir import Cluster, Costs, Objective
from tessera.plan import Comparison, Option, PlanConfig, search_config
from tessera.plan.batches import ROUNDS
from tessera.plan.pricing.milp import GAP
from tessera.plan.problem import Mix, build
from tessera.plan.search.task import Task
from tessera.plan.service import compared
from tessera.plan.solve import PLANNERS, single_placement
from tessera.planning import ServedSteps, make_service_plan
from tessera.serve.rehearse import rehearse
from tessera.simulate import SteadyRates


def compare(library: Library, case: Case) -> Outcome:
    """Plans and simulates; a case that does not fit its devices has an outcome that says so."""
    return _service(case) if library.is_served(case.load) else _steps(library, case)


def _service(case: Case) -> Outcome:
    started, load = time.process_time(), case.load
    steps = ServedSteps(load.model, wired(case.gpus, case.wire))
    steps.is_compiled, _ = choose_launches(steps.anchors, "")
    wanted = ir.Load(load.prompt, load.output, tpot_ms=load.limit_ms)
    launches = "compiled" if steps.is_compiled else "eager"
    try:
        plan = make_service_plan(steps, wanted, rehearse, search_config(case.effort.search))
    except PlanInfeasible as error:
        spent = time.process_time() - started
        return Outcome({}, None, "", "", None, 0, rent(steps.cluster), {}, launches, spent, str(error))
    found = compared(plan)
    return Outcome(
        _policies(load, found),
        plan.bound_per_s and plan.bound_per_s / load.per_result,
        plan.policy,
        "",
        None,
        len(plan.groups),
        rent(steps.cluster),
        sources_of([costs for group in plan.groups for costs in group.plan.costs]),
        launches,
        time.process_time() - started,
    )


def _steps(library: Library, case: Case) -> Outcome:
    started = time.process_time()
    steps, cluster = library.steps(case.load), wired(case.gpus, case.wire)
    launches, effort = "compiled" if steps.is_compiled else "eager", case.effort
    config = PlanConfig(Objective.THROUGHPUT, search=search_config(effort.search))
    try:
        plan, found = plan_steps(steps, cluster, case.load.target, config, effort.batches)
    except PlanInfeasible as error:
        sources = sources_of(price(steps.at(effort.batches[0]), cluster))
        spent = time.process_time() - started
        return Outcome({}, None, "", "", None, 0, rent(cluster), sources, launches, spent, str(error))
    policies = _policies(case.load, found)
    others = _Others(case, found, steps, cluster)
    note, busy = "", None
    if effort.has_single:
        note = f"gap of {GAP:.1%} or bounded work, for each batch and number of microbatches around its best"
        placed = others.best(single_placement)
        if placed is not None:
            policies["single-placement"], busy = placed
    if effort.has_latency:
        quickest = others.best(PLANNERS[Objective.LATENCY.value])
        if quickest is not None:
            policies["latency"] = quickest[0]
    per_s = plan.batch * max(1, case.load.target.output_tokens) / case.load.per_result
    return Outcome(
        policies,
        plan.bound_per_s * per_s,
        plan.policy,
        note,
        busy,
        len(plan.lanes),
        rent(cluster),
        sources_of(plan.costs),
        launches,
        time.process_time() - started,
    )


def _policies(load: Load, found: Comparison) -> dict[str, Reached]:
    baselines = {o.policy: _reached(load, o) for o in found.baselines}
    return {"throughput": _reached(load, found.chosen), **baselines}


def _reached(load: Load, option: Option) -> Reached:
    ms = option.ttft_ms if load.steps[-1].kind == "prefill" else option.tpot_ms
    return Reached(option.tokens_per_s / load.per_result, ms, option.batch, option.microbatches)


@dataclass(frozen=True, eq=False)
class _Others:
    """Policies that the planner does not look at, where its best are."""

    case: Case
    found: Comparison
    steps: LoadSteps
    cluster: Cluster

    @property
    def points(self) -> list[tuple[int, int]]:
        """(batch, microbatches) of the plan and of the best coarse policy of one batch."""
        ranked = sorted(self.found.baselines, key=lambda o: -o.tokens_per_s)
        points = [
            (max(option.batch.values()), option.microbatches)
            for option in (self.found.chosen, *ranked)
            if len(set(option.batch.values())) == 1
        ]
        return list(dict.fromkeys(points))[:2]

    def best(self, propose: Callable[[Task], Sequence[Mix] | None]) -> tuple[Reached, float] | None:
        """The best that keeps to the limit, with its rate by busy time: around these points, its own."""
        tried = {point: self._at(propose, *point) for point in self.points}

        def top() -> tuple[int, int]:
            return max(tried, key=lambda point: found[0].per_s if (found := tried[point]) else 0.0)

        for factors in ROUNDS[:2]:
            batch, num = top()
            near = [(max(1, round(batch * factor)), num) for factor in factors]
            tried |= {point: self._at(propose, *point) for point in near if point not in tried}
        batch, num = top()
        deeper = [(batch, n) for n in (num // 2, 2 * num) if n and (batch, n) not in tried]
        tried |= {point: self._at(propose, *point) for point in deeper}
        return tried[top()]

    def _at(
        self, propose: Callable[[Task], Sequence[Mix] | None], batch: int, microbatches: int
    ) -> tuple[Reached, float] | None:
        load, unit = self.case.load, self.steps.at(batch)
        task = Task(build(unit, price(unit, self.cluster), self.cluster), microbatches, SteadyRates())
        try:
            mixes = propose(task)
        except PlanInfeasible:
            return None
        if not mixes:
            return None
        mix = mixes[0]
        per_s = task.rate_per_s(mix)
        results = batch * max(1, load.target.output_tokens) / load.per_result
        ms = 1e3 * microbatches / per_s / max(1, load.target.output_tokens)
        if load.limit_ms is not None and ms > load.limit_ms:
            return None
        row = Reached(results * per_s, ms, dict.fromkeys(self.cluster.names, batch), microbatches)
        return row, results * mix.rate_per_s


def rent(cluster: Cluster) -> float | None:
    """Dollars an hour of all devices; None where one has no price."""
    prices = [d.usd_per_hour for d in cluster.devices]
    return None if None in prices else sum(p for p in prices if p is not None)


def sources_of(costs: Sequence[Costs]) -> dict[str, float]:
    """Share of the time, over all launches and devices, that has a price from each source."""
    counted: Counter[str] = Counter()
    for priced in costs:
        for row in priced.costs:
            for cost in row:
                counted[cost.source.value] += cost.us  # type: ignore[assignment]
    total = sum(counted.values())
    return {name: us / total for name, us in counted.most_common()} if total else {}
