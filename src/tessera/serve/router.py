"""Router: the scheduler of a service. Requests go to groups of microbatches, sequences from group to group.

    mixed     takes requests, the group with the least predicted seconds of work first
    prompts   takes requests until `BACKLOG` of its largest steps are waiting; its sequences answer elsewhere
    answers   takes sequences whose prompts are read
    mixed beside prompts   also takes those; a microbatch that reads no prompt pulls one from the queue

Without a usable prompts group, or with nothing but prompts groups, every group is mixed.

A request is placed in a prompts group when a row and pages for its prompt and one page more are reserved at
its destination, so nothing waits for room while it holds some. If the destination is lost or a move fails,
the sequence answers where it is; if the source is lost, it restarts. Pages of a move are given back when it
has ended.

A switch of policy hands sequences over: in place where the home stays, else by moving pages; else they answer
where they are or, with an unread prompt, restart.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import count

from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import Scheduler, SchedulerConfig, Watcher
from tessera.execute.stepper import DeviceBack, Moved, PageMove, Stepper
from tessera.ir import Group, Role, ServicePlan
from tessera.kernels import PAGE
from tessera.serve.answer import ActiveRequest
from tessera.serve.groups import (
    MovingSequence,
    PagesInFlight,
    RoutedGroup,
    RoutedMicrobatch,
    batch_of,
    plans_of,
)
from tessera.serve.pages import PagePool, Tables, first_seen, listed, num_extended, pages_for
from tessera.serve.records import GroupView, Shape
from tessera.serve.sequences import BatchConfig, SequenceBatch
from tessera.serve.step_inputs import Steps

BACKLOG = 2
# For the mean length of answers.
NEWEST_WEIGHT = 0.05


class Router(Scheduler[ActiveRequest]):
    def __init__(
        self,
        stepper: Stepper,
        policies: Sequence[ServicePlan],
        shape: Shape,
        batches: BatchConfig,
        config: SchedulerConfig,
        watcher: Watcher[ActiveRequest],
    ) -> None:
        self.policies, self._shape, self._batches = tuple(policies), shape, batches
        self._counts, self._is_caching = batches.counts, batches.is_caching and shape.is_paged
        # By home.
        self.pools: dict[int, PagePool] = {}
        # By policy; by open microbatch.
        self._groups: list[list[RoutedGroup]] = []
        self._by_number: dict[int, RoutedGroup] = {}
        self._opening: RoutedGroup | None = None
        self._transits: dict[ActiveRequest, MovingSequence] = {}
        self._moves: dict[int, PagesInFlight] = {}
        self._move_numbers = count()
        self._mean_answer = float(max(1, policies[0].load.output_tokens))
        self._switched_s: float | None = None
        super().__init__(stepper, self._make_content, config, watcher)

    def _measure(self) -> None:
        if not self._groups:
            lanes = {id(lane.plan): lane for lane in self.stepper.lanes.all}
            self._groups = [[self._routed(g, lanes[id(g.plan)]) for g in p.groups] for p in self.policies]
        self.service_plan, self.groups = self.policies[self.policy], self._groups[self.policy]
        self.plan = self.service_plan.groups[0].plan
        for group in self.groups:
            self.pool_of(group)

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

        False if their plans are loaded already.
        """
        name = self.service_plan.policy
        plans = plans_of(sorted(policies, key=lambda policy: policy.policy != name))
        is_new = {*map(id, plans)} != {*map(id, self.stepper.plans)}
        if is_new:
            self.stepper.load(plans)
            self._switched_s = self.stepper.now_s()
        self.policies, self._groups = tuple(policies), []
        names = [policy.policy for policy in policies]
        self.policy = names.index(name) if name in names else 0
        self._renew()
        self._fail_without_lanes()
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
            self._wake_up(microbatch)
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
        pool, evict = self.pool_of(group), partial(self._evict, number)
        can_give = group.lane.can_give
        return SequenceBatch(number, group.shape, group.steps, self._batches, pool, evict, can_give)

    def group_of(self, microbatch: RoutedMicrobatch) -> RoutedGroup:
        return self._by_number[microbatch.number]

    def pool_of(self, group: RoutedGroup) -> PagePool:
        if group.home not in self.pools:
            shape = group.shape
            self.pools[group.home] = PagePool(shape.pool_tokens // PAGE, self._is_caching, shape.windows)
        return self.pools[group.home]

    def every_pool(self) -> list[PagePool]:
        """Those of current groups and of open microbatches; thread-safe."""
        homes = dict(self.pools)
        shared = [homes[group.home] for group in self.groups if group.home in homes]
        others = [batch_of(microbatch).pool for microbatch in list(self.microbatches.values())]
        return list({id(pool): pool for pool in (*shared, *others)}.values())

    def views(self) -> tuple[GroupView, ...]:
        """Thread-safe."""
        views, numbers = [], dict(self._by_number)
        for routed in self.groups:
            size = routed.group.size
            batches = [batch_of(m) for n, m in list(self.microbatches.items()) if numbers.get(n) is routed]
            view = GroupView(
                **asdict(size),
                max_sequences=size.sequences * size.microbatches,
                places=sum(batch.num_used for batch in batches),
                waiting=sum(batch.num_coming for batch in batches),
            )
            views.append(view)
        return tuple(views)

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

        On one device microbatches are filled one by one, because every step reads all weights; on several,
        evenly. `is_pull`: only microbatches that read no prompt.
        """
        opened = self.open_of(group)
        has_number = next(self._free_numbers(group.lane), None) is not None
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

    def _num_cached(self, request: ActiveRequest, group: RoutedGroup) -> int:
        return PAGE * len(request.cached(self.pool_of(group))[0])

    def _seat_next(self) -> bool:
        request = self.queue.peek()
        if request is None:
            return False
        request.predicted = min(round(self._mean_answer), request.ask.max_tokens)
        groups = self._usable()
        prompts = [group for group in groups if group.role is Role.PROMPTS]
        others = [group for group in groups if group.role is not Role.PROMPTS]
        if not (prompts and others):
            return self._seat(request, groups)
        near = [group for group in others if self._reads_rest(request, group)]
        if near and self._seat(request, near):
            return True
        if self._seat_prompt(request, prompts, others):
            return True
        return self._seat(request, [group for group in others if group.role is Role.MIXED], is_pull=True)

    def _reads_rest(self, request: ActiveRequest, group: RoutedGroup) -> bool:
        """True if one step reads what this home's pages lack."""
        left = len(request.sequence) - self._num_cached(request, group)
        return left < len(request.sequence) and left <= group.shape.sizes[-1] - group.shape.rows

    def _seat(self, request: ActiveRequest, groups: Sequence[RoutedGroup], is_pull: bool = False) -> bool:
        """Begins a request where it ends soonest."""
        places = [(group, place) for group in groups if (place := self._place(group, is_pull)) is not None]
        if not places:
            return False

        def end_s(choice: tuple[RoutedGroup, RoutedMicrobatch | RoutedGroup]) -> float:
            group = choice[0]
            num = len(request.sequence) - self._num_cached(request, group)
            return self._work_s(group) + num * group.prompt_s + request.predicted * group.answer_s

        _, place = min(places, key=end_s) if len(places) > 1 else places[0]
        return self._add(request, self._opened(place))

    def _add(self, request: ActiveRequest, microbatch: RoutedMicrobatch, goes_on: bool = False) -> bool:
        popped = self.queue.pop()
        assert popped is request, "only this thread takes requests"
        batch_of(microbatch).add(request, goes_on)
        self._wake_up(microbatch)
        self._watcher.seated(request, microbatch)
        return True

    def _seat_prompt(
        self, request: ActiveRequest, prompts: Sequence[RoutedGroup], others: Sequence[RoutedGroup]
    ) -> bool:
        for group in prompts:
            unread = sum(batch_of(m).num_unread for m in self.open_of(group))
            place = self._place(group) if unread < BACKLOG * group.shape.sizes[-1] else None
            if place is None:
                continue
            if request.num_out + 1 >= request.ask.max_tokens:  # it ends with its first token
                return self._add(request, self._opened(place))
            transit = self._begin_transit(request, place, others, len(request.sequence))
            if transit is not None:
                return self._add(request, transit.source, goes_on=True)
        return False

    def drop(self, request: ActiveRequest) -> None:
        self._retries.pop(request, None)
        transit = self._transits.get(request)
        if transit is not None:
            self._end_transit(transit)
        if request.num_out:
            self._mean_answer += NEWEST_WEIGHT * (request.num_out - self._mean_answer)

    def _start(self, microbatch: RoutedMicrobatch) -> None:
        super()._start(microbatch)
        group = self._by_number.get(microbatch.number)
        if group is None or group.role is not Role.ANSWERS:
            return
        batch = batch_of(microbatch)
        waiting = batch.preempted()
        if waiting and any(g.role is Role.PROMPTS for g in self._usable()):
            for request in waiting:
                self._restart(request, batch)

    def _restart(self, request: ActiveRequest, batch: SequenceBatch) -> None:
        batch.leave(request)
        self.queue.give_back(request)
        self._may_seat = True

    def _begin_transit(
        self,
        request: ActiveRequest,
        source: RoutedMicrobatch | RoutedGroup,
        groups: Sequence[RoutedGroup],
        read: int,
    ) -> MovingSequence | None:
        """Reserves a row and pages where a sequence that has read `read` tokens goes on; None: no room.

        A group of the source's home comes first, then those with the least work. Pages behind windows are
        not reserved.
        """
        home = (source if isinstance(source, RoutedGroup) else self.group_of(source)).home
        length = len(request.sequence)
        num = min(length + 1 + PAGE, len(request.ask.prompt) + request.ask.max_tokens)

        def work_s(group: RoutedGroup) -> float:
            return -1.0 if group.home == home else self._work_s(group)

        for group in sorted(groups, key=work_s):
            place, pool = self._place(group), None
            if place is None:
                continue
            cached: Tables = []
            ends: list[int] = []
            if group.home != home:
                pool = self.pool_of(group)
                cached, ends = request.cached(pool, read=read), group.shape.ends(num, read)
                firsts = [max(len(cached[0]), first_seen(read, window)) for window in pool.windows]
                # Pages behind a window are 0.
                tables = zip(cached, firsts, strict=True)
                cached = [table if len(table) == first else [0] * first for table, first in tables]
                spare = sum(m.content.num_used for m in self.open_of(group)) * len(ends)
                if not pool.has_room(cached, ends, spare):
                    continue
            destination, num_expected = self._opened(place), num_extended(cached, ends)
            if not batch_of(destination).expect(num_expected):
                continue
            pages = [] if pool is None else pool.extended(cached, ends)
            num_sent = min(map(len, cached), default=0)
            transit = MovingSequence(
                request, self._opened(source), destination, pool, pages, num_sent, num_expected
            )
            self._transits[request] = transit
            return transit
        return None

    def _settled(self, microbatch: RoutedMicrobatch) -> None:
        if self._transits:
            for transit in list(self._transits.values()):
                if microbatch in (transit.source, transit.destination):
                    self._send(transit)
        self.awake_waiting()

    def awake_waiting(self) -> None:
        for microbatch in self.microbatches.values():
            if microbatch.is_idle and microbatch.content.num_used:
                self._wake_up(microbatch)

    def _send(self, transit: MovingSequence) -> None:
        """Sends full pages the destination lacks; once all tokens are read, the rest and the sequence."""
        request, batch = transit.request, batch_of(transit.source)
        position = batch.position(request)
        if position is None:
            return
        tables, read = position
        is_read = read == batch.by_request[request].stop
        has_row = is_read and not self._shape.is_paged
        if has_row and transit.in_flight:
            return
        end = pages_for(read) if is_read else read // PAGE
        for table in transit.pages:  # none if both ends share one pool
            while transit.pool is not None and len(table) < end:  # it was preempted, and read one more
                if not transit.pool.num_free:
                    self._stay(transit)
                    return
                table.append(transit.pool.take())
        row = batch_of(transit.destination).take_row() if has_row else None
        if has_row and row is None:
            return
        first, transit.num_sent = transit.num_sent, max(transit.num_sent, end)
        pairs = [
            pair
            for source, destination in zip(tables, transit.pages, strict=False)
            for pair in zip(source[first:end], destination[first:end], strict=True)
            if all(pair)  # neither behind a window
        ]
        if pairs or has_row:
            number = next(self._move_numbers)
            sent = tuple(source for source, _ in pairs)
            reserved = tuple(destination for _, destination in pairs)
            batch.pool.share(sent)
            transit.in_flight += 1
            transit.row = row
            rows = None if row is None else (batch.by_request[request].row, row)
            self._moves[number] = PagesInFlight(transit, sent)
            self.stepper.move(PageMove(number, *transit.ends, sent, reserved, rows))
        elif is_read and not transit.in_flight:
            self._arrive(transit, read)

    def _arrive(self, transit: MovingSequence, read: int, row: int | None = None) -> None:
        request, source = transit.request, batch_of(transit.source)
        del self._transits[request]
        if transit.pool is None:
            pages = source.depart(request)
        else:
            pages = transit.pages
            source.leave(request)
        batch_of(transit.destination).arrive(request, pages, read, transit.num_expected, row)
        self._may_seat = True
        self._wake_up(transit.destination)
        self._wake_up(transit.source)

    def _moved(self, event: Moved) -> None:
        move = self._moves.pop(event.number)
        transit, batch = move.transit, batch_of(move.transit.source)
        batch.pool.give_back(move.pages)
        transit.in_flight -= 1
        row, transit.row = transit.row, None
        has_failed = transit.is_over or bool(event.failure)
        if row is not None:
            if has_failed:
                batch_of(transit.destination).give_row(row)
            if transit.is_over:
                self._cancel(transit)
        if not has_failed:
            self._counts.pages_moved += len(move.pages)
            if row is not None:
                position = batch.position(transit.request)
                assert position is not None, "it is held there"
                self._arrive(transit, position[1], row)
            else:
                self._send(transit)
        elif transit.is_over:
            transit.release()
        else:
            self._stay(transit)
        self._may_seat = True
        self.awake_waiting()
        for end in transit.ends:
            if end in self.microbatches and self.microbatches[end].is_old:
                self._wake_up(self.microbatches[end])

    def _can_close(self, microbatch: RoutedMicrobatch) -> bool:
        return not any(microbatch.number in move.transit.ends for move in self._moves.values())

    def _stay(self, transit: MovingSequence) -> None:
        """The sequence answers where it is, or restarts if that microbatch is old."""
        self._end_transit(transit)
        batch = batch_of(transit.source)
        if transit.request.batch is not batch:
            return
        if transit.source.is_old:
            self._restart(transit.request, batch)
        else:
            batch.hold(transit.request, False)
            self._wake_up(transit.source)

    def _end_transit(self, transit: MovingSequence) -> None:
        del self._transits[transit.request]
        transit.is_over = True
        if transit.row is None:
            self._cancel(transit)
        transit.release()
        self._may_seat = True
        self.awake_waiting()

    def _cancel(self, transit: MovingSequence) -> None:
        if self.microbatches.get(transit.destination.number) is transit.destination:
            batch_of(transit.destination).cancel(transit.num_expected)

    def _leave_old(self, microbatch: RoutedMicrobatch) -> bool:
        batch, lost = batch_of(microbatch), self.stepper.lanes.lost
        usable = [group for group in self.groups if not group.lane.devices & lost]
        groups = [group for group in usable if group.role is not Role.PROMPTS] or usable
        for request in batch.requests() if groups else ():
            position = batch.position(request)
            if request in self._transits or (position and self._move(request, microbatch, groups)):
                continue
            is_reading = position is None or position[1] < len(request.sequence) - 1
            if position is None or (is_reading and batch.can_move):
                self._restart(request, batch)
        return False

    def _move(self, request: ActiveRequest, source: RoutedMicrobatch, groups: Sequence[RoutedGroup]) -> bool:
        """Begins to move a sequence to one of these groups; to answer only if its tokens are read."""
        batch = batch_of(source)
        position = batch.position(request)
        if position is None:
            return False
        roles = (Role.MIXED,) if position[1] < len(request.sequence) - 1 else tuple(Role)
        transit = self._begin_transit(request, source, [g for g in groups if g.role in roles], position[1])
        if transit is None:
            return False
        batch.hold(request)
        self._send(transit)
        return True

    def _evict(self, number: int, request: ActiveRequest) -> bool:
        """Moves a sequence elsewhere if that is quicker than reading it again."""
        source = self.microbatches[number]
        group, batch = self.group_of(source), batch_of(source)
        position = batch.position(request)
        if request in self._transits or position is None:
            return False
        groups = [g for g in self._usable() if g.home != group.home and g.role is not Role.PROMPTS]
        move_s = len(listed(position[0])) * self._page_s(group.home)
        if move_s > position[1] * group.prompt_s or not self._move(request, source, groups):
            return False
        self._counts.evictions += 1
        return True

    def _dropped(self, device: str, gone: Sequence[RoutedMicrobatch]) -> None:
        homes: dict[int, frozenset[str]] = {}
        lanes = [group.lane for policy in self._groups for group in policy]
        for lane in (*lanes, *(microbatch.lane for microbatch in gone)):
            if lane.home is not None:
                homes[lane.home] = homes.get(lane.home, lane.devices) & lane.devices
        for home, devices in homes.items():
            if device in devices:
                self.pools.pop(home, None)
        numbers = {id(microbatch) for microbatch in gone}
        for transit in list(self._transits.values()):
            if id(transit.source) in numbers:
                self._end_transit(transit)
            elif id(transit.destination) in numbers:
                self._stay(transit)
        for microbatch in gone:
            batch_of(microbatch).clear()
        self.awake_waiting()

    def _device_back(self, event: DeviceBack) -> None:
        super()._device_back(event)
        self._renew()
