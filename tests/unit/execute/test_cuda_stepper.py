"""Steps of a served model on GPUs, with a stand-in for the GPU: bits, lanes, what is handed out, faults."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import cuda_stub
from tessera.capture import record
from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute.cuda.stepper import CudaStepper
from tessera.execute.serving import SlotsLost, StepDone, StepKind, Tensors
from tessera.flow import make_plan, make_unit
from tessera.ir import Cluster, Device, DeviceKind, Link, Objective, Plan, WorkUnit
from tessera.profile import estimate, parse_devices
from tessera.serve.planning import Average, counts_of
from tessera.serve.steps import Served, served
from tessera.serve.undivided import UndividedStepper

SLOTS, ROWS, CHUNK = 2, 3, 8
TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_stub.install(monkeypatch)


@functools.cache
def model() -> Served:
    """The tiny Llama, served."""
    return served("tiny-llama", slots=SLOTS, rows=ROWS, capacity=32, chunk=CHUNK)


@functools.cache
def unit() -> WorkUnit:
    """Its three steps."""
    traces = [record(workload) for workload in model().workloads.values()]
    return make_unit(traces, counts_of(model(), Average(16, 8)))


@functools.cache
def plan(policy: str, num: int = 2) -> Plan:
    """One policy on stretched devices of one card, or on the card alone."""
    emulated = parse_devices("emu:a100,emu:l40s")[:num]
    devices = tuple(
        Device(f"cuda:0/as={d.gpu}", DeviceKind.CUDA, d.gpu, 1 << 34, is_stretched=num > 1) for d in emulated
    )
    links = tuple(Link(a.name, b.name, "pcie4", 10.0, 25.0) for a in devices for b in devices if a is not b)
    costs = tuple(replace(estimate(g.trace, emulated), devices=devices) for g in unit().graphs)
    return make_plan(unit(), costs, Cluster(devices, links), Objective.THROUGHPUT, SLOTS, policy)


@pytest.fixture
def stepper() -> Iterator[CudaStepper]:
    """One that crosses between two devices in every layer, and one that does not, as policies."""
    plans = [plan("attention-ffn"), plan("data-parallel")]
    with CudaStepper(plans, model().weights(), model().shape, timeout_s=TIMEOUT_S) as made:
        yield made


def prompt(seed: int) -> torch.Tensor:
    """More than one chunk."""
    return torch.randint(0, 256, (1, CHUNK + 3), generator=torch.Generator().manual_seed(seed))


def requests(row: int, seed: int) -> list[tuple[StepKind, Tensors]]:
    """A prompt in two chunks, then into a row."""
    tokens = torch.nn.functional.pad(prompt(seed), (0, CHUNK - 3))
    made: list[tuple[StepKind, Tensors]] = []
    for first, last in ((0, CHUNK - 1), (CHUNK, 2)):
        places = torch.arange(first, first + CHUNK)[None]
        given = {
            "tokens": tokens[:, first : first + CHUNK],
            "positions": places,
            "last": torch.tensor([last]),
        }
        made.append(("chunk", given))
    return [*made, ("insert", {"row": torch.tensor([row])})]


def decode(tokens: torch.Tensor, position: int) -> tuple[StepKind, Tensors]:
    """One token a row."""
    return "decode", {"tokens": tokens.view(ROWS, 1), "positions": torch.full((ROWS, 1), position)}


def answer(stepper: CudaStepper | UndividedStepper, slot: int, kind: StepKind, given: Tensors) -> StepDone:
    """One step, waited for."""
    stepper.run(slot, kind, given)
    done = stepper.take(TIMEOUT_S)
    assert isinstance(done, StepDone)
    assert (slot, kind) == (done.slot, done.kind)
    return done


def everything(stepper: CudaStepper | UndividedStepper, slot: int) -> list[dict[str, torch.Tensor]]:
    """All outputs of a slot that reads three prompts and then decodes three times."""
    found = [
        dict(answer(stepper, slot, kind, given).outputs)
        for row in range(ROWS)
        for kind, given in requests(row, 10 * slot + row)
    ]
    tokens = torch.tensor([5, 6, 7])
    for position in range(CHUNK + 3, CHUNK + 6):
        found.append(dict(answer(stepper, slot, *decode(tokens, position)).outputs))
        tokens = found[-1]["next_tokens"].clone()
    return found


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("policy", [0, 1])
def test_divided_steps_have_the_models_own_bits(stepper: CudaStepper, policy: int) -> None:
    """Two slots, prompts in chunks, rows of different requests, several decodes: equal to the model."""
    with UndividedStepper(model()) as whole:
        for slot in range(SLOTS):
            stepper.open(slot, policy)
            whole.open(slot, 0)
            assert same(everything(whole, slot), everything(stepper, slot))


def test_a_slot_that_is_opened_again_starts_empty(stepper: CudaStepper) -> None:
    """What another request left behind is gone."""
    stepper.open(0, 0)
    first = answer(stepper, 0, *decode(torch.tensor([1, 2, 3]), 4))
    everything(stepper, 0)
    stepper.close(0)
    stepper.open(0, 0)

    assert torch.equal(
        first.outputs["logits"], answer(stepper, 0, *decode(torch.tensor([1, 2, 3]), 4)).outputs["logits"]
    )


def test_outputs_that_nobody_wants_stay_where_they_are(stepper: CudaStepper) -> None:
    """Greedy decoding needs no logits on the host."""
    stepper.open(0, 0)
    kind, given = decode(torch.tensor([1, 2, 3]), 0)
    stepper.run(0, kind, given, ("logits",))
    done = stepper.take(TIMEOUT_S)

    assert isinstance(done, StepDone)
    assert {"next_tokens"} == set(done.outputs)


def test_outputs_are_kept_when_the_slot_goes_on(stepper: CudaStepper) -> None:
    """The next step overwrites nothing that was handed out."""
    stepper.open(0, 0)
    first = answer(stepper, 0, *decode(torch.tensor([1, 2, 3]), 0)).outputs["logits"]
    before = first.clone()
    answer(stepper, 0, *decode(torch.tensor([9, 9, 9]), 1))

    assert torch.equal(before, first)


def test_work_and_bytes_are_counted(stepper: CudaStepper) -> None:
    """Both devices work, and bytes move between them in both directions."""
    stepper.open(0, 0)
    answer(stepper, 0, *decode(torch.tensor([1, 2, 3]), 0))
    use = stepper.use()

    assert all(seconds > 0.0 for seconds in use.busy_s.values())
    assert 2 == len(use.moved)
    assert all(use.moved.values())


def test_one_device_is_timed_itself() -> None:
    """Without a division, the time of the graphs is the device's."""
    with CudaStepper([plan("single", 1)], model().weights(), model().shape) as made:
        made.open(0, 0)
        done = answer(made, 0, *decode(torch.tensor([1, 2, 3]), 0))

        assert 0.0 < sum(made.use().busy_s.values()) <= done.seconds


def test_a_wake_ends_the_wait(stepper: CudaStepper) -> None:
    """Nothing runs, and `take` returns all the same."""
    stepper.wake()

    assert stepper.take(None) is None
    assert stepper.take(0.0) is None


def test_a_gpu_that_fails_loses_every_slot(stepper: CudaStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message with the driver's words; nothing can be opened any more, and nothing else is told."""
    for slot in range(SLOTS):
        stepper.open(slot, 0)

    def fail(self: object) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr(cuda_stub.Event, "query", fail)
    stepper.run(0, *decode(torch.tensor([1, 2, 3]), 0))
    lost = stepper.take(TIMEOUT_S)

    assert isinstance(lost, SlotsLost)
    assert ((0, 1), True) == (lost.slots, lost.is_over)
    assert "unspecified launch failure" in lost.message
    assert stepper.take(0.0) is None
    with pytest.raises(WorkerError, match="can be used any more"):
        stepper.open(0, 0)


def test_a_step_that_does_not_end_loses_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the step and the slot."""
    monkeypatch.setattr(cuda_stub.Event, "query", lambda self: False)
    plans = [plan("data-parallel")]
    with CudaStepper(plans, model().weights(), model().shape, timeout_s=0.05) as made:
        made.open(1, 0)
        made.run(1, *decode(torch.tensor([1, 2, 3]), 0))
        lost = made.take(TIMEOUT_S)

    assert isinstance(lost, SlotsLost)
    assert "a decode in slot 1" in lost.message


def test_wrong_calls_are_refused(stepper: CudaStepper) -> None:
    """A slot twice, a slot that is not there, a tensor of another shape."""
    stepper.open(0, 0)

    with pytest.raises(TesseraError, match="slot 0 is open already"):
        stepper.open(0, 0)
    with pytest.raises(TesseraError, match="not one of 2"):
        stepper.open(SLOTS, 0)
    with pytest.raises(WorkerError, match="input 'tokens' has 8 bytes"):
        stepper.run(0, "decode", {"tokens": torch.tensor([1]), "positions": torch.zeros(ROWS, 1).long()})


def test_more_slots_than_the_plans_have_are_refused() -> None:
    """Graphs are captured for the plans' slots."""
    with pytest.raises(MismatchError, match="2 slots, not 3"):
        CudaStepper([plan("data-parallel")], model().weights(), replace(model().shape, slots=3))
