"""GroupScheduler: groups of the loaded policies, their microbatches, and the pages of their homes."""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import Microbatch, Scheduler, SchedulerConfig, Watcher
from tessera.execute.stepper import Stepper
from tessera.ir import Group, Plan, Role, ServicePlan
from tessera.kernels import PAGE
from tessera.serve.answer import ActiveRequest
from tessera.serve.pages import PagePool, listed
from tessera.serve.records import Counts, GroupView, Shape
from tessera.serve.sequences import SequenceBatch
from tessera.serve.step_inputs import Steps


def plans_of(policies: Sequence[ServicePlan]) -> tuple[Plan, ...]:
    return tuple({id(plan): plan for policy in policies for plan in policy.plans}.values())


@dataclass(eq=False)
class RoutedGroup:
    group: Group
    lane: LoadedLane
    shape: Shape
    steps: Steps
    # Predicted seconds per token.
    prompt_s: float
    answer_s: float

    @property
    def role(self) -> Role:
        return self.group.role

    @property
    def home(self) -> int | None:
        return self.lane.home

    def is_like(self, other: "RoutedGroup") -> bool:
        return (self.lane, self.role, self.shape) == (other.lane, other.role, other.shape)


RoutedMicrobatch = Microbatch[ActiveRequest]


@dataclass(eq=False)
class MovingSequence:
    request: ActiveRequest
    source: RoutedMicrobatch
    destination: RoutedMicrobatch
    # None: both ends share one pool, and nothing is sent.
    pool: PagePool | None
    # Page tables at the destination; the first `num_sent` of each are there or in flight, or not needed (0).
    pages: list[list[int]]
    num_sent: int
    num_expected: int
    in_flight: int = 0
    # Both microbatches pause for state by row.
    is_pausing: bool = False
    is_row_sent: bool = False
    # Given up: pages are given back when nothing is in flight.
    is_over: bool = False

    def release(self) -> None:
        if self.pool is not None and not self.in_flight:
            self.pool.give_back(listed(self.pages))
            self.pages = []


@dataclass(frozen=True, eq=False)
class PagesInFlight:
    transit: MovingSequence
    # Numbers of both microbatches.
    ends: tuple[int, int]
    # Pool of the source, which keeps the pages until they have arrived.
    pool: PagePool
    pages: tuple[int, ...]
    # Row at the destination, if state by row goes along.
    row: int | None = None


Evict = Callable[[ActiveRequest], bool]
# A microbatch without a given pool has its own.
MakeBatch = Callable[[int, RoutedGroup, PagePool | None, Evict], SequenceBatch]


def batch_of(microbatch: RoutedMicrobatch) -> SequenceBatch:
    assert isinstance(microbatch.content, SequenceBatch)
    return microbatch.content


class GroupScheduler(Scheduler[ActiveRequest]):
    def __init__(
        self,
        stepper: Stepper,
        policies: Sequence[ServicePlan],
        shape: Shape,
        make: MakeBatch,
        config: SchedulerConfig,
        watcher: Watcher[ActiveRequest],
        counts: Counts,
        is_caching: bool = True,
    ) -> None:
        self.policies, self._shape, self._make_batch = tuple(policies), shape, make
        self._is_caching = is_caching and shape.is_paged
        # By home.
        self.pools: dict[int, PagePool] = {}
        self._counts = counts
        # By policy; by open microbatch.
        self._groups: list[list[RoutedGroup]] = []
        self._by_number: dict[int, RoutedGroup] = {}
        self._opening: RoutedGroup | None = None
        self._transits: dict[ActiveRequest, MovingSequence] = {}
        self._moves: dict[int, PagesInFlight] = {}
        self._move_numbers = count()
        self._pauses: Counter[RoutedMicrobatch] = Counter()
        self._mean_answer = float(max(1, policies[0].load.output_tokens))
        self._switched_s: float | None = None
        super().__init__(stepper, self._make_content, config, watcher)

    @property
    def service_plan(self) -> ServicePlan:
        return self.policies[self.policy]

    @property
    def groups(self) -> list[RoutedGroup]:
        return self._groups[self.policy]

    def _measure(self) -> None:
        if not self._groups:
            lanes = {id(lane.plan): lane for lane in self.stepper.lanes.all}
            self._groups = [[self._routed(g, lanes[id(g.plan)]) for g in p.groups] for p in self.policies]
        self.plan = self.service_plan.groups[0].plan

    def _routed(self, group: Group, lane: LoadedLane) -> RoutedGroup:
        costs, shape, steps = self._costs_of(lane), self._shape.of_group(group), Steps.of(group.plan)
        largest = shape.sizes[-1]
        answers = next((size for size in shape.sizes if size >= shape.rows), largest)
        prompt_s = costs[steps.number[largest]].alone_s / largest
        answer_s = costs[steps.number[answers]].alone_s / shape.rows
        return RoutedGroup(group, lane, shape, steps, prompt_s, answer_s)

    def switch(self, policy: int) -> None:
        if policy == self.policy:
            return
        self._counts.switches += 1
        self._switched_s = self.stepper.now_s()
        super().switch(policy)

    def adopt(self, policies: Sequence[ServicePlan]) -> bool:
        """Replaces the policies; the one of the same name stays current, else the first.

        False if their plans are those that are loaded.
        """
        name, plans = self.service_plan.policy, plans_of(policies)
        is_new = [*map(id, plans)] != [*map(id, self.stepper.plans)]
        if is_new:
            self.stepper.load(plans)
            self._switched_s = self.stepper.now_s()
        self.policies, self._groups = tuple(policies), []
        names = [policy.policy for policy in policies]
        self.policy = names.index(name) if name in names else 0
        self._renew()
        self._judge()
        return is_new

    def move_s(self) -> float:
        """Predicted seconds for all pages in use; thread-safe."""
        return sum(pool.num_used * self._page_s(home) for home, pool in list(self.pools.items()))

    def _page_s(self, home: int) -> float:
        buffers = next((h.buffers for h in list(self.stepper.lanes.homes.values()) if h.number == home), {})
        links = self.stepper.plans[0].cluster.links
        slowest = min((link.gbps for link in links), default=math.inf)
        return sum(buffer.page_bytes for buffer in buffers.values()) / (1e9 * slowest)

    def _renew(self) -> None:
        self._measure()
        homes = {home.number for home in self.stepper.lanes.homes.values()}
        for number in [number for number in self.pools if number not in homes]:
            del self.pools[number]
        for microbatch in self.microbatches.values():
            alike = [g for g in self.groups if g.is_like(self._by_number[microbatch.number])]
            microbatch.is_old = not alike
            if alike:
                self._by_number[microbatch.number] = alike[0]
        for transit in [t for t in self._transits.values() if t.destination.is_old]:
            self._stay(transit)
        self._close_old()
        self._may_seat = True
        for microbatch in self.microbatches.values():
            self._awake(microbatch)
        self._note_switched()

    def _note_switched(self) -> None:
        if self._switched_s is not None and not any(m.is_old for m in self.microbatches.values()):
            self._counts.last_switch_ms = 1e3 * (self.stepper.now_s() - self._switched_s)
            self._switched_s = None

    @property
    def is_idle(self) -> bool:
        busy = any(m.content.num_used or not m.is_idle for m in self.microbatches.values())
        return not (self.queue or busy or self._moves)

    def _make_content(self, number: int, lane: LoadedLane) -> SequenceBatch:
        group = self._opening
        assert group is not None, "a microbatch is opened for a group"
        self._by_number[number] = group
        return self._make_batch(
            number, group, self.pool_of(group), lambda request: self._evict(number, request)
        )

    def group_of(self, microbatch: RoutedMicrobatch) -> RoutedGroup:
        return self._by_number[microbatch.number]

    def pool_of(self, group: RoutedGroup) -> PagePool | None:
        """None: each microbatch has its own."""
        if group.home is None:
            return None
        if group.home not in self.pools:
            shape = group.shape
            self.pools[group.home] = PagePool(shape.pool_tokens // PAGE, self._is_caching, shape.windows)
        return self.pools[group.home]

    def every_pool(self) -> list[PagePool]:
        shared = [pool for group in self.groups if (pool := self.pool_of(group)) is not None]
        own = [batch_of(m).pool for m in list(self.microbatches.values()) if self.group_of(m).home is None]
        return list({id(pool): pool for pool in (*shared, *own)}.values())

    def views(self) -> tuple[GroupView, ...]:
        """Thread-safe."""
        found, numbers = [], dict(self._by_number)
        for routed in self.groups:
            size = routed.group.size
            batches = [m.content for n, m in list(self.microbatches.items()) if numbers.get(n) is routed]
            places = sum(content.num_used for content in batches)
            coming = sum(content.num_coming for content in batches if isinstance(content, SequenceBatch))
            most = size.sequences * size.microbatches
            sizes = (size.role, size.devices, size.sequences, size.tokens, size.microbatches)
            found.append(GroupView(*sizes, most, places, coming))
        return tuple(found)

    def _usable(self) -> list[RoutedGroup]:
        """Groups without a lost device: of the current policy, else of any."""
        lost = self.stepper.lanes.lost
        for groups in (self.groups, [group for policy in self._groups for group in policy]):
            usable = [group for group in groups if not group.lane.devices & lost]
            if usable:
                return usable
        return []

    def open_of(self, group: RoutedGroup) -> list[RoutedMicrobatch]:
        """In order of opening."""
        return [m for n, m in self.microbatches.items() if self._by_number[n] is group and not m.is_old]

    def _place(self, group: RoutedGroup, is_pull: bool = False) -> RoutedMicrobatch | RoutedGroup | None:
        """A microbatch of a group with room for one more; the group itself: open one; None: it is full.

        On one device microbatches are filled one after the other, because every step reads all weights; on
        several they are filled evenly. `is_pull`: only microbatches that read no prompt.
        """
        opened = self.open_of(group)
        most = self._config.depth
        has_number = most is None or len(self.microbatches) < most
        can_open = has_number and len(opened) < group.group.microbatches
        is_divided = len(group.lane.devices) > 1
        if is_divided and can_open and all(m.content.num_used for m in opened):
            return group
        fitting = [m for m in opened if m.content.takes and not (is_pull and batch_of(m).is_reading)]
        if fitting:
            return min(fitting, key=lambda m: m.content.num_used) if is_divided else fitting[0]
        return group if can_open else None

    def _opened(self, place: RoutedMicrobatch | RoutedGroup) -> RoutedMicrobatch:
        if isinstance(place, RoutedGroup):
            self._opening = place
            place = self._open(place.lane)
            place.without = frozenset()
        return place

    def _close(self, microbatch: RoutedMicrobatch) -> None:
        super()._close(microbatch)
        del self._by_number[microbatch.number]
        self._note_switched()

    def _work_s(self, group: RoutedGroup) -> float:
        batches = [batch_of(microbatch) for microbatch in self.open_of(group)]
        unread, unanswered = sum(x.num_unread for x in batches), sum(x.num_unanswered for x in batches)
        return unread * group.prompt_s + unanswered * group.answer_s

    def _found(self, request: ActiveRequest, group: RoutedGroup) -> int:
        pool = None if group.home is None else self.pools.get(group.home)
        if not self._is_caching or pool is None or request.wants_prompt:
            return 0
        return PAGE * len(pool.find(request.keys((len(request.sequence) - 1) // PAGE))[0])

    @abstractmethod
    def _stay(self, transit: MovingSequence) -> None: ...

    @abstractmethod
    def _evict(self, number: int, request: ActiveRequest) -> bool: ...
