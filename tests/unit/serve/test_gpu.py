"""A service on GPUs, with a stand-in for the GPU: the same answers as the model itself, and how it fails."""

import random
from functools import partial
from typing import Any

import pytest

import cuda_stub
from serving_factory import GREEDY, random_ask, read, read_all, wait_for
from tessera.errors import TesseraError
from tessera.ir import Cluster, Objective
from tessera.profile import make_cluster, parse_devices
from tessera.profile.cards import Card
from tessera.serve import gpu
from tessera.serve.gpu import OnGpus, PreparedOnGpus, is_for_gpus, prepare_on_gpus
from tessera.serve.planning import Average, Wanted
from tessera.serve.records import Ask
from tessera.serve.service import Service, ServiceConfig
from tessera.serve.start import Options, started
from tessera.serve.steps import served
from tessera.serve.text import ByteText
from tessera.serve.undivided import UndividedStepper

SIZES: dict[str, Any] = {"slots": 2, "rows": 2, "capacity": 32, "chunk": 8}
PAIR = "cuda:0/as=a100,cuda:0/as=l40s"
CARD = Card("NVIDIA H200", 141 << 30, 132)


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_stub.install(monkeypatch)
    monkeypatch.setattr(gpu, "RIVALS", ("data-parallel",))


def make_devices(text: str) -> Cluster:
    """Devices on a card that is not there."""
    return make_cluster(parse_devices(text, lambda: (CARD, CARD)), "pcie4")


def prepare(text: str, *coarse: str) -> PreparedOnGpus:
    """The tiny Llama, captured operator by operator."""
    return prepare_on_gpus(
        "tiny-llama",
        make_devices(text),
        Wanted(**SIZES, average=Average(8, 3), policies=(Objective.THROUGHPUT,)),
        coarse=coarse,
        is_compiled=False,
    )


def test_a_service_on_stretched_devices_answers_as_the_model_does() -> None:
    """Random requests at once, greedy and drawn, under the plan and under one that crosses in every layer."""
    rng = random.Random(3)
    asks = [random_ask(rng, SIZES["capacity"], client=str(i)) for i in range(5)]
    with UndividedStepper(served("tiny-llama", **SIZES)) as whole, Service(whole, ByteText()) as service:
        wanted = [told.what for told in wait_for(read_all(service, asks))]
    with OnGpus(prepare(PAIR, "attention-ffn")) as local:
        for policy in (local.stepper.policies[0], "attention-ffn"):
            config = ServiceConfig(policy=policy)
            with Service(local.stepper, ByteText(), config=config) as service:
                assert wanted == [told.what for told in wait_for(read_all(service, asks))]


def test_one_card_is_measured_and_has_one_plan() -> None:
    """There is nothing to decide, and its launches have their own times."""
    found = prepare("cuda:0")

    assert 1 == len(found.plans)
    assert 1.0 == found.scale
    assert {"measured"} == {str(c.source) for costs in found.costs for row in costs.costs for c in row}


def test_a_gpu_that_fails_ends_every_answer_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client hears of it, and the service says why it is over."""

    def fail(self: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with OnGpus(prepare("cuda:0")) as local:
        monkeypatch.setattr(cuda_stub.Event, "query", fail)
        with Service(local.stepper, ByteText(), replace=local.replace) as service:
            told = wait_for(read(service, Ask((1, 2, 3), 8, GREEDY)))

            assert "error" == told.finish.reason
            assert "illegal memory access" in service.failure


def test_the_command_serves_from_gpus_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a model's name and a GPU to a service that answers, without workers."""
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(gpu, "prepare_on_gpus", partial(prepare_on_gpus, is_compiled=False))
    options = Options(slots=1, rows=2, max_len=32, chunk=8)
    with started("tiny-llama", make_devices("cuda:0"), options) as ready:
        told = wait_for(read(ready.service, Ask((1, 2, 3), 4, GREEDY, ignores_end=True)))

        assert ("length", 4) == (told.finish.reason, len(told.numbers))
        assert ["cuda:0"] == [device.name for device in ready.service.snapshot().devices]


@pytest.mark.parametrize(
    ("text", "said"), [("cuda:0,cpu", "beside other devices"), ("cuda:0,cuda:1/as=l40s", "other times")]
)
def test_sets_of_unlike_kinds_are_refused(text: str, said: str) -> None:
    """Graphs hold GPUs only, and one clock."""
    with pytest.raises(TesseraError, match=said):
        is_for_gpus(make_devices(text))
