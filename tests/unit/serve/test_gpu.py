"""A service on GPU workers, with a stand-in for the GPU: the answers of the model itself; how it fails."""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_stub
from own_code import reference
from serving_factory import GREEDY, Told, policies_of, random_ask, read, read_all, wait_for, wait_for_masks
from steps_factory import Local, working
from tessera.cli.serve_options import ServeConfig
from tessera.cli.start import started
from tessera.errors import TesseraError
from tessera.execute.cuda.graphs import DeviceGraphs
from tessera.execute.cuda.share import ShareGraph
from tessera.execute.cuda.worker import CudaWorker
from tessera.execute.runs import Runs
from tessera.ir import Cluster, Costs, DeviceKind, Load, WorkUnit
from tessera.profile import cap_memory, parse_devices, wire
from tessera.profile.devices import Card
from tessera.profile.measured import combine
from tessera.serve import planning
from tessera.serve.gpu import check_gpus
from tessera.serve.planning import Prepared
from tessera.serve.records import Ask, Sampling, ServeSpec
from tessera.serve.sequences import SequenceBatch
from tessera.serve.service import Service
from tessera.serve.steps import ServedModel, served
from tessera.serve.text import ByteText

SIZES: dict[str, Any] = {"microbatches": 2, "rows": 2, "capacity": 32, "max_batch_tokens": 8}
PAIR = "cuda:0/as=a100,cuda:0/as=l40s"
CROSSING = "attention-ffn"
POLICIES = {"cuda:0": ("single",), PAIR: ("data-parallel", "prefill-decode", CROSSING)}
CARD = Card("NVIDIA H200", 141 << 30, 132)


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    cuda_stub.install(monkeypatch)
    yield
    torch.set_num_threads(threads)  # workers are threads here, and set their own


def make_devices(text: str) -> Cluster:
    """Devices on a card that is not there."""
    return wire(parse_devices(text, lambda: (CARD, CARD)), ["pcie4"])


@functools.cache
def prepare(text: str) -> Prepared:
    """The tiny Llama, captured operator by operator."""
    spec = ServeSpec(**SIZES, load=Load(8, 3), policies=POLICIES[text], effort="quick")
    return planning.prepare("tiny-llama", make_devices(text), spec, is_compiled=False)


def asks() -> list[Ask]:
    """Random requests, greedy and drawn."""
    rng = random.Random(3)
    return [random_ask(rng, SIZES["capacity"], client=str(i)) for i in range(5)]


@functools.cache
def wanted(name: str = "tiny-llama", spec: ServeSpec | None = None) -> list[Any]:
    """What the model itself answers."""
    return wanted_of(asks(), name, spec)


def wanted_of(asked: Sequence[Ask], name: str = "tiny-llama", spec: ServeSpec | None = None) -> list[Any]:
    """What the model itself answers to these."""
    model = served(name, spec or ServeSpec(**SIZES))
    given = (model.shape, ByteText())
    with reference(model) as whole, Service(whole, policies_of(whole, model.shape), *given) as service:
        return [told.what for told in wait_for(read_all(service, asked))]


def answers(
    local: Local, policy: str, log: list[str] | None = None, of: Sequence[Ask] | None = None
) -> list[Told]:
    """What a service on workers answers."""
    shape = local.prepared.model.shape
    heard = [] if log is None else log
    given = (local.stepper, local.prepared.policies, shape, ByteText())
    with Service(*given, policy=policy, log=heard.append) as service:
        return wait_for(read_all(service, asks() if of is None else of))


@pytest.mark.parametrize("transport", ["ipc", pytest.param("host", marks=pytest.mark.slow)])
def test_a_service_on_dilated_devices_answers_as_the_model_does(transport: str) -> None:
    """Random requests at once, beside one another, moved, and under a policy that crosses in every layer."""
    with working(prepare(PAIR), transport=transport) as local:
        for policy in POLICIES[PAIR]:
            assert wanted() == [told.what for told in answers(local, policy)]
        assert any(local.stepper.use().moved.values())


def test_a_gpu_holds_memory_for_the_microbatches_of_its_own_groups_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many other devices there are."""
    found: dict[int, DeviceGraphs] = {}
    plain = DeviceGraphs.add

    def add(self: DeviceGraphs, *lane: Any) -> list[int]:
        found[self.device.number] = self
        return plain(self, *lane)

    monkeypatch.setattr(DeviceGraphs, "add", add)
    spec = ServeSpec(**SIZES, load=Load(8, 3), policies=("data-parallel",), effort="quick")
    with working(planning.prepare("tiny-llama", make_devices(PAIR), spec, is_compiled=False)) as local:
        answers(local, "data-parallel")

        assert {0: [0], 1: [1]} == {device: sorted(graphs.buffers) for device, graphs in found.items()}
        assert {0: {0}, 1: {1}} == {
            device: {number for number, *_ in graphs.state.by_microbatch} for device, graphs in found.items()
        }


@pytest.mark.parametrize(("text", "policy"), [("cuda:0", "single"), (PAIR, CROSSING)])
def test_forms_are_answered_by_steps_whose_masks_follow(
    text: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first graph of a step is launched before its masks exist, where no other device waits for it."""
    grammar = pytest.importorskip("tessera.serve.grammar")
    pytest.importorskip("llguidance")
    wait_for_masks(monkeypatch)
    form = grammar.GrammarCompiler(ByteText(), served("tiny-llama", ServeSpec(**SIZES)).shape.vocab_size)
    source = 'start: %json {"type": "array", "items": {"type": "boolean"}, "minItems": 9}'
    # As many as one microbatch has: steps of two are not queued on one device.
    forms = (form.compile(source, "x"), None)
    asked = [Ask((n, 7), 20, Sampling(0.5, seed=n), grammar=forms[n]) for n in range(SIZES["rows"])]
    events = list[str]()

    def noting(owner: type, name: str, event: str) -> None:
        own = getattr(owner, name)

        def noted(self: Any, *args: Any) -> Any:
            if event != "order" or args[0].is_open:
                events.append(event)
            return own(self, *args)

        monkeypatch.setattr(owner, name, noted)

    noting(ShareGraph, "begin", "begin")
    noting(ShareGraph, "finish", "finish")
    noting(CudaWorker, "_give", "masks")
    noting(Runs, "start", "order")
    noting(SequenceBatch, "late_inputs", "compute")
    with working(prepare(text)) as local:
        found = [told.what for told in answers(local, policy, of=asked)]

    assert wanted_of(asked) == found
    if text == PAIR:
        assert "masks" not in events
        return
    assert events.count("masks") > 10
    # Steps are ordered when no mask is computed yet, and half launched when their masks come.
    num_open = num_launched = 0
    for event in events:
        num_open += {"order": 1, "compute": -1}.get(event, 0)
        num_launched += {"begin": 1, "finish": -1}.get(event, 0)
        assert event != "masks" or num_launched > 0
        assert num_open >= 0


def test_one_card_is_measured_and_has_one_plan() -> None:
    """There is nothing to decide, and its launches have their own times."""
    found = prepare("cuda:0")

    assert ["single"] == [policy.policy for policy in found.policies]
    assert 1.0 == found.scale
    assert {"measured"} == {
        str(c.source) for costs in found.plans[0].costs for row in costs.costs for c in row
    }


@pytest.mark.rerun("on a busy machine a worker that lives can be slower than WAIT_S, and is lost too")
@pytest.mark.parametrize("text", [pytest.param("cuda:0", marks=pytest.mark.slow), PAIR])
def test_a_gpu_that_fails_is_started_again_and_the_answers_come(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker ends with what the GPU said; the requests in it start anew, and no client sees a change."""
    # The stand-in's waits hold up the worker itself, so a peer of the one that fails is lost too.
    monkeypatch.setattr(cuda_stub, "WAIT_S", 2.0)
    left, finish, heard = [20], ShareGraph.finish, list[str]()

    def fail_once(self: ShareGraph) -> dict[str, torch.Tensor]:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return finish(self)

    with working(prepare(text)) as local:
        monkeypatch.setattr(ShareGraph, "finish", fail_once)
        told = answers(local, POLICIES[text][-1], heard)

        assert wanted() == [one.what for one in told]
        assert 1 <= sum(status.restarts for status in local.stepper.use().devices.values())
    assert any("illegal memory access" in line for line in heard)
    assert any(line.endswith("is back") for line in heard)


def test_the_command_serves_from_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a model's name and a GPU to a service that answers."""
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("tessera.cli.start.prepare", partial(planning.prepare, is_compiled=False))
    config = ServeConfig(
        microbatches=1, seqs=2, max_model_len=32, max_batch_tokens=8, prompt_tokens=8, output_tokens=3,
        effort="quick", plan_cache=False,
    )  # fmt: skip
    with started("tiny-llama", make_devices("cuda:0"), config) as ready:
        assert isinstance(ready.service, Service)
        told = wait_for(read(ready.service, Ask((1, 2, 3), 4, GREEDY, ignores_end=True)))

        assert ("length", 4) == (told.finish.reason, len(told.numbers))
        assert ["cuda:0"] == [device.name for device in ready.service.snapshot().devices]


def test_the_benchmark_of_arrivals_serves_the_same_requests_for_real_and_virtually(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many requests, with times of both; what they are means nothing here."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    from benchmarks.gpu_services import arrived, parsed

    with working(prepare(PAIR)) as local:
        plans, shape = local.prepared.policies, local.prepared.model.shape
        plan = next(plan for plan in plans if plan.policy == CROSSING)
        with Service(local.stepper, plans, shape, ByteText(), policy=CROSSING) as service:
            found = arrived(parsed(["--out", "OUT", "--seconds", "0.1"]), plan, service, 0.5, 100.0)

    assert 8 <= found["requests"]
    assert not found["errors"]
    for name in ("ttft ms p50, p99", "expected ttft ms p50, p99", "tpot ms p50, p99"):
        assert found[name][0] > 0.0


def modelled(self: Any, unit: WorkUnit, model: ServedModel, advance: object) -> tuple[Costs, ...]:
    """Costs of an H200 and a Xeon."""
    kinds = tuple(replace(d, gpu="cpu-xeon-8480" if d.is_cpu else "h200") for d in self.cluster.devices)
    kinds = tuple(replace(d, kind=DeviceKind.EMU) for d in kinds)
    costs = (combine(graph.trace, kinds, {})[0] for graph in unit.graphs)
    return tuple(replace(found, devices=self.cluster.devices) for found in costs)


@pytest.mark.parametrize("is_fetching", [False, True])
def test_a_gpu_and_its_host_answer_as_the_model_does(
    is_fetching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's worker gets what the CPU's has computed, and the other way round; or it fetches weights."""
    monkeypatch.setattr(planning.HostBackend, "price", modelled)
    devices = cap_memory(parse_devices("cuda:0,cpu", lambda: (CARD,)), ["cuda:0=2.5MB"])
    spec = ServeSpec(microbatches=1, rows=2, capacity=32, max_batch_tokens=8, load=Load(8, 3), effort="quick")
    cluster = wire(devices, ["pcie4"])
    gbps = 25.0 if is_fetching else 1e-3
    cluster = replace(cluster, links=tuple(replace(link, fetch_gbps=gbps) for link in cluster.links))
    made = planning.prepare("tiny-gpt-oss", cluster, spec)
    placement = made.policies[0].plans[0].lanes[0].placement
    with made.workers() as stepper, Service(stepper, made.policies, made.model.shape, ByteText()) as service:
        found = [told.what for told in wait_for(read_all(service, asks()))]

    assert "kernel-level" == made.policies[0].policy
    assert is_fetching == bool(placement.fetched)
    assert is_fetching or {0, 1} == set(placement.devices[-1])
    assert wanted("tiny-gpt-oss", spec) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cuda:0,away:a100", "beside GPUs of this machine"),
        ("cuda:0,cuda:1/as=l40s", "cannot serve beside others"),
    ],
)
def test_sets_of_unlike_kinds_are_refused(text: str, said: str) -> None:
    """A card's own time, a modelled time and a CPU's do not mix."""
    with pytest.raises(TesseraError, match=said):
        check_gpus(make_devices(text))
