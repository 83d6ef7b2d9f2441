"""Serving on one GPU: compiled steps in CUDA graphs, undivided and divided, and a service over them."""

import asyncio
import functools
import random
from collections.abc import Iterator

import pytest
import torch

from serving_factory import GREEDY, random_ask, read_all
from tessera.execute.serving import StepDone, StepKind, Tensors
from tessera.ir import Objective
from tessera.profile import make_cluster, parse_devices
from tessera.serve.gpu import OnGpus, PreparedOnGpus, prepare_on_gpus
from tessera.serve.planning import Average, Wanted
from tessera.serve.records import Ask
from tessera.serve.service import Service, ServiceConfig
from tessera.serve.text import ByteText

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SLOTS, ROWS, CAPACITY, CHUNK = 2, 3, 48, 8
PARTS, STRETCHED = "cuda:0/sm=64,cuda:0/sm=32", "cuda:0/as=a100,cuda:0/as=l40s"
CROSSING = "attention-ffn"


@functools.cache
def prepared(devices: str) -> PreparedOnGpus:
    """The tiny Llama from compiled code: the plan, one device, and a plan that crosses in every layer."""
    cluster = make_cluster(parse_devices(devices), "pcie4")
    coarse = ("single", CROSSING) if len(cluster.devices) > 1 else ()
    return prepare_on_gpus(
        "tiny-llama",
        cluster,
        Wanted(SLOTS, ROWS, CAPACITY, CHUNK, Average(12, 8), (Objective.THROUGHPUT,)),
        coarse=coarse,
    )


@pytest.fixture(params=[PARTS, STRETCHED])
def local(request: pytest.FixtureRequest) -> Iterator[OnGpus]:
    """Two devices on one card."""
    with OnGpus(prepared(request.param)) as made:
        yield made


def script(seed: int) -> list[tuple[StepKind, Tensors]]:
    """Prompts of two chunks into every row, then decodes."""
    random_tokens = torch.Generator().manual_seed(seed)
    steps: list[tuple[StepKind, Tensors]] = []
    for row in range(ROWS):
        tokens = torch.randint(0, 256, (1, 2 * CHUNK), generator=random_tokens)
        for first, last in ((0, CHUNK - 1), (CHUNK, 2)):
            places = torch.arange(first, first + CHUNK)[None]
            given = {"tokens": tokens[:, first : first + CHUNK], "positions": places}
            steps.append(("chunk", {**given, "last": torch.tensor([last])}))
        steps.append(("insert", {"row": torch.tensor([row])}))
    for position in range(CHUNK + 3, CHUNK + 8):
        tokens = torch.randint(0, 256, (ROWS, 1), generator=random_tokens)
        steps.append(("decode", {"tokens": tokens, "positions": torch.full((ROWS, 1), position)}))
    return steps


def outputs(local: OnGpus, policy: str) -> list[dict[str, torch.Tensor]]:
    """Everything that both slots give, run beside one another, under a policy."""
    stepper, found = local.stepper, []
    for slot in range(SLOTS):
        stepper.open(slot, stepper.policies.index(policy))
    for steps in zip(*(script(slot) for slot in range(SLOTS)), strict=True):
        for slot, (kind, given) in enumerate(steps):
            stepper.run(slot, kind, given)
        done = [stepper.take(30.0) for _ in range(SLOTS)]
        assert all(isinstance(d, StepDone) for d in done), done
        found += [dict(d.outputs) for d in sorted(done, key=lambda d: d.slot)]  # type: ignore[union-attr]
    for slot in range(SLOTS):
        stepper.close(slot)
    return found


def test_divided_steps_have_the_bits_of_one_device(local: OnGpus) -> None:
    """Every output of every step, in two slots at once, however the launches are placed."""
    wanted = outputs(local, "single")

    for policy in (local.stepper.policies[0], CROSSING):
        for one, other in zip(wanted, outputs(local, policy), strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_service_answers_the_same_under_every_policy(local: OnGpus) -> None:
    """Random requests at once, greedy and drawn."""
    rng = random.Random(5)
    asks = [random_ask(rng, CAPACITY, client=str(i)) for i in range(8)]
    told = []
    for policy in local.stepper.policies:
        with Service(local.stepper, ByteText(), config=ServiceConfig(policy=policy)) as service:
            told.append([t.what for t in asyncio.run(read_all(service, asks))])

    assert all(told[0] == other for other in told[1:])


def test_greedy_answers_are_the_models_own() -> None:
    """On one whole card, against the model called step by step on growing sequences."""
    rng = random.Random(7)
    asks = [
        Ask(tuple(rng.randrange(256) for _ in range(n)), 12, GREEDY, ignores_end=True) for n in (1, 9, 20)
    ]
    with OnGpus(prepared("cuda:0")) as made:
        with Service(made.stepper, ByteText()) as service:
            told = asyncio.run(read_all(service, asks))
        model = made.prepared.model.workloads["decode"].module
        for ask, answer in zip(asks, told, strict=True):
            tokens = list(ask.prompt)
            for number in answer.numbers:
                with torch.no_grad():
                    logits = model(torch.tensor([tokens], device="cuda")).logits[0, -1]
                assert logits[number] >= logits.max() - 1e-3 * logits.abs().max()
                tokens.append(number)


def test_graphs_survive_other_peoples_compiled_code() -> None:
    """torch.compile with CUDA graphs clears workspaces that products of a capture would else still name."""
    layer = torch.nn.Linear(256, 256, device="cuda")
    with OnGpus(prepared("cuda:0")) as made:
        wanted = outputs(made, made.stepper.policies[0])
        compiled = torch.compile(layer, mode="reduce-overhead")
        for _ in range(4):
            with torch.no_grad():
                compiled(torch.randn(64, 256, device="cuda"))
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        filled = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(32)]
        found = outputs(made, made.stepper.policies[0])
        torch.cuda.synchronize()

        assert all(torch.equal(a[n], b[n]) for a, b in zip(wanted, found, strict=True) for n in a)
        assert all(bool(tensor.isnan().all()) for tensor in filled)


def test_nothing_is_left_behind() -> None:
    """The second stepper takes no more memory than the first gave back."""
    found = []
    for _ in range(2):
        with OnGpus(prepared("cuda:0")) as made:
            made.stepper.open(0, 0)
            made.stepper.run(0, *script(0)[0])
            assert isinstance(made.stepper.take(30.0), StepDone)
        del made
        found.append(torch.cuda.memory_allocated())

    assert found[0] == found[1]
