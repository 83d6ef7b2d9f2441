"""Issuing a program for GPUs, run on the CPU: the bits are right, and whoever must wait does.

Streams are stood in for by numbers; every wait is noted. Two uses of the same bytes, one of them a write,
must be ordered by the streams and the waits alone, since on a GPU nothing else orders them.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import models
import slices_model
from factories import make_cluster, make_plan
from tessera.capture import record
from tessera.execute import lower
from tessera.execute.cuda.issue import Ground, Issue
from tessera.execute.cuda.launches import Launches, bytes_of
from tessera.execute.cuda.order import Compute, Copy, Item, issue_order
from tessera.execute.cuda.undivided import Undivided, differing
from tessera.execute.engine import RunResult
from tessera.flow import UnitRequest, make_unit
from tessera.ir import BufferKind, Program, Region, Step, Trace, WorkUnit

CPU = torch.device("cpu")
# (storage, region, writes)
Use = tuple[int, Region, bool]


class NotedStreams:
    """Numbers for streams; remembers what each operation comes after, as a set of operations."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []  # operation -> all operations it surely comes after
        self._last: dict[Any, set[int]] = {}

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """One operation on a stream."""
        self.before.append(set(self._last.get(stream, set())))
        self._last[stream] = self.before[-1] | {len(self.before) - 1}
        yield

    def mark(self, stream: Any) -> set[int]:
        """Everything the stream has behind it."""
        return set(self._last.get(stream, set()))

    def wait(self, stream: Any, mark: set[int]) -> None:
        """The stream has that behind it too."""
        self._last[stream] = self._last.get(stream, set()) | mark


class DeafStreams(NotedStreams):
    """Streams of devices do not wait for copies."""

    def wait(self, stream: Any, mark: set[int]) -> None:
        """Only streams of pairs do."""
        if not isinstance(stream, int):
            super().wait(stream, mark)


class NotedLaunches(Launches):
    """Launches that remember which bytes of which storage they used."""

    def __init__(self, trace: Trace, uses: list[list[Use]]) -> None:
        super().__init__(trace, CPU)
        self._noted, self._uses = trace, uses
        self._kept: list[Any] = []

    def issue(self, index: int, memory: Any) -> None:
        """Issues, then notes the bytes."""
        super().issue(index, memory)
        mine: list[Use] = []
        for access in self._noted.launches[index].accesses:
            storage = memory[access.buffer]
            self._kept.append(storage)  # so that no address is used twice
            mine.append((storage.data_ptr(), access.region, access.write or access.atomic))
        self._uses.append(mine)


def run_noted(
    program: Program,
    trace: Trace,
    given: Sequence[dict[int, Any]],
    order: Sequence[Item] | None = None,
    streams: NotedStreams | None = None,
) -> tuple[NotedStreams, list[list[Use]], Sequence[dict[int, Any]]]:
    """Issues a program on the CPU; returns who waits for whom, what each operation uses, and the memory."""
    streams, uses = streams or NotedStreams(), list[list[Use]]()
    landing = {
        n: torch.full((trace.buffers[t.buffer].size_bytes,), 0x7F, dtype=torch.uint8).untyped_storage()
        for n, t in enumerate(program.transfers)
    }
    devices = range(len(program.instructions))
    ground = Ground(
        streams,
        {d: d for d in devices},
        {(t.src, t.dst): (t.src, t.dst) for t in program.transfers},
        {d: NotedLaunches(trace, uses) for d in devices},
        landing,
    )
    memory = [dict(g) for g in given]
    # Copies are noted from outside: their source is what the sender has when they are issued.
    issue = Issue(program, trace, ground, memory, "origin")
    plain_copy = issue._copy

    def copy(number: int) -> None:
        transfer = program.transfers[number]
        source = memory[transfer.src][transfer.buffer]
        plain_copy(number)
        region = Region(transfer.start, transfer.num_bytes)
        uses.append([(source.data_ptr(), region, False), (landing[number].data_ptr(), region, True)])

    issue._copy = copy  # type: ignore[method-assign]
    with torch.no_grad():
        issue.run(issue_order(program, trace) if order is None else order)
    return streams, uses, memory


def unordered(streams: NotedStreams, uses: list[list[Use]]) -> list[tuple[int, int]]:
    """Pairs of operations that use the same bytes, one writing, and that nothing orders."""
    found = []
    for later in range(len(uses)):
        for earlier in range(later):
            if earlier not in streams.before[later] and _conflict(uses[earlier], uses[later]):
                found.append((earlier, later))
    return found


def _conflict(a: list[Use], b: list[Use]) -> bool:
    return any(
        p == q and (w or v) and r.overlaps(s)
        for p, r, w in a
        for q, s, v in b
    )  # fmt: skip


def run_request(unit: WorkUnit, programs: Sequence[Program], weights: Any, request: UnitRequest) -> RunResult:
    """A request through a lane's programs on the CPU, checking the order of every run."""
    result = RunResult(0)
    state: dict[tuple[int, str], Any] = {}
    fresh = {n: t.clone() for n, t in request.state().items()}
    num = len(programs[0].instructions)
    for program in programs:
        trace = unit.graphs[program.step].trace
        names = [b.name for b in trace.buffers]
        for buffer, device in program.homes:
            if names[buffer] in fresh:
                state[device, names[buffer]] = fresh.pop(names[buffer]).untyped_storage()
        for run in range(program.count):
            last = result.outputs[-1] if result.outputs else {}
            inputs = request.inputs(program.step, run, last) if program.weights[0] or program.outputs else {}
            given = [_given(trace, program, d, weights, inputs, state) for d in range(num)]
            for transfer in program.transfers:
                if transfer.value < 0:
                    given[transfer.src][transfer.buffer] = state[transfer.src, names[transfer.buffer]]
            streams, uses, memory = run_noted(program, trace, given)
            assert [] == unordered(streams, uses)
            for transfer in (t for t in program.transfers if t.value < 0):
                moved = memory[transfer.src][transfer.buffer]
                state[transfer.dst, names[transfer.buffer]] = moved
            if program.outputs:
                views, tensor = dict(trace.outputs), Launches(trace, CPU).tensor
                result.outputs.append({n: tensor(memory[d], views[n]).clone() for n, d in program.outputs})
        for buffer, device in program.homes:
            storage = state[device, names[buffer]]
            result.state[names[buffer]] = bytes_of(storage, 0, storage.nbytes()).clone()
    return result


def _given(
    trace: Trace, program: Program, device: int, weights: Any, inputs: Any, state: Mapping[Any, Any]
) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for index, buffer in enumerate(trace.buffers):
        if buffer.kind is BufferKind.WEIGHT and index in program.weights[device]:
            if buffer.constant_hex:
                data = torch.frombuffer(bytearray.fromhex(buffer.constant_hex), dtype=torch.uint8).clone()
                found[index] = data.untyped_storage()
            else:
                found[index] = weights[buffer.name].untyped_storage()
        elif buffer.kind is BufferKind.INPUT and buffer.name in inputs:
            found[index] = inputs[buffer.name].untyped_storage()
        elif buffer.kind is BufferKind.STATE and (device, buffer.name) in state:
            found[index] = state[device, buffer.name]
        elif buffer.size_bytes == 0:
            found[index] = torch.empty(0, dtype=torch.uint8).untyped_storage()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_scattered_launches_give_the_undivided_bits_and_wait_where_they_must(seed: int) -> None:
    """However launches of the tiny Llama are scattered, bits are equal and no two uses of a byte race."""
    rng, unit = random.Random(seed), models.unit()
    workloads = [models.workload("prefill"), models.workload("decode")]
    request = UnitRequest(workloads, workloads[0].make_inputs(seed), seed)
    num = 2 + seed % 2
    placement = [models.random_placement(g, rng, num) for g in unit.graphs]
    plan = make_plan([g.trace for g in unit.graphs], [placement], unit.counts, make_cluster(num))
    weights = workloads[0].weights()

    found = run_request(unit, lower(plan)[0], weights, request)

    assert [] == differing(Undivided(unit, weights, CPU).run(request), found)


def slices_program(seed: int, away: int | None = None) -> tuple[WorkUnit, Program, UnitRequest]:
    """A placement of the step with every kind of hazard; `away`: only this launch is on the other device."""
    workload = slices_model.step(Step("slices_model:step", "decode", 1, 1))
    unit = make_unit([record(workload)])
    placement = models.random_placement(unit.graphs[0], random.Random(seed), 2)
    if away is not None:
        placement = [int(launch == away) for launch in range(len(placement))]
    plan = make_plan([unit.graphs[0].trace], [[placement]], unit.counts, make_cluster(2))
    return unit, lower(plan)[0][0], UnitRequest([workload], workload.make_inputs(0), 0)


def slices_memory(trace: Trace, program: Program, request: UnitRequest) -> list[dict[int, Any]]:
    """What both devices have before the step."""
    state = {(d, n): t.clone().untyped_storage() for n, t in request.state().items() for d in range(2)}
    return [_given(trace, program, d, {}, request.first, state) for d in range(2)]


@pytest.mark.parametrize("seed", range(12))
def test_overwrites_behind_copies_wait_for_them(seed: int) -> None:
    """In code that overwrites what it has just sent, results and order are right for every placement."""
    unit, program, request = slices_program(seed)

    found = run_request(unit, [program], {}, request)

    assert [] == differing(Undivided(unit, {}, CPU).run(request), found)


def test_without_waiting_for_departures_an_overwrite_races() -> None:
    """The check can fail: launch 1 reads on the other device what launch 3 overwrites on the first."""
    unit, program, request = slices_program(0, away=1)
    trace = unit.graphs[0].trace
    order = issue_order(program, trace)
    hasty = [replace(item, departures=()) if isinstance(item, Compute) else item for item in order]

    for items, is_right in ((order, True), (hasty, False)):
        streams, uses, _ = run_noted(program, trace, slices_memory(trace, program, request), items)
        assert is_right == (not unordered(streams, uses))


def test_without_waiting_for_arrivals_a_read_races() -> None:
    """The check can fail: a launch that does not wait for what it reads is found."""
    unit, program, request = slices_program(0, away=1)
    trace = unit.graphs[0].trace
    order = issue_order(program, trace)
    streams = DeafStreams()

    _, uses, _ = run_noted(program, trace, slices_memory(trace, program, request), order, streams)

    assert any(isinstance(item, Copy) for item in order)
    assert unordered(streams, uses)
