"""Local search: the placement of every microbatch, from the linear program's optima.

A team assigns microbatches to placements. It starts from optima of the linear program at several depths, and
single placements. Moves from the best team: another placement for one microbatch; one microbatch more or
less.

An estimate orders the moves (equal slow-down until the bottleneck keeps up), and a quick simulation rates
them. It does not see that microbatches on one device fill idle time: those moves are always tried. The number
of moves depends on the unit's size alone: plans are reproducible.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from tessera.plan.arrays import Ints
from tessera.plan.pricing import throughput
from tessera.plan.problem import Column, Mix, microbatch_counts
from tessera.plan.search.task import Task

# (placement, microbatches) of each lane.
Team = frozenset[tuple[Column, int]]


def throughput_mixes(task: Task) -> tuple[Mix, ...]:
    best = task.free.mix
    if task.simulate is None or task.problem.num_devices == 1:
        return (best,)
    search, config = Search(task), task.config
    launches, num = task.problem.unit.num_launches, task.problem.num_devices
    depths = config.depths[: max(2, config.depth_launches // launches)]
    optima = (throughput.generate(task.pool, depth * num).mix for depth in depths)
    for mix in (*optima, best):
        search.look(mix)
    search.climb()
    return search.finalists()


def is_filled(task: Task, columns: Sequence[Column]) -> bool:
    """Some microbatches stay on one device in a step that others divide."""

    def stays(column: Column, nodes: Ints) -> bool:
        devices = column.labels[nodes]
        return bool((devices == devices[0]).all())

    return any(len({stays(c, nodes) for c in columns}) > 1 for nodes in task.problem.node_of)


class Search:
    def __init__(self, task: Task) -> None:
        self.task, self.best = task, 0.0
        self.rated: list[tuple[float, Mix]] = []
        self._seen: set[object] = set()
        config, launches = task.config, task.problem.unit.num_launches
        affordable = round((config.look_launches / launches) ** 2)
        self._left = max(config.min_looks, min(config.max_looks, affordable))

    def look(self, mix: Mix) -> float:
        """Figure of a new mix; 0 if it was rated before, does not fit or cannot win."""
        counts = microbatch_counts(mix, self.task.microbatches)
        team = frozenset(zip(mix.columns, counts, strict=True))
        key = team, not mix.microbatches and mix.shares
        if key in self._seen or mix.rate_per_s < self.best or sum(mix.microbatches) > self.task.microbatches:
            return 0.0
        self._seen.add(key)
        if self.task.is_served and is_filled(self.task, mix.columns):
            return 0.0
        if not self.task.pool.fits(mix.columns, counts):
            return 0.0
        self._left -= 1
        figure = self.task.quick_per_s(mix)
        self.rated.append((figure, mix))
        self.best = max(self.best, figure)
        return figure

    def finalists(self) -> tuple[Mix, ...]:
        ordered = sorted(self.rated, key=lambda x: -x[0])
        return tuple(mix for _, mix in ordered[: self.task.config.num_finalists[self.task.is_large]])

    def climb(self) -> None:
        self._look_at_single()
        moved: set[Team] = set()
        while self._left > 0 and (team := self._best_team(moved)) is not None:
            moved.add(frozenset(team.items()))
            for moves in self._moves(team):
                self._look_at_some(moves)

    def _look_at_single(self) -> None:
        for key in (lambda c: float(c.busy_us.max()), lambda c: c.path_us):
            for column in sorted(self.task.pool.columns, key=key)[: self.task.config.num_single]:
                held = self.task.pool.held_by((column,))
                if held is not None and self._left > 0:
                    self.look(held)

    def _best_team(self, moved: Collection[Team]) -> Counter[Column] | None:
        """The best one that no move has begun from."""
        teams = [(figure, self._team(mix)) for figure, mix in self.rated]
        left = [row for row in teams if frozenset(row[1].items()) not in moved]
        return max(left, key=lambda row: row[0])[1] if left else None

    def _look_at_some(self, moves: Sequence[Counter[Column]]) -> None:
        num = 0
        for team in moves:
            if (frozenset(team.items()), False) not in self._seen:
                num += self.look(self._mix(team)) > 0.0
            if num == self.task.config.num_moves or self._left <= 0:
                return

    def _team(self, mix: Mix) -> Counter[Column]:
        """At most one lane per microbatch: those with the largest shares."""
        columns, left = mix.columns, self.task.microbatches
        counts = Counter(dict.fromkeys(columns, 0))
        lanes = zip(mix.shares, columns, microbatch_counts(mix, left), strict=True)
        for _, column, num in sorted(lanes, key=lambda lane: -lane[0]):
            counts[column] += min(num, left)
            left -= min(num, left)
        return +counts

    def _mix(self, team: Counter[Column]) -> Mix:
        """Shares are balanced by busy time, none zero."""
        columns = tuple(team)
        rates = throughput.master(self.task.pool, list(columns)).rates
        shares = np.maximum(rates / rates.sum(), self.task.config.least_share)
        return Mix(columns, tuple((shares / shares.sum()).tolist()), tuple(team.values()))

    def _moves(self, team: Counter[Column]) -> Iterator[list[Counter[Column]]]:
        columns = self.task.pool.columns
        busy, path = np.array([c.busy_us for c in columns]), np.array([c.path_us for c in columns])
        whole = [i for i, c in enumerate(columns) if c.labels.min() == c.labels.max()]
        alike: list[tuple[float, Counter[Column]]] = []
        filled: list[tuple[float, Counter[Column]]] = []
        is_full = sum(team.values()) >= self.task.microbatches
        for dropped in (*team, *(() if is_full else (None,))):
            kept = team if dropped is None else team - Counter([dropped])
            rate = sum(n / c.path_us for c, n in kept.items())
            base = sum((n / c.path_us * c.busy_us for c, n in kept.items()), np.zeros(busy.shape[1]))
            slowed = (rate + 1 / path) / np.maximum(1.0, (base + busy / path[:, None]).max(axis=1))
            best = np.argsort(-slowed, kind="stable")[: 4 * self.task.config.num_moves].tolist()
            for chosen, listed in ((whole, filled), (best, alike)):
                listed += [(float(slowed[i]), kept + Counter([columns[i]])) for i in chosen]
            if kept:
                alike.append((rate / max(1.0, float(base.max())), kept))
        for listed in (filled, alike):
            yield [team for _, team in sorted(listed, key=lambda x: -x[0])]
