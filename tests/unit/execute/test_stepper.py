"""Steps of a served model on worker processes: the same bits as undivided, whatever the lane."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import steps_factory as factory
from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute.serving import StepDone
from tessera.execute.stepper import WorkerStepper
from tessera.ir import Lane, Placement, Plan
from tessera.serve.undivided import UndividedStepper


def workers(*plans: Plan) -> WorkerStepper:
    made = factory.prepared()
    return WorkerStepper(plans, made.model.weights(), made.model.shape, method="forkserver")


def undivided(steps: factory.Script, model: str = "tiny-llama") -> list[dict[str, torch.Tensor]]:
    with UndividedStepper(factory.prepared(model).model, 1) as stepper:
        stepper.open(0, 0)
        return factory.play(stepper, 0, steps)


@pytest.fixture(scope="module")
def stepper() -> Iterator[WorkerStepper]:
    """Four policies: one lane a device, one lane for latency, phases apart, layers apart."""
    plans = factory.prepared().plans
    coarse = [factory.plan_by(name) for name in ("prefill-decode", "layer-pipeline")]
    with workers(*plans, *coarse) as made:
        yield made


@pytest.mark.parametrize("policy", range(4))
def test_steps_give_the_models_bits_under_every_policy(stepper: WorkerStepper, policy: int) -> None:
    """Chunks, inserts and decodes in any lane give what the undivided model gives."""
    steps = factory.script(policy)
    stepper.open(1, policy)
    try:
        assert factory.is_same(factory.play(stepper, 1, steps), undivided(steps))
    finally:
        stepper.close(1)


def test_slots_side_by_side_do_not_mix(stepper: WorkerStepper) -> None:
    """Two slots that run at once, on other policies, each give their own results."""
    scripts = [factory.script(7), factory.script(8)]
    outputs: list[list[dict[str, torch.Tensor]]] = [[], []]
    for slot in (0, 1):
        stepper.open(slot, slot)
        stepper.run(slot, *scripts[slot][0])
    while any(len(o) < len(s) for o, s in zip(outputs, scripts, strict=True)):
        event = factory.done(stepper)
        outputs[event.slot].append(dict(event.outputs))
        if len(outputs[event.slot]) < len(scripts[event.slot]):
            stepper.run(event.slot, *scripts[event.slot][len(outputs[event.slot])])
    for slot in (0, 1):
        stepper.close(slot)
        assert factory.is_same(outputs[slot], undivided(scripts[slot]))


def test_a_slot_that_is_opened_again_starts_empty(stepper: WorkerStepper) -> None:
    """State of an earlier use, on this lane or another, is gone."""
    decode = factory.script(3)[2]
    for policy in (0, 1, 0):
        stepper.open(0, policy)
        first = factory.play(stepper, 0, [decode])
        factory.play(stepper, 0, factory.script(4))
        stepper.close(0)
        assert factory.is_same(first, undivided([decode]))


def test_outputs_that_nobody_wants_stay_away(stepper: WorkerStepper) -> None:
    """A skipped output is not sent."""
    stepper.open(0, 0)
    kind, inputs = factory.script(0)[2]
    stepper.run(0, kind, inputs, skips=("logits",))
    assert set(factory.done(stepper).outputs) == {"next_tokens"}
    stepper.close(0)


def test_take_returns_when_woken_or_late(stepper: WorkerStepper) -> None:
    """A wake from elsewhere and a time-out both end the wait with nothing."""
    stepper.wake()
    assert stepper.take(60.0) is None
    assert stepper.take(0.01) is None


def test_use_counts_work_and_bytes(stepper: WorkerStepper) -> None:
    """With the phases apart, an insert moves one row of the state and nothing else does."""
    stepper.open(0, 2)
    before = stepper.use()
    factory.play(stepper, 0, factory.script(0)[1:2])
    after = stepper.use()
    stepper.close(0)
    shape, sizes = factory.prepared().model.shape, factory.prepared().model.state()
    row = sum(t.nbytes for name, t in sizes.items() if name.startswith("row."))
    assert sum(after.moved.values()) - sum(before.moved.values()) == row
    assert all(after.busy_s[name] > before.busy_s[name] for name in after.busy_s)
    assert row * shape.rows == sum(t.nbytes for name, t in sizes.items() if not name.startswith("row."))


def test_misuse_of_slots_is_refused(stepper: WorkerStepper) -> None:
    """A slot is opened once, exists, and is not closed while it works."""
    stepper.open(0, 0)
    for wrong in (0, 2, -1):
        with pytest.raises(TesseraError, match="slot"):
            stepper.open(wrong, 0)
    stepper.run(0, *factory.script(0)[2])
    with pytest.raises(TesseraError, match="at work"):
        stepper.close(0)
    factory.done(stepper)
    stepper.close(0)


def test_a_killed_worker_closes_the_slots_of_its_lanes_only() -> None:
    """The other lane goes on, takes what is opened next, and its own loss is the end."""
    plan = factory.plan_by("data-parallel")
    steps = factory.script(5)
    with workers(plan) as stepper:
        lanes = [stepper.open(slot, 0) for slot in (0, 1)]
        assert sorted(lanes) == [0, 1]
        devices = [min(stepper._routes.all[lane].devices) for lane in lanes]
        stepper.run(1, *steps[0])
        stepper.run(0, *steps[0])
        stepper._hub._processes[devices[0]].kill()  # type: ignore[attr-defined]
        events = [stepper.take(60.0), stepper.take(60.0)]
        # The step that was killed may have ended before.
        if sum(isinstance(event, StepDone) for event in events) == 2:
            events.append(stepper.take(60.0))
        loss = next(event for event in events if event is not None and not isinstance(event, StepDone))
        assert (loss.slots, loss.is_over) == ((0,), False)
        assert loss.device == plan.cluster.names[devices[0]]
        assert loss.device in loss.message
        assert factory.is_same(factory.play(stepper, 1, steps[1:]), undivided(steps)[1:])
        assert stepper.open(0, 0) == lanes[1]
        assert factory.is_same(factory.play(stepper, 0, steps), undivided(steps))
        stepper._hub._processes[devices[1]].kill()  # type: ignore[attr-defined]
        loss = factory.lost(stepper)
        assert (loss.slots, loss.is_over) == ((0, 1), True)
        with pytest.raises(WorkerError, match="no lane avoids"):
            stepper.open(0, 0)


def test_a_step_that_never_ends_loses_its_device() -> None:
    """A worker that hangs is found by the clock, named and ended."""
    plan = factory.prepared().plans[1]
    made = factory.prepared()
    with WorkerStepper(
        [plan], made.model.weights(), made.model.shape, timeout_s=0.5, method="forkserver"
    ) as stepper:
        stepper.open(0, 0)
        pid = stepper._hub._processes[1].pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        stepper.run(0, *factory.script(0)[0])
        loss = factory.lost(stepper)
        assert (loss.slots, loss.is_over, loss.device) == ((0,), True, "emu:l40s")
        assert "no answer within 0.5 s" in loss.message


def test_a_plan_that_moves_state_between_steps_is_refused() -> None:
    """Steps in any order need every state in one place."""
    plan = factory.prepared().plans[0]
    counts = [len(g.trace.launches) for g in plan.unit.graphs]
    moving = Placement(((0,) * counts[0], (0,) * counts[1], (1,) * counts[2]))
    wrong = replace(plan, lanes=(Lane(moving, 1.0),), lane_table=())
    with pytest.raises(MismatchError, match="moves between the steps"):
        workers(wrong)
