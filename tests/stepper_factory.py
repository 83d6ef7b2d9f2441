"""Requests of the small model with state through any stepper, step by step, with what a test does between."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import engine_factory as made
from tessera.execute.offline import RunResult
from tessera.execute.stepper import DeviceBack, DeviceLost, StepCall, StepDone, Stepper


@dataclass
class Played:
    """What a stepper told beside the steps' ends."""

    lost: list[DeviceLost] = field(default_factory=list)
    back: list[DeviceBack] = field(default_factory=list)


@dataclass
class _Seat:
    """One request on its way through a microbatch."""

    number: int
    lane: int
    request: Any
    # (step, run), last first.
    left: list[tuple[int, int]]
    result: RunResult


def play(
    stepper: Stepper,
    numbers: list[int],
    microbatches: int = 3,
    policy: int = 0,
    between: Callable[[int], None] = lambda num_done: None,
    limit_s: float = 60.0,
) -> tuple[Mapping[int, RunResult], Played]:
    """Runs requests to their end, again from the start where a device was lost; (results, what was told)."""
    requests = made.make_requests(max(numbers) + 1)
    waiting, seats = list(numbers)[::-1], dict[int, _Seat]()
    results: dict[int, RunResult] = {}
    told = Played()
    num_done = 0
    until = stepper.now_s() + limit_s
    while len(results) < len(numbers):
        for microbatch in range(microbatches):
            if microbatch in seats or not waiting:
                continue
            lane = stepper.lanes.take(policy)
            if lane is None:
                break
            number = waiting.pop()
            left = [(s, r) for s, count in enumerate(made.COUNTS) for r in range(count)][::-1]
            seat = _Seat(number, lane.number, requests[number], left, RunResult(lane.index))
            seats[microbatch] = seat
            stepper.open(microbatch, lane.number, seat.request.state())
            _start(stepper, microbatch, seat)
        event = stepper.take(max(0.0, until - stepper.now_s()))
        assert stepper.now_s() < until, f"not done in time: {told}"
        match event:
            case StepDone():
                seat = seats[event.microbatch]
                seat.result.outputs.append(dict(event.outputs))
                seat.result.state |= event.state
                num_done += 1
                between(num_done)
                if seat.left:
                    _start(stepper, event.microbatch, seat)
                    continue
                results[seat.number] = seat.result
                del seats[event.microbatch]
                stepper.close(event.microbatch)
                stepper.lanes.give_back(seat.lane)
            case DeviceLost():
                told.lost.append(event)
                for microbatch in event.microbatches:
                    seat = seats.pop(microbatch)
                    stepper.lanes.give_back(seat.lane)
                    waiting.append(seat.number)
            case DeviceBack():
                told.back.append(event)
    return results, told


def _start(stepper: Stepper, microbatch: int, seat: _Seat) -> None:
    step, run = seat.left.pop()
    last = seat.result.outputs[-1] if seat.result.outputs else {}
    inputs = seat.request.inputs(step, run, last)
    stepper.start(StepCall(microbatch, step, inputs, wants_state=not seat.left))


def are_right(results: Mapping[int, RunResult]) -> bool:
    """True iff every request gave the model itself's bits."""
    return all(made.is_right(number, result) for number, result in results.items())
