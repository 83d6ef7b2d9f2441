"""Serving from worker processes of one GPU: compiled steps in graphs, whole and divided, and a service."""

import asyncio
import functools
import gc
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from serving_factory import GREEDY, Told, random_ask, read_all
from steps_factory import Local, built, working
from tessera.execute.cuda.direct import MPS_PIPE
from tessera.execute.stepper import StepCall, StepDone, Tensors
from tessera.ir import Load
from tessera.profile import parse_devices, wire
from tessera.serve.planning import Prepared, prepare
from tessera.serve.records import Ask, ServeSpec
from tessera.serve.service import Service
from tessera.serve.text import ByteText

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
alone = pytest.mark.skipif(
    bool(os.environ.get(MPS_PIPE)), reason="a process that dies takes its neighbours under CUDA MPS with it"
)

MICROBATCHES, ROWS, CAPACITY, MAX_BATCH_TOKENS = 2, 3, 48, 16
PARTS, STRETCHED = "cuda:0/sm=64,cuda:0/sm=32", "cuda:0/as=a100,cuda:0/as=l40s"
CROSSING = "attention-ffn"
# What a library may keep on the card, beside what a service needs.
SLACK_BYTES = 16 << 20


@functools.cache
def prepared(devices: str) -> Prepared:
    """The tiny Llama from compiled code: the plan, one device, and a plan that crosses in every layer."""
    cluster = wire(parse_devices(devices), ["pcie4"])
    names = ("single", "data-parallel", "prefill-decode", CROSSING)[: 4 if len(cluster.devices) > 1 else 1]
    return prepare(
        "tiny-llama",
        cluster,
        ServeSpec(
            MICROBATCHES,
            ROWS,
            CAPACITY,
            MAX_BATCH_TOKENS,
            load=Load(12, 8),
            policies=names,
        ),
    )


@pytest.fixture(params=[PARTS, STRETCHED])
def local(request: pytest.FixtureRequest) -> Iterator[Local]:
    """Two devices on one card."""
    with working(prepared(request.param)) as made:
        yield made


def policies(local: Local) -> list[str]:
    return [policy.policy for policy in local.prepared.policies]


def calls(local: Local, microbatch: int) -> list[StepCall]:
    """Tokens of some sequences in every size, and again; pages hold what the steps before left there."""
    return [
        StepCall(microbatch, number, {n: t.cpu() for n, t in workload.make_inputs(microbatch + run).items()})
        for run in range(3)
        for number, workload in enumerate(built(local.prepared).workloads)
    ]


def outputs(local: Local, policy: str) -> list[Tensors]:
    """Everything that the microbatches of a policy's last group give, one after the other.

    Pages are zeros at first: they stay as the microbatch before left them.
    """
    stepper, found = local.stepper, list[Tensors]()
    plan = local.prepared.policies[policies(local).index(policy)].plans[-1]
    lane = next(lane for lane in stepper.lanes.all if lane.plan is plan)
    for place, microbatch in enumerate(lane.microbatches):
        state = built(local.prepared).workloads[-1].make_state(0)
        zeros = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in state.items()}
        stepper.open(microbatch, lane.number, zeros)
        for call in calls(local, place):
            stepper.start(replace(call, microbatch=microbatch))
            event = stepper.take(60.0)
            assert isinstance(event, StepDone), event
            found.append(event.outputs)
        stepper.close(microbatch)
    return found


def answers(local: Local, asks: list[Ask], policy: str = "auto") -> list[Told]:
    """What a service answers to all, asked at once."""
    shape = local.prepared.model.shape
    given = (local.stepper, local.prepared.policies, shape, ByteText())
    with Service(*given, policy=policy) as service:
        return asyncio.run(asyncio.wait_for(read_all(service, asks), 120.0))


def random_asks(num: int) -> list[Ask]:
    """Greedy and drawn, of any length."""
    rng = random.Random(5)
    return [random_ask(rng, CAPACITY, client=str(i)) for i in range(num)]


def used_bytes() -> int:
    """Memory of the card used by all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def test_divided_steps_have_the_bits_of_one_device(local: Local) -> None:
    """Every output of every step, however the launches are placed."""
    wanted = outputs(local, "single")

    for policy in (policies(local)[0], CROSSING):
        found = outputs(local, policy)
        assert len(found) >= len(wanted) // MICROBATCHES
        for one, other in zip(wanted, found, strict=False):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_service_answers_the_same_under_every_policy(local: Local) -> None:
    """Random requests at once, greedy and drawn."""
    told = [[t.what for t in answers(local, random_asks(8), policy)] for policy in policies(local)]

    assert all(told[0] == other for other in told[1:])


@alone
def test_a_service_whose_worker_is_killed_answers_the_same(local: Local) -> None:
    """The requests that it had start anew; no client sees more than a pause."""
    wanted = [t.what for t in answers(local, random_asks(8), CROSSING)]
    name = local.prepared.plans[0].cluster.names[1]
    pid = local.stepper.use().devices[name].pid
    assert pid is not None

    async def while_killed(service: Service) -> list[Told]:
        reading = asyncio.ensure_future(read_all(service, random_asks(8)))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.wait_for(reading, 120.0)

    shape = local.prepared.model.shape
    given = (local.stepper, local.prepared.policies, shape, ByteText())
    with Service(*given, policy=CROSSING) as service:
        told = asyncio.run(while_killed(service))

    assert wanted == [t.what for t in told]


def test_greedy_answers_are_the_models_own() -> None:
    """On one whole card, against the model called step by step on growing sequences."""
    rng = random.Random(7)
    asks = [
        Ask(tuple(rng.randrange(256) for _ in range(n)), 12, GREEDY, ignores_end=True) for n in (1, 9, 20)
    ]
    with working(prepared("cuda:0")) as made:
        told = answers(made, asks)
        model = built(made.prepared).workloads[-1].module
        for ask, answer in zip(asks, told, strict=True):
            assert 12 == len(answer.numbers)
            tokens = list(ask.prompt)
            for number in answer.numbers:
                with torch.no_grad():
                    logits = model(torch.tensor([tokens], device="cuda")).logits[0, -1]
                assert logits[number] >= logits.max() - 1e-3 * logits.abs().max()
                tokens.append(number)


def test_workers_are_apart_from_compiled_code_of_the_program() -> None:
    """torch.compile with CUDA graphs and memory written all over, in the program's own process: same bits."""
    layer = torch.nn.Linear(256, 256, device="cuda")
    with working(prepared("cuda:0")) as made:
        wanted = outputs(made, policies(made)[0])
        compiled = torch.compile(layer, mode="reduce-overhead")
        for _ in range(4):
            with torch.no_grad():
                compiled(torch.randn(64, 256, device="cuda"))
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        filled = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(32)]
        found = outputs(made, policies(made)[0])
        torch.cuda.synchronize()

        assert all(torch.equal(a[n], b[n]) for a, b in zip(wanted, found, strict=True) for n in a)
        assert all(bool(tensor.isnan().all()) for tensor in filled)


def test_nothing_is_left_behind() -> None:
    """The second workers take no more memory than the first gave back; the first bring libraries along."""
    own, after = [], []
    for _ in range(3):
        with working(prepared("cuda:0")) as made:
            outputs(made, policies(made)[0])
        del made
        gc.collect()  # and what tests before this one left in cycles
        own.append(torch.cuda.memory_allocated())
        after.append(used_bytes())

    assert own[1] == own[2]
    assert abs(after[2] - after[1]) < SLACK_BYTES
