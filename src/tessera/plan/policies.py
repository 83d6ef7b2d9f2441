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
throughput, latency        kernel-level, see those modules

A node that a coarse policy would tear apart (launches that share state, immovable launches) goes where
most of its work would go; strict prefill-decode does not apply then.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np

from tessera.plan import scopes, throughput
from tessera.plan.problem import Column, Floats, Ints, Labels, Mix, Problem
from tessera.plan.registry import Registry

# Candidates of one kind that are worth judging.
KEEP = 2
# Above this many devices, layer pipelines try only the orders by speed.
MAX_PERMUTED = 4


@dataclass(frozen=True, eq=False)
class Task:
    """One planning run: the problem, and what is found once and used by many."""

    problem: Problem
    slots: int
    # Whether a simulation will judge; if not, busy time does, and no other candidate can win.
    is_judged: bool = False

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
    from tessera.plan.candidates import throughput_mixes

    return throughput_mixes


@PLANNERS.register("latency")
def _latency() -> Planner:
    from tessera.plan.candidates import latency_mixes

    return latency_mixes


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
    columns = [c for c in _alone(task.problem) if task.pool.fits((c,))]
    if not columns:
        return None
    speeds = [1.0 / float(c.busy_us.max()) for c in columns]
    return (Mix(tuple(columns), tuple(s / sum(speeds) for s in speeds)),)


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
    return None if mix is None else (mix,)


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
        ranges = _two_stages(task, layer, num_layers)
    else:
        ranges = (_pipeline(task, layer, num_layers, order) for order in _orders(prob))
    return _best(task, (prob.column(labels) for labels in ranges if labels is not None), KEEP)


def _alone(problem: Problem) -> list[Column]:
    devices = range(problem.num_devices)
    return [problem.column(np.full(problem.num_nodes, d, dtype=np.int64)) for d in devices]


def _best(task: Task, columns: Iterable[Column], keep: int) -> tuple[Mix, ...] | None:
    """The columns of the shortest period that fit, each alone."""
    fitting = sorted((c for c in columns if task.pool.fits((c,))), key=lambda c: float(c.busy_us.max()))
    return tuple(Mix((c,), (1.0,)) for c in fitting[:keep]) or None


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
    if (is_decode & is_other).any():
        return None
    pairs = [(a, b) for a in range(problem.num_devices) for b in range(problem.num_devices)]
    return {(a, b): problem.column(np.where(is_decode, b, a)) for a, b in pairs}


def _two_stages(task: Task, layer: Ints, num_layers: int) -> Iterator[Labels]:
    """For either order of two devices, the split of the least bottleneck that fits, links included."""
    for first in (0, 1):
        for cut in np.argsort(split_periods(task.problem, layer, num_layers, first), kind="stable").tolist():
            labels = np.where(layer < cut + 1, first, 1 - first)
            if task.pool.fits((task.problem.column(labels),)):
                yield labels
                break


def split_periods(problem: Problem, layer: Ints, num_layers: int, first: int) -> Floats:
    """Busiest device or link when layers below 1, 2, ... go to device `first` and the rest to the other."""
    second = 1 - first
    load = np.zeros((num_layers, 2))
    np.add.at(load, layer, problem.load_us)
    below = np.cumsum(load, axis=0)[:-1]
    busy = [below[:, first], load[:, second].sum() - below[:, second]]
    if len(problem.values):
        starts = np.searchsorted(problem.values.pin_value, np.arange(len(problem.values)))
        readers = layer[problem.values.pin_node]
        made = layer[problem.values.producer]
        lowest, highest = np.minimum.reduceat(readers, starts), np.maximum.reduceat(readers, starts)
        # A value crosses forward at cuts made < c <= highest, and back at cuts lowest < c <= made.
        busy.append(_covered(made, highest, problem.wire_us[:, first, second], num_layers))
        busy.append(_covered(lowest, made, problem.wire_us[:, second, first], num_layers))
    return np.asarray(np.max(busy, axis=0), dtype=np.float64)


def _covered(after: Ints, upto: Ints, weight: Floats, num_layers: int) -> Floats:
    """For cuts c = 1 .. num_layers - 1: the weight of all intervals with after < c <= upto."""
    real = upto > after
    change = np.bincount(after[real] + 1, weights=weight[real], minlength=num_layers + 1)
    change -= np.bincount(upto[real] + 1, weights=weight[real], minlength=num_layers + 1)
    return np.asarray(np.cumsum(change)[1:num_layers], dtype=np.float64)


def _orders(problem: Problem) -> list[tuple[int, ...]]:
    devices = range(problem.num_devices)
    if problem.num_devices <= MAX_PERMUTED:
        return list(permutations(devices))
    by_speed = tuple(sorted(devices, key=lambda d: float(problem.load_us[:, d].sum())))
    return [by_speed, by_speed[::-1]]


def _pipeline(task: Task, layer: Ints, num_layers: int, order: tuple[int, ...]) -> Labels | None:
    """Ranges of layers for devices in a given order: least bottleneck of device time, within memory."""
    prob = task.problem
    load = np.zeros((num_layers, prob.num_devices))
    np.add.at(load, layer, prob.load_us)
    held = _layer_bytes(task, layer, num_layers)
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    starts: list[Ints] = []
    for device in order:
        stage = _ranges(load[:, device])
        stage[_ranges(held) > prob.memory_bytes[device]] = np.inf
        options = np.maximum(best[:, None], stage)  # [first layer, one past the last]
        starts.append(options.argmin(axis=0))
        best = options.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    device_of = np.zeros(num_layers, dtype=np.int64)
    stop = num_layers
    for device, start in zip(reversed(order), reversed(starts), strict=True):
        device_of[int(start[stop]) : stop] = device
        stop = int(start[stop])
    return device_of[layer]


def _ranges(per_layer: Floats) -> Floats:
    """[start, stop]: sum over layers start <= x < stop; infinite where stop < start."""
    sums = np.concatenate([[0.0], np.cumsum(per_layer)])
    table = sums[None, :] - sums[:, None]
    table[np.tril_indices(len(sums), -1)] = np.inf
    return np.asarray(table)


def _layer_bytes(task: Task, layer: Ints, num_layers: int) -> Floats:
    """Bytes that each layer needs resident; what two layers share is counted in both."""
    total = np.zeros(num_layers)
    for held, copies in ((task.problem.weights, 1), (task.problem.states, task.slots)):
        pairs = np.unique(np.stack([held.pin_item, layer[held.pin_node]], axis=1), axis=0)
        np.add.at(total, pairs[:, 1], copies * held.num_bytes[pairs[:, 0]])
    return total
