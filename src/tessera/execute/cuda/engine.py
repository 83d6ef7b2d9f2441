"""CudaEngine: requests through the graphs of one or more plans, on GPUs of this process.

Every slot has one graph for each program of each lane of each plan, over the same weights and the same state.
To start a request is to copy its inputs in and launch the graphs of its lane one after the other on the
slot's stream; nothing waits for the CPU until the request is done. To switch the policy is to launch another
plan's graphs for the next request: what is in flight goes on.

A GPU that fails, or a request that does not end in time, ends the run: one message says why, and every
request that has no result carries it (`RunResult.error`), also those whose results cannot be read any more.
Where memory runs out, what is in flight is finished first. Memory is counted before anything is allocated.
Random numbers are not handled.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tessera.errors import DeviceMemoryError, TesseraError, WorkerError
from tessera.execute.cuda.captured import Captured
from tessera.execute.cuda.graph import ProgramGraph
from tessera.execute.cuda.issue import Track
from tessera.execute.cuda.launches import bytes_of
from tessera.execute.cuda.requests import TimedOut, fill, first_line, rescue
from tessera.execute.cuda.slot import Slot
from tessera.execute.cuda.spans import Since, first_start, lateness_us, spans_of
from tessera.execute.flight import Request, RunResult, computes
from tessera.execute.schedule import LaneTable
from tessera.ir import Clock, Program, Span, Timeline

Tensors = Mapping[str, torch.Tensor]
# How long the CPU looks away between two looks at requests in flight.
POLL_S = 20e-6


@dataclass
class Flight:
    """A request in a slot."""

    number: int
    request: Request
    plan: int
    result: RunResult
    start: Any
    stop: Any = None
    submitted_s: float = 0.0
    # State tensors that are still being read.
    kept: list[Any] = field(default_factory=list)
    # (program's graph, its records after the run) of a profiled run.
    records: list[tuple[ProgramGraph, dict[int, torch.Tensor]]] = field(default_factory=list)


class CudaEngine:
    """Runs requests through captured plans."""

    def __init__(
        self,
        captured: Captured,
        keeps_results: bool = True,
        keeps_state: bool = False,
        timeout_s: float = 120.0,
    ) -> None:
        """`keeps_results`: outputs of every run and the final state are handed out. `keeps_state`: a slot
        starts a request with the state it has, for runs whose results nobody looks at. `timeout_s`: a request
        that takes longer ends the run.
        """
        self._captured = captured
        self._keeps_results, self._keeps_state, self._timeout_s = keeps_results, keeps_state, timeout_s
        self._spans: list[Span] = []
        self._clock: Since | None = None
        self._began: Any = None
        self._tables: list[LaneTable] = []
        self._pending: list[tuple[int, Request]] = []
        self._flights: dict[int, Flight] = {}
        self._results: dict[int, RunResult] = {}
        # Of the last `run`: why requests failed, the first cause first.
        self.faults: list[TesseraError] = []
        # Of the last `run`: how long the CPU took to start each request.
        self.submit_s: list[float] = []
        # Of the last `run`, if profiled: see `lateness_us`.
        self.late_us: dict[str, tuple[float, float]] = {}

    def run(
        self,
        requests: Sequence[Request],
        policy: Callable[[int], int] = lambda number: 0,
        on_done: Callable[[int], None] = lambda number: None,
        *,
        is_strict: bool = True,
    ) -> list[RunResult]:
        """Runs all requests, a slot each; `policy(number)` is the plan that a request follows.

        Where requests fail, raises the first fault; if not strict, their results carry an error each.
        """
        self._tables = [LaneTable(p.lanes, p.slots, p.lane_table) for p in self._captured.plans]
        self._pending = list(enumerate(requests))[::-1]
        self._flights, self._results = {}, {}
        self._begin()
        while self._flights or (self._pending and not self.faults):
            try:
                self._look(policy, on_done)
            except torch.OutOfMemoryError as error:  # only for who asked for more: the others go on
                remedy = "Use fewer slots, or run without keeping results."
                self.faults.append(DeviceMemoryError(first_line(error), remedy, self._captured.names))
            except TimedOut as error:
                self._fail(str(error), "Lower the load or raise the time limit.")
            except RuntimeError as error:
                self._fail(f"the GPU failed: {first_line(error)}", "Start again in a new process.")
                self._rescue()
        if self.faults and is_strict:
            raise self.faults[0]
        return [self._results.get(number) or self._unstarted() for number in range(len(requests))]

    def _look(self, policy: Callable[[int], int], on_done: Callable[[int], None]) -> None:
        """One look at every slot: ends what is done, starts what waits."""
        for slot in range(self._captured.num_slots):
            flight = self._flights.get(slot)
            if flight is not None and self._is_done(flight):
                self._results[flight.number] = self._finish(slot, flight)
                del self._flights[slot]
                self._tables[flight.plan].give_back(flight.result.lane)
                on_done(flight.number)
            if slot not in self._flights and self._pending and not self.faults:
                number, request = self._pending.pop()
                plan = policy(number)
                self._flights[slot] = self.submit(slot, number, request, plan, self._tables[plan].take())
        time.sleep(POLL_S)

    def _unstarted(self) -> RunResult:
        return RunResult(-1, error=f"not run, since {self.faults[0]}")

    def _fail(self, what: str, remedy: str) -> None:
        """Nothing that is in flight will end."""
        in_flight = ", ".join(f"{f.number} (lane {f.result.lane})" for f in self._flights.values())
        message = f"{what}; requests {in_flight or 'none'} were in flight"
        self.faults.append(WorkerError(message, remedy, self._captured.names))
        for flight in self._flights.values():
            self._results[flight.number] = replace(flight.result, outputs=[], state={}, error=message)
        self._flights = {}

    def _rescue(self) -> None:
        """Of what had ended before, results that can still be read are kept."""
        for number, result in self._results.items():
            if not result.error:
                self._results[number] = rescue(result, self.faults[-1].message)

    def submit(self, slot: int, number: int, request: Request, plan: int, lane: int) -> Flight:
        """Starts a request and returns at once; the slot must be free."""
        place = self._captured.slots[slot]
        place.origin.wait_stream(torch.cuda.current_stream(place.origin.device))
        result = RunResult(lane, plan, slot=slot)
        flight = Flight(number, request, plan, result, torch.cuda.Event(enable_timing=True))
        flight.submitted_s = time.monotonic()
        with torch.no_grad(), torch.cuda.stream(place.origin):
            flight.start.record()
            state = {} if self._keeps_state else dict(request.state())
            last: Tensors = {}
            for program in self._captured.programs[plan][lane]:
                for run in range(program.count):
                    last = self._run_program(place, flight, program, run, state, last)
            if self._keeps_results:
                flight.result.state = self._final_state(place, self._captured.programs[plan][lane])
            flight.stop = torch.cuda.Event(enable_timing=True)
            flight.stop.record()
        self.submit_s.append(time.monotonic() - flight.submitted_s)
        return flight

    def timeline(self) -> Timeline:
        """What the last `run` did, by the GPU's clock; microseconds are divided by the time scale.

        Only plans that were captured to be profiled have spans.
        """
        spans = sorted(self._spans, key=lambda s: (s.start_us, s.stop_us))
        zero = spans[0].start_us if spans else 0.0
        moved = tuple(replace(s, start_us=s.start_us - zero, stop_us=s.stop_us - zero) for s in spans)
        ends: dict[int, float] = {}
        for span in moved:
            ends[span.request] = max(ends.get(span.request, 0.0), span.stop_us)
        return Timeline(Clock.MEASURED, moved, tuple((r, 0.0, stop) for r, stop in sorted(ends.items())))

    # Requests -----------------------------------------------------------------------------------------

    def _run_program(
        self,
        slot: Slot,
        flight: Flight,
        program: Program,
        run: int,
        state: dict[str, torch.Tensor],
        last: Tensors,
    ) -> Tensors:
        """One replay; returns the outputs, or the ones before if the program only moves state."""
        graph = self._captured.graph(slot.number, program)
        if computes(program):
            given = flight.request.inputs(program.step, run, last)
            self._load_inputs(slot, program.step, given)
            flight.kept.append(given)
        for buffer, device in program.homes:
            name = graph.trace.buffers[buffer].name
            if name in state:
                tensor = state.pop(name)
                flight.kept.append(tensor)
                fill(slot.state[device, name], tensor, f"state '{name}'")
        outputs = graph.replay()
        if self._captured.is_profiled:
            flight.records.append((graph, {o: r.clone() for o, r in graph.records.items()}))
        if not computes(program):
            return last
        if self._keeps_results:
            outputs = {name: tensor.clone() for name, tensor in outputs.items()}
            flight.result.outputs.append(outputs)
        return outputs

    def _load_inputs(self, slot: Slot, step: int, given: Tensors) -> None:
        done: set[int] = set()
        for (_, of_step, name), storage in slot.inputs.items():
            if of_step == step and storage.data_ptr() not in done and storage.nbytes():
                if name not in given:
                    raise WorkerError(f"input '{name}' was not given", "Give every input of the step.")
                fill(storage, given[name], f"input '{name}'")
                done.add(storage.data_ptr())

    def _final_state(self, slot: Slot, programs: Sequence[Program]) -> dict[str, torch.Tensor]:
        """State after the last run, as flat bytes by name, from where it ended up."""
        homes: dict[str, int] = {}
        for program in programs:
            for buffer, device in program.homes:
                homes[self._captured.traces[program.step].buffers[buffer].name] = device
        found = {}
        for name, device in homes.items():
            storage = slot.state[device, name]
            found[name] = bytes_of(storage, 0, storage.nbytes()).clone()
        return found

    def _is_done(self, flight: Flight) -> bool:
        if flight.stop.query():
            return True
        if time.monotonic() - flight.submitted_s > self._timeout_s:
            raise TimedOut(f"request {flight.number} did not end within {self._timeout_s:g} s")
        return False

    def _finish(self, slot: int, flight: Flight) -> RunResult:
        result = flight.result
        result.start_s = self._began.elapsed_time(flight.start) * 1e-3
        result.stop_s = self._began.elapsed_time(flight.stop) * 1e-3
        for graph, records in flight.records:
            rows: dict[Track, torch.Tensor] = graph.record_rows({o: r.cpu() for o, r in records.items()})
            if self._clock is None and (zero := first_start(rows)) is not None:
                self._clock = Since(zero, self._captured.scale)
            if self._clock is not None:
                cluster = self._captured.plans[0].cluster
                self._spans += spans_of(
                    graph.program,
                    graph.trace,
                    cluster,
                    rows,
                    flight.number,
                    slot,
                    self._clock,
                )
                for name, (late, held) in lateness_us(graph.program, cluster, rows, self._clock).items():
                    before = self.late_us.get(name, (0.0, 0.0))
                    self.late_us[name] = (before[0] + late, before[1] + held)
        flight.kept.clear()
        return result

    def _begin(self) -> None:
        self._spans, self._clock, self.submit_s, self.late_us = [], None, [], {}
        self.faults = []
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()
