"""Policies by name: the planner's own two objectives, and the coarse ones that they are compared with.

A planner takes a task and returns the candidate mixes of its kind (both orientations of a split, say),
or None where its kind does not apply to the work. `solve` judges the candidates. A mix that does not
fit the devices' memory is never returned.

single                     every request on one device
data-parallel              every request wholly on one device, shares in proportion to speed
prefill-decode             steps up to prefill on one device, decode steps on another
prefill-decode-fractional  the best mix of all whole-phase assignments
attention-ffn              attention scopes on one device, the rest on another
layer-pipeline             contiguous ranges of layers, the same in every step
single-placement           kernel-level, one placement for all requests, by a mixed-integer program
throughput, latency        kernel-level, see those modules
quick                      the coarse policies and one kernel-level optimum, for those who ask often
cost, energy               throughput on the devices worth having on, see `objectives`

A served unit has no phases: its steps read prompts and answers together, over pages that do not move.

A node that a coarse policy would tear apart (launches that share state, immovable launches) goes where
most of its work would go; strict prefill-decode does not apply then.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

import numpy as np

from tessera import ir
from tessera.plan import scopes, throughput
from tessera.plan.lanes import slot_counts, slot_table
from tessera.plan.pipeline import orders, pipeline, two_stages
from tessera.plan.problem import Column, Floats, Ints, Labels, Mix, Problem
from tessera.plan.registry import Registry
from tessera.plan.robust import Sampler

# Candidates of one kind that are worth judging.
KEEP = 2
# Units of more launches than this are large: few candidates are looked at, those in full.
MANY_LAUNCHES = 4_500


@dataclass(eq=False)
class Task:
    """One planning run: the problem, and what is found once and used by many."""

    problem: Problem
    slots: int
    # Whether a simulation will judge; if not, busy time does, and no other candidate can win.
    is_judged: bool = False
    # Whether slots decode for ever; see `PlanConfig`.
    is_served: bool = False
    # A quick figure of a mix, in requests per second, to search by; set once the judge is there.
    glance: Callable[[Mix], float] | None = None

    @property
    def is_large(self) -> bool:
        """Does planning take so long that less is tried?"""
        return self.problem.unit.num_launches > MANY_LAUNCHES

    @cached_property
    def pool(self) -> throughput.Pool:
        """Columns known so far."""
        return throughput.Pool(self.problem, self.slots)

    @cached_property
    def coarse(self) -> dict[str, tuple[Mix, ...] | None]:
        """The candidates of every coarse policy; their columns are in the pool."""
        found = {name: PLANNERS.get(name)(self) for name in COARSE}
        for mixes in found.values():
            for mix in mixes or ():
                for column in mix.columns:
                    self.pool.add(column)
        return found

    @cached_property
    def free(self) -> throughput.Solved:
        """The optimum by busy time alone, and its bound."""
        throughput.seed(self.pool, [m for mixes in self.coarse.values() for m in mixes or ()])
        return throughput.generate(self.pool)

    @property
    def variants(self) -> tuple[ir.Variant, ...]:
        """Batches besides the problem's own that columns may be of; see `joint`."""
        return ()

    @cached_property
    def sampler(self) -> Sampler:
        """Costs as wrong as they may be."""
        return Sampler(self.problem)

    @property
    def columns(self) -> list[Column]:
        """Placements known so far, of all batches."""
        return self.pool.columns

    def add(self, variant: int, labels: Labels) -> None:
        """A placement of one batch that may be of use."""
        self.pool.add(self.problem.column(labels))

    def fits_with(self, columns: Sequence[Column], slots: Sequence[int]) -> bool:
        """Are the wishes kept, and does memory hold so many requests in flight on each column?"""
        return self.pool.fits(columns, slots)

    def held_by(self, column: Column) -> Mix | None:
        """One placement with as many requests in flight as memory holds."""
        return self.pool.held_by((column,))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """One a batch, by the columns' numbers of variants."""
        return (self.problem,)

    def weight_of(self, column: Column) -> float:
        """Work units in one request of a column."""
        return 1.0

    def footprints(self, columns: Iterable[Column]) -> tuple[Floats, Floats]:
        """(bytes of weights on each device, [column, device]: bytes of a request in flight there)."""
        return self.problem.footprints(columns)

    def slots_that_fit(self, mix: Mix) -> int | None:
        """The most requests in flight that memory allows on a mix's lanes in turn; None: any number."""
        fixed, each = self.footprints(mix.columns)
        table = slot_table(mix, self.slots)
        left = self.problem.memory_bytes - fixed
        turn = each[list(table)].sum(axis=0)
        if not turn.any():
            return None
        turns = max(0, int((left[turn > 0] // turn[turn > 0]).min()))
        left = left - turns * turn
        for rest, lane in enumerate(table):
            left = left - each[lane]
            if (left < 0).any():
                return turns * len(table) + rest
        return (turns + 1) * len(table)

    @cached_property
    def layer_of_node(self) -> tuple[Ints, int] | None:
        """(node -> layer, layers) by the vote of its launches."""
        found = scopes.layers(self.problem.unit)
        return None if found is None else (_vote(self.problem, found[0], found[1]), found[1])


Planner = Callable[[Task], tuple[Mix, ...] | None]
PLANNERS: Registry[Planner] = Registry("policy")
COARSE = (
    "single",
    "data-parallel",
    "prefill-decode",
    "prefill-decode-fractional",
    "attention-ffn",
    "layer-pipeline",
)


@PLANNERS.register("throughput")
def _throughput() -> Planner:
    from tessera.plan.search import throughput_mixes

    return throughput_mixes


@PLANNERS.register("single-placement")
def _single_placement() -> Planner:
    from tessera.plan.candidates import single_placement

    return single_placement


@PLANNERS.register("latency")
def _latency() -> Planner:
    from tessera.plan.candidates import latency_mixes

    return latency_mixes


@PLANNERS.register("cost")
def _cost() -> Planner:
    from tessera.plan.objectives import planner

    return planner(ir.Objective.COST)


@PLANNERS.register("energy")
def _energy() -> Planner:
    from tessera.plan.objectives import planner

    return planner(ir.Objective.ENERGY)


@PLANNERS.register("quick")
def _quick() -> Planner:
    from tessera.plan.candidates import quick_mixes

    return quick_mixes


PLANNERS.register("single")(lambda: single)
PLANNERS.register("data-parallel")(lambda: data_parallel)
PLANNERS.register("prefill-decode")(lambda: prefill_decode)
PLANNERS.register("prefill-decode-fractional")(lambda: prefill_decode_fractional)
PLANNERS.register("attention-ffn")(lambda: attention_ffn)
PLANNERS.register("layer-pipeline")(lambda: layer_pipeline)


def single(task: Task) -> tuple[Mix, ...] | None:
    """Everything on one device."""
    return _best(task, _alone(task.problem), task.problem.num_devices)


def data_parallel(task: Task) -> tuple[Mix, ...] | None:
    """A replica on every device that can hold one."""
    columns = [c for c in _alone(task.problem) if task.pool.able(c)]
    if not columns:
        return None
    speeds = [1.0 / float(c.busy_us.max()) for c in columns]
    mix = Mix(tuple(columns), tuple(s / sum(speeds) for s in speeds))
    if task.pool.fits(columns, slot_counts(mix, task.slots)):
        return (mix,)
    # Where memory is short, a device has as many requests in flight as it can hold; one keeps it busy.
    rooms = [task.problem.slots_that_fit(c) or 0 for c in columns]
    counts = [min(n, room) for n, room in zip(slot_counts(mix, task.slots), rooms, strict=True)]
    return (replace(mix, slots=tuple(counts)),)


def prefill_decode(task: Task) -> tuple[Mix, ...] | None:
    """Strictly one device for each phase."""
    columns = _phase_columns(task.problem)
    if columns is None:
        return None
    split = [c for (a, b), c in columns.items() if a != b]
    return _best(task, split, KEEP)


def prefill_decode_fractional(task: Task) -> tuple[Mix, ...] | None:
    """Requests differ in which device does which of their phases."""
    columns = _phase_columns(task.problem)
    if columns is None:
        return None
    mix = throughput.balanced(task.pool, columns.values())
    # By busy time it is the best; with few slots, which are whole numbers, simpler mixes of its kind may be.
    simpler = (*(data_parallel(task) or ()), *(prefill_decode(task) or ()))
    return None if mix is None else (mix, *simpler)


def attention_ffn(task: Task) -> tuple[Mix, ...] | None:
    """Attention here, the rest there."""
    prob = task.problem
    marks = scopes.attention(prob.unit)
    if marks is None or prob.num_devices < 2:
        return None
    side = _vote(prob, tuple(m.astype(np.int64) for m in marks), 2)
    if side.min() == side.max():
        return None
    pairs = permutations(range(prob.num_devices), 2)
    return _best(task, (prob.column(np.where(side == 1, a, b)) for a, b in pairs), KEEP)


def layer_pipeline(task: Task) -> tuple[Mix, ...] | None:
    """The best split of the layers into one contiguous range per device."""
    found, prob = task.layer_of_node, task.problem
    if found is None or prob.num_devices < 2:
        return None
    layer, num_layers = found
    ranges: Iterable[Labels | None]
    if prob.num_devices == 2:
        ranges = two_stages(task, layer, num_layers)
    else:
        # With room for temporaries at their most, which a range of layers may not reach; else without.
        most = task.slots * prob.most_temporary_bytes
        spares = dict.fromkeys((most, 0.0) if task.pool.is_tight else (0.0,))
        ranges = (
            pipeline(task, layer, num_layers, order, spare) for order in orders(prob) for spare in spares
        )
    return _best(task, (prob.column(labels) for labels in ranges if labels is not None), KEEP)


def _alone(problem: Problem) -> list[Column]:
    devices = range(problem.num_devices)
    return [problem.column(np.full(problem.num_nodes, d, dtype=np.int64)) for d in devices]


def _best(task: Task, columns: Iterable[Column], keep: int) -> tuple[Mix, ...] | None:
    """The columns of the shortest period that fit, each alone."""
    fitting = [mix for c in columns if (mix := task.pool.held_by((c,))) is not None]
    fitting.sort(key=lambda m: -throughput.hope_per_s(m, task.slots))
    return tuple(fitting[:keep]) or None


def _vote(problem: Problem, marks: Sequence[Ints], num: int) -> Ints:
    """Node -> the mark that most of its work carries."""
    votes = np.zeros((problem.num_nodes, num))
    for nodes, mark, costs, count in zip(
        problem.node_of, marks, problem.cost_us, problem.unit.counts, strict=True
    ):
        np.add.at(votes, (nodes, mark), count * (costs.mean(axis=1) + 1e-9))
    return np.asarray(votes.argmax(axis=1), dtype=np.int64)


def _phase_columns(problem: Problem) -> dict[tuple[int, int], Column] | None:
    """(device of prefill, device of decode) -> column; None without both phases."""
    kinds = [g.trace.step.kind for g in problem.unit.graphs]
    if "prefill" not in kinds or "decode" not in kinds or problem.num_devices < 2:
        return None
    is_decode = np.zeros(problem.num_nodes, dtype=np.bool_)
    is_other = np.zeros(problem.num_nodes, dtype=np.bool_)
    for kind, nodes in zip(kinds, problem.node_of, strict=True):
        (is_decode if kind == "decode" else is_other)[nodes] = True
    if (is_decode & is_other).any():  # nodes of both phases cannot be parted
        return None
    pairs = [(a, b) for a in range(problem.num_devices) for b in range(problem.num_devices)]
    return {(a, b): problem.column(np.where(is_decode, b, a)) for a, b in pairs}
