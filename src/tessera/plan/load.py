"""Load: batch, microbatches and placement for a model under a load.

A work unit is a microbatch of requests: their prefill, and one decode per answer token. Points (batch,
prefill batch, microbatches) are estimated by a quick simulation of the linear program's mix, first on a
coarse grid, then around the best of every policy; the best points are planned in full. Each coarse policy
gets its own best point within the same memory and limits.

Large prefills are hardly faster per prompt and hold more temporaries, so a microbatch is prefilled in parts:
as many rows as pay, then more and fewer around the best.

Time per output token follows Little's law: n microbatches on a lane that completes r per second take n / r
each, less the prefill.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.baselines import COARSE
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.load_figures import LoadPlan, Option, Target, against, replicas_within, together
from tessera.plan.pricing import throughput
from tessera.plan.problem import (
    Column,
    Mix,
    Problem,
    build,
    by_speed,
    cluster_of,
    microbatch_counts,
    spread_us,
    variant_on,
)
from tessera.plan.search import objectives
from tessera.plan.search.judge import Judge
from tessera.plan.search.task import Simulator, Task, joined_task
from tessera.plan.solve import decide

# First batches; those near the best follow.
BATCHES = tuple(2 * 4**n for n in range(6))
NEAR = ((0.5, 2.0), (0.75, 1.25, 1.5), (0.875, 1.125))

# Rows of a microbatch, and of one prefill.
Shape = tuple[int, int]
Point = tuple[Shape, int]
# An option of a policy, and how to make its plan.
Candidate = tuple[Option, Callable[[], ir.Plan]]


@dataclass(frozen=True, eq=False)
class PricedLoad:
    """A load with its priced steps per batch, and the cluster."""

    # Priced steps of a batch.
    variant_at: Callable[[int], ir.Variant]
    cluster: ir.Cluster
    target: Target
    # A simulator for one batch.
    make_simulate: Callable[[], Simulator]
    # A batch with this many prefill rows at a time; None: whole prefills.
    in_parts: Callable[[int, int], ir.Variant] | None = None
    _known: dict[tuple[int, int | None], ir.Variant] = field(default_factory=dict)

    def at(self, batch: int, prefill: int | None = None) -> ir.Variant:
        key = batch, None if self.in_parts is None else prefill
        if key not in self._known:
            if prefill is None or self.in_parts is None:
                self._known[key] = self.variant_at(batch)
            else:
                self._known[key] = self.in_parts(batch, prefill)
        return self._known[key]

    def on(self, devices: Sequence[int]) -> "PricedLoad":
        """The load on some devices."""
        return PricedLoad(
            lambda batch: variant_on(self.at(batch), devices),
            cluster_of(self.cluster, devices),
            self.target,
            self.make_simulate,
            self.in_parts and (lambda batch, rows: variant_on(self.at(batch, rows), devices)),
        )


@dataclass(frozen=True)
class LoadConfig:
    """Objective and search range of a load."""

    # Tried in order until one does not fit.
    batches: Sequence[int] = BATCHES
    # Multiples of the best batches, tried per round.
    near: Sequence[Sequence[float]] = NEAR
    # Maximum in flight; None: twice the devices.
    max_microbatches: int | None = None
    objective: ir.Objective = ir.Objective.THROUGHPUT
    # Called with progress lines.
    advance: Callable[[str], None] = lambda text: None
    search: SearchConfig = FULL


def plan_at_once(load: PricedLoad, config: LoadConfig) -> LoadPlan:
    """The plan with most tokens per second within memory and limits, on all devices."""
    batches, advance = config.batches, config.advance
    most = config.max_microbatches or 2 * len(load.cluster.devices)
    search = _Search(load, most, config.objective, config.search)
    gain, smaller = config.search.prefill_gain, config.search.prefill_near[0]
    rows = None if load.in_parts is None else _prefill_rows(load, batches[-1], gain)

    def look(batch: int, prefill: int | None = None) -> bool:
        advance(f"pricing batch {batch}" + (f", prefills of {prefill}" if prefill else ""))
        if rows is None:
            return search.look(load.at(batch))
        part = prefill or _part(batch, rows)
        parts = (round(part * smaller**n) for n in (1, 2) if prefill is None)
        tried = dict.fromkeys([part, *(n for n in parts if n >= 1 and batch % n == 0)])
        return any(search.look(load.at(batch, n)) for n in tried)

    for batch in batches:
        if not look(batch):
            break
    if not search.points:
        raise search.refusal()
    for factors in config.near if len(batches) > 1 else ():
        for batch in search.near(factors):
            look(batch)
    for batch, prefill in search.near_prefills() if rows is not None else ():
        look(batch, prefill)
    return search.best(advance)


def _prefill_rows(load: PricedLoad, batch: int, gain: float) -> int | None:
    """Fewest rows with nearly the best prefill speed; None without prefills."""
    rows, last_us = 1, np.zeros(0)
    while rows <= batch:
        if batch % rows == 0:
            variant = load.at(batch, rows)
            if variant.unit.prefill_batch is None:
                return None
            at = [g.trace.step.kind for g in variant.unit.graphs].index("prefill")
            us = np.array([[cost.us for cost in row] for row in variant.costs[at].costs]).sum(axis=0) / rows
            if len(last_us) and (last_us <= us * (1 + gain)).all():
                return rows // 2
            last_us = us
        rows *= 2
    return batch


def _part(batch: int, rows: int) -> int:
    """Smallest divisor of the batch with at least this many rows."""
    return next((part for part in range(rows, batch) if batch % part == 0), batch)


@dataclass(eq=False)
class _Point:
    """One batch with a maximum of microbatches in flight."""

    variant: ir.Variant
    judge: Judge

    @property
    def task(self) -> Task:
        return self.judge.task


@dataclass(eq=False)
class _Search:
    load: PricedLoad
    max_microbatches: int
    objective: ir.Objective
    config: SearchConfig
    points: dict[Point, _Point] = field(default_factory=dict)
    options: list[Option] = field(default_factory=list)
    _refused: PlanInfeasible | None = None
    _drafts: dict[_Point, tuple[Option | None, float]] = field(default_factory=dict)

    @property
    def cluster(self) -> ir.Cluster:
        return self.load.cluster

    @property
    def target(self) -> Target:
        return self.load.target

    def look(self, variant: ir.Variant) -> bool:
        """Add the points of one batch; False if it does not fit."""
        problem = build(variant.unit, variant.costs, self.cluster)
        simulate = self.load.make_simulate()
        num = len(self.cluster.devices)
        shape = (variant.batch, variant.unit.prefill_batch or variant.batch)
        known: list[Column] = []
        last = 0
        for microbatches in sorted(
            {1, *(max(1, round(depth * num)) for depth in self.config.load_depths)}
        ):  # 1: replicas
            least, last = last + 1, microbatches
            if microbatches > self.max_microbatches or (
                microbatches > 1 and self._least_ms(problem, least) > self._limit_ms
            ):
                continue
            task = Task(problem, microbatches, simulate, config=self.config)
            coarse = task.coarse_mixes
            task.pool.add(*known)
            try:
                throughput.seed(task.pool, coarse, not self.points, microbatches)
            except PlanInfeasible as error:
                self._refused = self._refused or error
                return False
            known = list(task.pool.columns)
            self.points[shape, microbatches] = _Point(variant, Judge(task))
        return True

    @property
    def _limit_ms(self) -> float:
        return float("inf") if self.target.tpot_ms is None else self.target.tpot_ms

    def _least_ms(self, problem: Problem, microbatches: int) -> float:
        """Lower bound of the time per token."""
        taken_ms = 1e-3 * microbatches * spread_us(problem.load_us)
        if _has_prefill(problem.unit):
            # The decodes' minimum share.
            rows = zip(problem.unit.graphs, problem.cost_us, problem.unit.counts, strict=True)
            listed = [(g.trace.step.kind == "decode", us, count) for g, us, count in rows]
            decode = sum(float(us.min(axis=1).sum()) * count for is_decode, us, count in listed if is_decode)
            other = sum(
                float(us.max(axis=1).sum()) * count for is_decode, us, count in listed if not is_decode
            )
            taken_ms *= decode / (decode + other)
        return taken_ms / max(1, self.target.output_tokens)

    def near(self, factors: Sequence[float]) -> list[int]:
        """Untried batches around the best of every policy; down to one row where all are too slow."""
        known = {batch for (batch, _), _ in self.points}
        least = min(self.points)[0]
        around = {_even(batch * factor) for batch, _ in self._promising() or {least} for factor in factors}
        return sorted(around - known)

    def near_prefills(self) -> list[Shape]:
        """The best batches of every policy with other prefill rows."""
        known = {shape for shape, _ in self.points}
        around = {
            (batch, round(prefill * factor))
            for batch, prefill in self._promising()
            for factor in self.config.prefill_near
        }
        return sorted(x for x in around - known if 1 <= x[1] <= x[0] and x[0] % x[1] == 0)

    def _promising(self) -> set[Shape]:
        """Best shapes of each policy, by upper bound."""
        upper_bounds: dict[str, tuple[float, Shape]] = {}
        for (shape, microbatches), point in self.points.items():
            listed = [(name, mix) for name, mixes in point.task.coarse.items() for mix in mixes or ()]
            for device in range(len(self.cluster.devices)) if microbatches == 1 else ():
                listed.append((f"{device}", Mix((point.task.problem.alone(device),), (1.0,))))
            found = [
                (name, self._upper_bound(point, mix))
                for name, mix in listed
                if point.task.problem.fits(mix.columns, microbatch_counts(mix, microbatches))
                and self._may_keep(point, mix)
            ]
            draft = self._draft(point)[0]
            if draft is not None and self._is_near(draft):
                found.append(("plan", draft.tokens_per_s))
            for name, upper_bound in found:
                upper_bounds[name] = max(upper_bounds.get(name, (0.0, (0, 0))), (upper_bound, shape))
        return {shape for _, shape in upper_bounds.values()}

    def refusal(self) -> PlanInfeasible:
        """The error if not even the smallest batch fits."""
        return self._refused or PlanInfeasible("no batch was given", "Give at least one.")

    def best(self, advance: Callable[[str], None]) -> LoadPlan:
        """The best plan; baselines first, as floors."""
        advance("coarser policies")
        replicas = self._replicas()
        best: dict[str, Candidate] = {}
        for name in COARSE:
            floor = max((o.tokens_per_s for o, _ in best.values()), default=0.0)
            is_replicated = name in ("single", "data-parallel")
            listed = replicas.get(name, []) if is_replicated else self._coarse(name, floor)
            keeping = [(o, make) for o, make in listed if o.keeps(self.target)]
            if keeping:
                best[name] = max(keeping, key=lambda x: x[0].figure(self.objective))
        planned = self._planned(
            max((o for o, _ in best.values()), key=lambda o: o.tokens_per_s, default=None), advance
        )
        everything = [*best.values(), *planned]  # ties: coarser
        if not everything:
            raise self._too_slow()
        chosen, make = max(everything, key=lambda x: x[0].figure(self.objective))
        baselines = tuple(o for o, _ in best.values())
        rates = {o.policy: o.tokens_per_s for o in baselines} | {"plan": chosen.tokens_per_s}
        # Omit quick estimates above full simulations.
        options = tuple(
            o for o in self.options if o.tokens_per_s <= rates.get(o.policy, 0) or not o.keeps(self.target)
        )
        plan = against(make(), baselines, self.target)
        return LoadPlan(plan.policy, chosen, baselines, self.objective, plan=plan, options=options)

    def _too_slow(self) -> PlanInfeasible:
        fastest = min(self.options, key=lambda o: o.tpot_ms)
        return PlanInfeasible(
            f"no plan keeps to the limits: the fastest takes {fastest.tpot_ms:.3g} ms a token and "
            f"{fastest.ttft_ms:.3g} ms to the first",
            "Allow more time, or add a faster device.",
        )

    # Coarser policies.

    def _replicas(self) -> dict[str, list[Candidate]]:
        """A replica on every device at its own best batch, and the best device alone."""
        best: dict[int, tuple[Option, Point, Column]] = {}
        for (shape, microbatches), point in self.points.items():
            for device in range(len(self.cluster.devices)) if microbatches == 1 else ():
                column = point.task.problem.alone(device)
                if not point.task.problem.fits((column,), 1):
                    continue
                option = self._option("single", point, Mix((column,), (1.0,)), 1e6 / column.path_us)
                if option.keeps(self.target) and (
                    device not in best or option.tokens_per_s > best[device][0].tokens_per_s
                ):
                    best[device] = (option, (shape, microbatches), column)
        if not best:
            return {}
        alone = max(best.values(), key=lambda x: x[0].tokens_per_s)
        lone = self.points[alone[1]]

        def all_of_them() -> ir.Plan:
            return self._joined([(point, column) for _, point, column in best.values()])

        joined = together([option for option, _, _ in best.values()])
        self.options += [joined, *replicas_within(self.options)]
        return {
            "single": [(alone[0], lambda: self._plan(lone, Mix((alone[2],), (1.0,)), "single"))],
            "data-parallel": [(joined, all_of_them)],
        }

    def _coarse(self, name: str, floor: float) -> list[Candidate]:
        """Best point of a coarse policy: quick estimates, then full simulation; above `floor` a long one."""
        upper_bounds = [
            (self._upper_bound(point, mix), point, mix)
            for point in self.points.values()
            for mix in point.task.coarse[name] or ()
        ]
        upper_bounds = [x for x in upper_bounds if self._may_keep(x[1], x[2])]
        # Quick tokens per second, or the upper bound of a skipped point.
        looks: list[tuple[float, float, _Point, Mix]] = []
        step = self.config.curve_step
        for upper_bound, point, mix in sorted(upper_bounds, key=lambda x: -x[0]):
            if self._is_beaten(name, point, mix, step):
                looks.append((upper_bound / (1 + step), upper_bound, point, mix))
            elif (rate := point.task.quick_per_s(mix)) > 0:
                option = self._option(name, point, mix, rate)
                if self._is_near(option):
                    looks.append((option.tokens_per_s, upper_bound, point, mix))
        found: list[Candidate] = []
        best = 0.0
        # Microbatches in flight -> smallest batch that was too slow.
        slow: dict[int, int] = {}
        for _, upper_bound, point, mix in sorted(looks, key=lambda x: -x[0]):
            if len(found) == self.config.max_simulated:
                break
            batch, microbatches = point.variant.batch, point.task.microbatches
            if upper_bound <= best or batch >= slow.get(microbatches, batch + 1):
                continue
            option = self._simulated(name, point, mix)
            if option.keeps(self.target) and option.tokens_per_s > max(best, floor):
                option = self._followed(name, point, mix)
            if not option.keeps(self.target):
                slow[microbatches] = batch
                continue
            best = max(best, option.tokens_per_s)
            found.append((option, partial(self._plan, point, mix, name)))
        return found

    def _planned(self, floor: Option | None, advance: Callable[[str], None]) -> list[Candidate]:
        """Full plans of the points with the highest upper bounds, and at the best baseline."""
        drafts = [(self._draft(point)[0], point) for point in self.points.values()]
        near = {p: draft.tokens_per_s for draft, p in drafts if draft is not None and self._is_near(draft)}
        by_draft = sorted(near, key=lambda p: -near[p])
        by_bound = sorted(near, key=lambda p: -self._draft(p)[1])
        found: list[Candidate] = []
        best = floor.tokens_per_s if floor else 0.0
        best_coarse = self.points.get(_point_of(floor)) if floor else None
        first = [best_coarse] if best_coarse in near else []
        for point in dict.fromkeys(chain(first, *zip(by_bound, by_draft, strict=True))):
            if len(found) == self.config.max_planned:
                break
            if max(self._draft(point)[1], near[point] * self.config.planning_gain) <= best:
                continue
            advance(f"planning batch {point.variant.batch}, {point.task.microbatches} microbatches")
            solved = decide(point.judge)
            option = self._option("plan", point, solved.chosen, solved.plan.simulated_per_s)
            if option.keeps(self.target) and option.tokens_per_s > best:
                option = self._followed("plan", point, solved.chosen)
            found.append((option, partial(self._plan, point, solved.chosen, solved.plan.policy)))
            if option.keeps(self.target):
                best = max(best, option.tokens_per_s)
        return [x for x in found if x[0].keeps(self.target)]

    def _upper_bound(self, point: _Point, mix: Mix) -> float:
        """Upper bound of tokens per second, by busy time and requests in flight."""
        return self._tokens(point) * point.task.upper_bound_per_s(mix)

    def _is_beaten(self, policy: str, point: _Point, mix: Mix, by: float = 0.0) -> bool:
        """Whether the policy has a point with more tokens in less time, up to `by`."""
        upper_bound = self._upper_bound(point, mix)
        least_ms, _ = self._times_ms(point, mix, upper_bound / self._tokens(point))
        shown = (o for o in self.options if o.policy == policy)
        more = 1.0 + by
        return any(o.tokens_per_s * more >= upper_bound and o.tpot_ms <= least_ms * more for o in shown)

    def _draft(self, point: _Point) -> tuple[Option | None, float]:
        """The linear program's best mix for a point by quick simulation, with its upper bound; None if
        beaten.
        """
        if point not in self._drafts:
            microbatches, num = point.task.microbatches, len(self.cluster.devices)
            found: list[tuple[float, Mix]] = []
            depths = {1.05 * min(microbatches, 2 * num), *([1.1 * num] if microbatches > num else [])}
            for depth in sorted(depths):
                mix = point.task.pool.main_lanes(throughput.generate(point.task.pool, depth).mix)
                if mix is not None and not self._is_beaten("plan", point, mix):
                    found.append((point.task.quick_per_s(mix), mix))
            rate, best = max(found, key=lambda x: x[0], default=(0.0, None))
            option = self._option("plan", point, best, rate) if best is not None and rate > 0 else None
            self._drafts[point] = (
                option,
                max((self._upper_bound(point, mix) for _, mix in found), default=0.0),
            )
        return self._drafts[point]

    def _is_near(self, draft: Option) -> bool:
        """Whether a full plan may meet the limits."""
        gain = self.config.planning_gain
        return self.target.allows(draft.tpot_ms / gain, draft.ttft_ms / gain)

    def _may_keep(self, point: _Point, mix: Mix) -> bool:
        """False if the limits are missed even by busy time."""
        if self.target.tpot_ms is None and self.target.ttft_ms is None:
            return True
        return self.target.allows(*self._times_ms(point, mix, mix.rate_per_s))

    def _tokens(self, point: _Point) -> float:
        return point.variant.batch * max(1, self.target.output_tokens)

    def _simulated(self, policy: str, point: _Point, mix: Mix) -> Option:
        return self._option(policy, point, mix, point.judge.rate_per_s(mix))

    def _followed(self, policy: str, point: _Point, mix: Mix) -> Option:
        """Simulated over a long run."""
        point.judge.settle(mix)
        return self._simulated(policy, point, mix)

    def _option(self, policy: str, point: _Point, mix: Mix, rate_per_s: float) -> Option:
        names, unit = self.cluster.names, point.variant.unit
        devices = [self.cluster.devices[d] for d in mix.devices]
        rents = [d.usd_per_hour for d in devices if d.usd_per_hour is not None]
        is_known = all(d.tdp_w is not None for d in devices)
        joules = objectives.joules(point.task.problem, mix, rate_per_s) if is_known else None
        option = Option(
            policy,
            self._tokens(point) * rate_per_s,
            *self._times_ms(point, mix, rate_per_s),
            {names[d]: unit.batch for d in mix.devices},
            sum(microbatch_counts(mix, point.task.microbatches)),
            {names[d]: unit.prefill_batch for d in mix.devices} if unit.prefill_batch else {},
            sum(rents) if len(rents) == len(devices) else None,
            None if joules is None else joules / self._tokens(point),
        )
        self.options.append(option)
        return option

    def _times_ms(self, point: _Point, mix: Mix, rate_per_s: float) -> tuple[float, float]:
        """(time per output token, time to first token) at a rate."""
        taken_ms = 1e3 * sum(microbatch_counts(mix, point.task.microbatches)) / rate_per_s
        problem, runs = point.task.problem, max(1, self.target.output_tokens)
        if not _has_prefill(problem.unit):
            return taken_ms / runs, taken_ms
        steps = np.array(mix.shares) @ np.array([problem.steps_us(column.labels) for column in mix.columns])
        is_before = [g.trace.step.kind != "decode" for g in problem.unit.graphs]
        first_ms = taken_ms * float(steps[is_before].sum() / steps.sum())
        return (taken_ms - first_ms) / runs, first_ms

    def _plan(self, point: _Point, mix: Mix, policy: str) -> ir.Plan:
        plan = replace(point.judge.finished(mix, (), [mix]), policy=policy)
        ir.verify(plan)
        return plan

    def _joined(self, chosen: Iterable[tuple[Point, Column]]) -> ir.Plan:
        """One lane per device, each with its own batch."""
        listed = list(chosen)
        batches = list(dict.fromkeys(point for point, _ in listed))
        simulate = self.load.make_simulate()
        tasks = [self.points[point].task for point in batches]
        task = joined_task(tasks, len(listed), simulate, "data-parallel")
        columns = [task.problem.scaled(column, batches.index(point)) for point, column in listed]
        mix = by_speed(columns, (1,) * len(columns))
        plan = Judge(task).finished(mix, (), [mix])
        ir.verify(plan)
        return plan


def _has_prefill(unit: ir.WorkUnit) -> bool:
    kinds = [g.trace.step.kind for g in unit.graphs]
    return "decode" in kinds and len(kinds) > 1


def _point_of(option: Option) -> Point:
    """The point of the largest batch."""
    device, batch = max(option.batch.items(), key=lambda x: x[1])
    return (batch, option.prefill_batch.get(device, batch)), option.microbatches


def _even(batch: float) -> int:
    """Rounded to a multiple of eight from 16 on."""
    return max(1, round(batch / 8) * 8 if batch >= 16 else round(batch))
