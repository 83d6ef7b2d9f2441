"""Engine: runs requests through plans on one worker process per device.

The engine keeps `slots` requests in flight. A request is admitted under a policy (one of the plans), takes a
lane and follows that lane's programs; between two runs the request itself says what the next inputs are, so
that a language model can feed its own tokens back. Another policy may be chosen at any time: it holds for
requests admitted from then on, and nothing is drained, because all plans share weights and slots.

When a device is lost (its worker died, failed, cannot be reached, or let a run time out), one message names
the device and the instruction it was at. Requests whose lane uses the device are started again from their
inputs on a lane that avoids it; if there is none, they fail, and so do those that wait. No request is dropped
silently and no process is left behind.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from tessera.errors import TesseraError, WorkerError
from tessera.execute.answers import problem_of
from tessera.execute.blame import blame, whereabouts
from tessera.execute.crew import MakeHub, make_crew
from tessera.execute.flight import (
    AnyBatch,
    Flight,
    Request,
    RunResult,
    Tensors,
    check_batches,
    computes,
    make_flight,
    participants,
)
from tessera.execute.inbox import Hangup
from tessera.execute.messages import Begin, Cancel, Done, Failed, PeerLost
from tessera.execute.packing import Packed, pack, pack_all, unpack_all
from tessera.execute.spans import SpanLog
from tessera.ir import Plan, Program, Timeline

__all__ = ["AnyBatch", "Engine", "Request", "RunResult", "Tensors"]


class Engine:
    """One or more plans over the same weights with their workers; use it in a `with` statement.

    transport  how bytes travel between workers; see `transport`
    is_plain   workers do one instruction at a time and wait for each
    timeout_s  a run that takes longer counts its slowest device as lost; None: never
    hub        makes the way to the workers; by default processes of this machine
    """

    def __init__(
        self,
        plans: Plan | Sequence[Plan],
        weights: Tensors,
        num_threads: int = 1,
        *,
        transport: str = "shm",
        is_plain: bool = False,
        timeout_s: float | None = None,
        method: str = "spawn",
        hub: MakeHub | None = None,
    ) -> None:
        given = (plans,) if isinstance(plans, Plan) else tuple(plans)
        crew = make_crew(given, weights, num_threads, transport, is_plain, method, hub)
        self._plans, self._routes, self._hub = crew.plans, crew.routes, crew.hub
        self.footprints = crew.footprints
        self._names = self._plans[0].cluster.names
        self._timeout_s = timeout_s
        self._tickets = 0
        self._policy = 0
        self._log = SpanLog(self._plans[0], self._hub.clock_offset_s)
        self._flights: dict[int, Flight] = {}
        self._pending: list[tuple[int, Request | AnyBatch]] = []
        self._results: dict[int, RunResult] = {}
        # One message for every device that was lost, in order.
        self.faults: list[WorkerError] = []

    def __enter__(self) -> "Engine":
        try:
            self._hub.start()
        except BaseException:
            self._hub.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._hub.stop()

    def switch(self, policy: int) -> None:
        """Requests admitted from now on follow this plan; those in flight go on with theirs."""
        if not 0 <= policy < len(self._plans):
            raise TesseraError(f"there is no policy {policy}", f"Use 0 to {len(self._plans) - 1}.")
        self._policy = policy

    def run(
        self,
        requests: Sequence[Request | AnyBatch],
        on_done: Callable[[int], None] = lambda number: None,
        *,
        is_strict: bool = True,
    ) -> list[RunResult]:
        """Runs all requests, `slots` at a time; results in the order of the requests.

        Where requests fail because of lost devices, raises the last fault; if not strict, returns their
        results with an error in each.
        """
        check_batches(self._plans[0], requests)
        self._log.begin()
        self._routes.reset()
        self._abandon()
        self._pending = list(enumerate(requests))[::-1]
        self._results = {}
        self._admit_all()
        self._fail_pending()
        while self._flights:
            self._step(on_done)
        failed = [r for r in self._results.values() if r.error]
        if failed and is_strict:
            raise self._summary(len(requests), len(failed))
        return [self._results[number] for number in range(len(requests))]

    def timeline(self) -> Timeline:
        """What the last `run` did, by this machine's clock: one span per launch and transfer."""
        found = self._log.timeline()
        if not self._plans[0].variants:
            return found
        lanes = [(self._plans[r.policy], r.lane) for r in (self._results[n] for n, _, _ in found.requests)]
        return replace(found, weights=tuple(plan.weight_of(plan.lanes[lane]) for plan, lane in lanes))

    def compute_us(self) -> dict[str, float]:
        """Device -> CPU time of its launches in the last `run`."""
        return {name: self._log.cpu_us.get(name, 0.0) for name in self._names}

    def _summary(self, asked: int, failed: int) -> WorkerError:
        last = self.faults[-1]
        counts = f"{asked - failed} of {asked} requests were finished, {failed} failed"
        return WorkerError(f"{last.message}; no lane avoids it: {counts}", last.remedy, last.place)

    def _step(self, on_done: Callable[[int], None]) -> None:
        news = self._hub.take(self._patience())
        if news is None:
            self._time_out()
            return
        device, message = news
        match message:
            case Done():
                self._collect(device, message, on_done)
            case Hangup(reason):
                self._lose(device, reason or "the worker process ended before its work was done")
            case Failed(text, remedy):
                self._lose(device, text, remedy)
            case PeerLost(peer, text) if 0 <= peer < len(self._names):
                self._lose(peer, f"{self._names[device]} cannot reach it ({text})")
            case _:
                self._lose(device, f"the worker said {type(message).__name__} out of turn")

    def _patience(self) -> float | None:
        if self._timeout_s is None:
            return None
        oldest = min(flight.began_s for flight in self._flights.values())
        return max(0.0, oldest + self._timeout_s - time.monotonic())

    def _time_out(self) -> None:
        ticket, flight = min(self._flights.items(), key=lambda item: item[1].began_s)
        device = blame(self._hub, ticket, flight)
        self._lose(device, f"no answer within {self._timeout_s:g} s")

    def _admit_all(self) -> None:
        """Fills free slots; with no lane left, everything that waits fails."""
        taken = {flight.slot for flight in self._flights.values()}
        for slot in range(self._plans[self._policy].slots):
            if slot not in taken and self._pending:
                number, request = self._pending.pop()
                self._admit(number, request, slot, 0)

    def _admit(self, number: int, request: Request | AnyBatch, slot: int, restarts: int) -> None:
        route = self._routes.take(self._policy)
        if route is None:
            self._results[number] = RunResult(-1, self._policy, restarts=restarts, error=str(self.faults[-1]))
            return
        flight = make_flight(number, slot, request, route, self._routes, self._log.origin_s)
        flight.result.restarts = restarts
        self._send_run(flight)

    def _send_run(self, flight: Flight) -> None:
        """Starts the next run of a request on every device that takes part in it."""
        index, run = flight.left.pop()
        route = self._routes.all[flight.route]
        program, step = route.programs[index], route.programs[index].step - route.first_step
        last = flight.result.outputs[-1] if flight.result.outputs else {}
        inputs = pack_all(flight.request.inputs(step, run, last)) if computes(program) else {}
        fresh = self._take_state(flight, program)
        devices = participants(program, set(fresh))
        self._tickets += 1
        flight.program, flight.missing, flight.outputs = program, set(devices), {}
        flight.began_s = time.monotonic()
        self._flights[self._tickets] = flight
        for device in devices:
            state = fresh.get(device, {})
            order = Begin(self._tickets, flight.slot, flight.route, index, inputs, state, not flight.left)
            self._hub.order(device, order)  # one that is gone is heard of as a hang-up

    def _take_state(self, flight: Flight, program: Program) -> dict[int, dict[str, Packed]]:
        """Device -> the state that lives there and that this run is the first to use."""
        buffers = self._plans[0].graphs[program.step].trace.buffers
        found: dict[int, dict[str, Packed]] = {}
        for buffer, device in program.homes:
            name = buffers[buffer].name
            if name in flight.state:
                found.setdefault(device, {})[name] = pack(flight.state.pop(name))
        return found

    def _collect(self, device: int, done: Done, on_done: Callable[[int], None]) -> None:
        flight = self._flights.get(done.ticket)
        if flight is None:  # cancelled in the meantime
            return
        assert flight.program is not None, "a flight with a ticket has a program"
        trace = self._plans[0].graphs[flight.program.step].trace
        wrong = problem_of(done, trace, flight.program, device, flight.missing)
        if wrong:
            self._lose(device, wrong)
            return
        flight.missing.discard(device)
        flight.outputs |= unpack_all(done.outputs)
        flight.result.state |= unpack_all(done.state)
        self._log.add(device, done, flight.program, flight.number, flight.slot)
        if flight.missing:
            return
        del self._flights[done.ticket]
        if flight.outputs:
            flight.result.outputs.append(flight.outputs)
        if flight.left:
            self._send_run(flight)
            return
        flight.result.stop_s = time.monotonic() - self._log.origin_s
        self._results[flight.number] = flight.result
        self._routes.give_back(flight.route)
        on_done(flight.number)
        self._admit_all()

    def _lose(self, device: int, what: str, remedy: str = "") -> None:
        """Takes a device out; its requests start again elsewhere, or fail if there is no elsewhere."""
        if device in self._routes.lost:
            return
        where = whereabouts(self._plans[0], self._hub, device, self._flights)
        how = self._hub.end(device)
        self.faults.append(
            WorkerError(
                f"{what} ({how}), {where}",
                remedy or "Check the memory of this machine, then run again.",
                f"device {self._names[device]}",
            )
        )
        self._routes.lose(device)
        hit = {t: f for t, f in self._flights.items() if device in self._routes.all[f.route].devices}
        for ticket, flight in hit.items():
            del self._flights[ticket]
            self._log.forget(flight.number)
            for other in flight.missing - self._routes.lost:
                self._hub.order(other, Cancel(ticket))
        for flight in hit.values():
            self._admit(flight.number, flight.given, flight.slot, flight.result.restarts + 1)
        self._admit_all()
        self._fail_pending()

    def _fail_pending(self) -> None:
        """With no lane left, what waits fails too."""
        while self._pending and not self._routes.open():
            number, request = self._pending.pop()
            self._admit(number, request, 0, 0)

    def _abandon(self) -> None:
        """Frees the slots of a run that was interrupted."""
        for ticket, flight in self._flights.items():
            for device in flight.missing - self._routes.lost:
                self._hub.order(device, Cancel(ticket))
        self._flights = {}
