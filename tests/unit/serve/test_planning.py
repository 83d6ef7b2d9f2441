"""From a model and devices to plans for serving, and to others around a device."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.coverage_models import MODELS

import steps_factory as factory
from engine_factory import with_memory_of
from measured_factory import FakeTimer
from own_code import reference
from paged_mixer import Mixer, generated, plain_model
from sampling import num_layers
from serving_factory import GREEDY, read_all, wait_for
from tessera import flow
from tessera.capture import build, record
from tessera.cli.start import Phases
from tessera.errors import CaptureError, DeviceMemoryError, PlanInfeasible, TesseraError, UnknownName
from tessera.execute.lanes import devices_of
from tessera.execute.lower import lower
from tessera.execute.memory import footprints, ready_programs
from tessera.execute.processes import FORKSERVER
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Cluster, Device, DeviceKind, Load, Role, ServicePlan, Step, verify
from tessera.plan import search_config
from tessera.planning import ServedSteps, make_service_plan, service_memory
from tessera.profile import cap_memory, parse_devices, wire
from tessera.serve.planning import prepare
from tessera.serve.policies import check_groups
from tessera.serve.records import Ask, ServeSpec
from tessera.serve.rehearse import rehearse
from tessera.serve.service import Service
from tessera.serve.steps import servable_models, served, sizes_of, state_bytes
from tessera.serve.text import ByteText


def emulated(names: str = factory.DEVICES) -> Cluster:
    return wire(parse_devices(names), ["pcie4"])


def test_policies_are_made_of_groups_over_one_unit() -> None:
    """A group on each device, and one over both for one request; all with steps of all sizes."""
    made = factory.prepared()
    parallel, latency = made.policies
    assert ("data-parallel", "latency") == (parallel.policy, latency.policy)
    assert [("emu:a100",), ("emu:l40s",)] == [group.devices for group in parallel.groups]
    for group in (*parallel.groups, *latency.groups):
        assert factory.SIZES == group.sizes
        assert group.plan.unit.is_served
        assert 1 == len(group.plan.lanes)
    assert parallel.expected is not None
    assert parallel.expected.tokens_per_s > 0.0


@pytest.mark.parametrize("policy", ["attention-ffn", "layer-pipeline"])
def test_no_plan_moves_state_between_steps(policy: str) -> None:
    """Lanes of coarser policies too have one program a step and nothing between."""
    for lane in lower(factory.plan_by(policy)):
        assert [program.step for program in lane] == [0, 1]


@pytest.mark.parametrize(
    ("policy", "roles"),
    [("prefill-decode", ["answers", "prompts"]), ("prefill-decode-fractional", ["mixed", "prompts"])],
)
def test_a_split_has_a_device_for_prompts(policy: str, roles: list[str]) -> None:
    """Which one is decided by rehearsal; pages move."""
    (plan,) = factory.prepared("tiny-llama", policy).policies
    assert roles == sorted(group.role.value for group in plan.groups)
    assert 2 == len({group.devices for group in plan.groups})
    assert plan.expected is not None
    assert plan.expected.pages_moved > 0


def test_a_model_with_state_by_row_is_split_too() -> None:
    plan = factory.prepared("tiny-mamba", "prefill-decode").policies[0]
    assert {Role.PROMPTS, Role.ANSWERS} == {group.role for group in plan.groups}


def test_auto_is_the_best_rehearsal_and_names_the_others() -> None:
    first, *_ = factory.prepared("tiny-llama", "auto").policies
    rates = {rival.policy: rival.expected.tokens_per_s for rival in first.rivals}
    assert first.expected is not None
    assert {"single", "data-parallel", "prefill-decode"} - {first.policy} <= set(rates)
    assert max(rates.values()) <= 1.04 * first.expected.tokens_per_s


def test_one_device_has_one_policy() -> None:
    """With nothing to decide there is one."""
    made = prepare("tiny-llama", emulated("emu:a100"), ServeSpec(rows=2, capacity=16, max_batch_tokens=8))
    assert [policy.policy for policy in made.policies] == ["single"]


def test_sizes_that_nobody_names_suit_the_model() -> None:
    """A request may be as long as the model's positions; models that recur read parts of one prompt, too."""
    assert served("tiny-llama", ServeSpec()).shape.capacity == 4096
    assert served("tiny-llama", ServeSpec(rows=8)).shape.sizes == (8, 32, 128)
    assert served("tiny-mamba", ServeSpec(rows=8)).shape.sizes == (8, 32, 128)


@pytest.mark.parametrize(
    ("rows", "most", "sizes"),
    [
        (8, 128, (8, 32, 128)),
        (4, 128, (4, 32, 128)),
        (64, 2048, (16, 64, 128, 512, 2048)),
        (100, 1000, (16, 100, 128, 1000)),
        (3, 4, (3, 6)),
    ],
)
def test_sizes_are_few(rows: int, most: int, sizes: tuple[int, ...]) -> None:
    """One holds a token of everybody, one all that a step may have, and others are powers of two."""
    assert sizes == sizes_of(rows, most, is_flat=True)


def test_small_sizes_are_not_worth_their_capture_everywhere() -> None:
    """Below the smallest size there is none, but for one token of everybody."""
    assert sizes_of(8, 2048, is_flat=True, min_size=64) == (8, 128, 512, 2048)
    assert sizes_of(128, 2048, is_flat=True, min_size=64) == (128, 512, 2048)
    assert sizes_of(8, 32, is_flat=True, min_size=1) == (1, 8, 32)
    assert sizes_of(256, 2048, is_flat=True, min_size=64) == (64, 256, 512, 2048)
    assert sizes_of(128, 2048, is_flat=True, min_size=16, ratio=2) == (16, 32, 64, 128, 512, 2048)


def test_what_cannot_be_served_is_refused_in_one_line() -> None:
    """Models without steps of serving, and rows beyond the model."""
    assert "tiny-llama" in servable_models()
    for model in ("tiny-sd3.5", "no-such-model"):
        with pytest.raises(UnknownName, match="tiny-llama"):
            served(model, ServeSpec())
    with pytest.raises(CaptureError, match="4096 positions"):
        served("tiny-llama", ServeSpec(capacity=5000))


@pytest.mark.parametrize(
    ("layer_bytes", "remedy"),
    [
        (5_000_000, "--microbatches, --seqs, --max-model-len or"),
        (200_000, "The weights take .* MB alone: add a"),
    ],
)
def test_too_little_memory_says_what_to_lower(layer_bytes: int, remedy: str) -> None:
    """The key/value budget is checked before anything starts, in the words of the command."""
    small = Device("emu:a100", DeviceKind.EMU, "a100", layer_bytes * num_layers())
    with pytest.raises((PlanInfeasible, DeviceMemoryError), match=remedy):
        prepare("tiny-llama", Cluster((small,), ()), ServeSpec(microbatches=2, rows=4, capacity=4096))


def test_a_refusal_names_the_device_that_is_short() -> None:
    """Where no policy was chosen, none is blamed."""
    names, size = ("emu:a100", "emu:l40s"), 200_000 * num_layers()
    devices = tuple(Device(name, DeviceKind.EMU, name[4:], size) for name in names)
    with pytest.raises(DeviceMemoryError, match=r"device emu:.* are needed .* more than its .* add a device"):
        prepare("tiny-llama", wire(devices, ["pcie4"]), ServeSpec(microbatches=2, rows=4, capacity=256))


def test_a_model_with_attention_of_its_own_has_pages_for_all_rows(tmp_path: Path) -> None:
    """Also where nobody says how many pages there are."""
    next(model for model in MODELS if model.name == "falcon").write(tmp_path)
    shape = served(str(tmp_path), ServeSpec(rows=8, random_weights=True)).shape
    assert shape.pool_tokens > 8 * 16
    assert shape.sizes == (8, 16)
    with pytest.raises(CaptureError, match="each token's keys apart: 17 tokens of 8 sequences are no step"):
        build(Step(str(tmp_path), "tokens", 8, 17, reserve=512, random_weights=True))


@pytest.mark.parametrize("name", ["falcon", "mamba2"])
def test_any_model_is_served_for_a_load(name: str, tmp_path: Path) -> None:
    """Attention of its own, and state by row: nobody chose sizes, nobody gave a plan."""
    model = next(model for model in MODELS if model.name == name)
    replace(model, sizes={**model.sizes, "num_hidden_layers": 1}).write(tmp_path)
    load = Load(24, 8)
    spec = ServeSpec(random_weights=True, effort="quick", load=load, is_for_load=True, policies=("single",))
    made = prepare(str(tmp_path), emulated("emu:a100"), spec)
    plain = served(str(tmp_path), ServeSpec(rows=4, capacity=64, random_weights=True, joined=False))
    prompts = [list(range(3, 3 + num)) for num in (5, 24)]
    asks = [Ask(tuple(prompt), 8, GREEDY, ignores_end=True) for prompt in prompts]
    with made.workers() as stepper, Service(stepper, made.policies, made.model.shape, ByteText()) as service:
        found = [told.numbers for told in wait_for(read_all(service, asks))]

    assert load == made.policies[0].load
    assert generated(plain.workloads[-1], prompts, 8) == found


def test_plans_for_a_load_have_memory_for_state_by_row(tmp_path: Path) -> None:
    """State of each sequence, in every microbatch; also where all of a prompts group would not fit."""
    mamba = next(model for model in MODELS if model.name == "mamba2")
    sizes = {
        "hidden_size": 256,
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 128,
        "max_position_embeddings": 600,
    }
    replace(mamba, sizes={**mamba.sizes, **sizes}).write(tmp_path)
    cluster = wire(cap_memory(parse_devices("emu:a100,emu:l40s"), ["emu:a100=30MB", "emu:l40s=30MB"]))
    steps = ServedSteps(str(tmp_path), cluster, random_weights=True)

    def planned(load: Load, policy: str) -> ServicePlan:
        return make_service_plan(steps, load, rehearse, search_config("quick"), policies=(policy,))

    for policy in ("single", "prefill-decode", "layer-pipeline"):
        plan = planned(Load(512, 64), policy)
        found = footprints(plan.plans, [ready_programs(part) for part in plan.plans])
        for told, used in zip(service_memory(plan), found, strict=True):
            assert used.peak_bytes <= told.capacity_bytes
            assert told.weight_bytes + told.state_bytes + told.temporary_bytes <= told.capacity_bytes
        assert any(told.state_bytes > 2 << 20 for told in service_memory(plan))
    with pytest.raises(PlanInfeasible):
        planned(Load(8, 64), "prefill-decode")


def test_experts_whose_rows_are_not_whole_16_bytes_are_served(tmp_path: Path) -> None:
    mixtral = next(model for model in MODELS if model.name == "mixtral")
    replace(mixtral, sizes={**mixtral.sizes, "intermediate_size": 37, "num_local_experts": 3}).write(tmp_path)
    sizes = ServeSpec(rows=4, capacity=64, max_batch_tokens=16, random_weights=True, joined=False)
    workload = served(str(tmp_path), sizes).workloads[-1]
    plain = plain_model(workload.module)
    plain.set_experts_implementation("eager")
    prompts = [list(range(3, 3 + num)) for num in (5, 24)]
    wanted = [
        plain.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert wanted == Mixer(workload).answers(prompts, 6)


def token_bytes() -> int:
    """Keys and values of a token of the tiny Llama: four heads of 32 numbers a layer."""
    return 2 * 4 * 32 * 4 * num_layers()


def test_pages_take_the_memory_that_is_left() -> None:
    """Those of all microbatches with the weights, but no more than all sequences can fill."""
    weights = sum(tensor.nbytes for tensor in served("tiny-llama", ServeSpec()).weights().values())
    room = weights + 2 * 1024 * token_bytes() + 100
    made = served("tiny-llama", ServeSpec(microbatches=2, rows=4), room_bytes=[room], pool_bytes=1e12)
    assert made.shape.pool_tokens == 1024
    assert state_bytes(made.workloads[-1]) == 1024 * token_bytes() + 4 * 8  # and the newest token of each row
    made = served("tiny-llama", ServeSpec(microbatches=2, rows=4), room_bytes=[1e12], pool_bytes=1e12)
    assert made.shape.pool_tokens == 4 * 4096 + 16


@pytest.mark.parametrize(("tokens", "rows"), [(1 << 20, 256), (192 * 128, 128), (192 * 40, 32), (100, 8)])
def test_sequences_are_chosen_by_page_memory(tokens: int, rows: int) -> None:
    """As many of the load's length as there are pages for, where their number is not given."""
    weights = sum(tensor.nbytes for tensor in served("tiny-llama", ServeSpec()).weights().values())
    spec = ServeSpec(microbatches=1, rows=None)
    room = weights + tokens * token_bytes() + 8 * 256
    made = served("tiny-llama", spec, room_bytes=[room], pool_bytes=1e12)

    assert rows == made.shape.rows


def test_pages_on_a_small_device_are_fewer() -> None:
    """Where nobody says how long requests are, there are fewer pages in place of a refusal."""
    small = Device("emu:a100", DeviceKind.EMU, "a100", 40_000_000)
    made = prepare("tiny-llama", Cluster((small,), ()), ServeSpec(microbatches=2, rows=4))
    assert 1024 < made.model.shape.max_tokens <= 4096
    (needed,) = footprints(made.plans, [ready_programs(plan) for plan in made.plans])
    assert needed.peak_bytes <= small.memory_bytes
    (group,) = made.policies[0].groups
    tight = replace(group, plan=with_memory_of(group.plan, needed.peak_bytes))
    check_groups([tight])
    with pytest.raises(DeviceMemoryError, match="4 microbatches"):
        check_groups([replace(tight, plan=replace(tight.plan, microbatches=4))])


def test_a_model_too_large_for_this_machine_is_refused_before_it_is_built() -> None:
    """Emulated devices compute on the CPU, so the weights must fit there."""
    with pytest.raises(TesseraError, match=r"llama-3-8b has 16\.1 GB of weights; these devices"):
        prepare("llama-3-8b", emulated("emu:a100"), ServeSpec())


def test_products_of_the_same_input_are_one_unless_told_otherwise() -> None:
    """Every step of a service says so, and the model has one set of weights."""
    plain, joined = (
        served("tiny-llama", ServeSpec(rows=2, capacity=16, joined=x)).weights() for x in (False, True)
    )

    assert {True} == {w.step.joined_products for w in served("tiny-llama", ServeSpec(rows=2)).workloads}
    assert len(joined) < len(plain)
    assert sum(t.nbytes for t in joined.values()) == sum(t.nbytes for t in plain.values())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several safetensors files."""
    folder = tmp_path_factory.mktemp("checkpoint")
    module = served("tiny-llama", ServeSpec(rows=2, capacity=16, seed=3, joined=False)).workloads[-1].module
    module.save_pretrained(folder, max_shard_size="4MB")  # type: ignore[operator]
    return folder


def test_a_sharded_checkpoint_is_served_with_its_own_weights(sharded: Path) -> None:
    """All shards are read, and the answers are those of the model that was saved."""
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    given = []
    for model, seed in ((str(sharded), 0), ("tiny-llama", 3)):
        made = served(model, ServeSpec(rows=2, capacity=factory.CAPACITY, seed=seed))
        steps = factory.script(made, 1)
        with reference(made, 1) as stepper:
            factory.opened(stepper, 0)
            given.append(factory.play(stepper, 0, steps))
    assert factory.is_same(*given)


def test_plans_around_a_device_are_plans_for_all_of_them() -> None:
    """The device is left unused, the cluster stays, and a service can go over to them and back."""
    made = factory.prepared()
    assert made.planner is not None
    around = made.planner.without(made.policies, {"emu:a100"})

    assert ["data-parallel", "latency"] == [policy.policy for policy in around]
    for plan in (plan for policy in around for plan in policy.plans):
        verify(plan)
        assert {"emu:l40s"} == devices_of(plan, 0)
        assert made.plans[0].cluster == plan.cluster
    with pytest.raises(PlanInfeasible, match="no device is left"):
        made.planner.without(made.policies, made.plans[0].cluster.names)


@pytest.mark.parametrize("model", [pytest.param("tiny-gpt-oss", marks=pytest.mark.slow), "tiny-mamba"])
def test_steps_of_other_families_give_the_same_bits_divided(model: str) -> None:
    """Windows, experts and recurrences too: layers on two devices give what the model itself gives."""
    made = factory.prepared(model, "layer-pipeline")
    plan = factory.plan_by("layer-pipeline", model)
    assert len(plan.used) == 2
    steps = factory.script(factory.built(made), 6)
    with reference(factory.built(made), 1) as whole:
        factory.opened(whole, 0)
        wanted = factory.play(whole, 0, steps)
    with WorkerStepper([plan], made.model.weights(), method=FORKSERVER) as stepper:
        factory.opened(stepper, 0)
        assert factory.is_same(factory.play(stepper, 0, steps), wanted)


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are measured, one warning is said, and the service is planned."""
    timers = [FakeTimer(), FakeTimer()]
    given = iter(timers)
    monkeypatch.setattr(flow, "make_timer", lambda trace, device: next(given))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    made = prepare(
        "tiny-llama",
        emulated("cpu"),
        ServeSpec(microbatches=1, rows=1, capacity=8, max_batch_tokens=8, load=Load(4, 2)),
    )
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]

    assert 1 == len(made.plans)
    assert all(timer.timed for timer in timers)
    assert 1 == len(said)
    assert "cannot be written" in said[0]


def test_rows_of_gathered_keys_are_no_longer_than_what_is_gathered(tmp_path: Path) -> None:
    """A model with attention of its own sees a fixed number of tokens a row: what pages are shared to."""
    model = next(m for m in MODELS if m.name == "falcon")
    model.write(tmp_path)
    made = served(str(tmp_path), ServeSpec(rows=4, pool_tokens=128, random_weights=True))

    assert 64 == made.shape.capacity
    with pytest.raises(CaptureError, match=r"4 sequences of .* have at most 64"):
        served(str(tmp_path), ServeSpec(rows=4, capacity=100, pool_tokens=128, random_weights=True))


def test_gpus_of_other_machines_hold_their_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of weights computed here; steps are those that a CPU records, and nothing is computed."""
    cluster = emulated("away:a100,away:l40s")
    spec = ServeSpec(1, rows=4, capacity=64, max_batch_tokens=16, effort="quick", policies=("data-parallel",))
    monkeypatch.setattr("tessera.serve.planning.MAX_BYTES", 1)
    with pytest.raises(TesseraError, match="these devices compute on this machine's CPU"):
        prepare("tiny-llama", emulated(), spec)

    prepared = prepare("tiny-llama", cluster, spec)
    (trace, *_) = [graph.trace for graph in prepared.policies[0].groups[0].plan.graphs]
    assert "fake" == trace.recorded_on
    here = record(build(trace.step))
    assert (trace.launches, trace.buffers) == (here.launches, here.buffers)

    monkeypatch.setattr("tessera.serve.steps.weight_bytes", lambda place: 2**60)
    with pytest.raises(TesseraError, match=r"weights; this machine has .* GB of memory"):
        prepare("tiny-llama", cluster, spec)


def test_a_start_says_where_its_seconds_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first words of its lines, which go on to the listener."""
    times, heard = iter([10.0, 11.0, 13.0, 16.0, 20.0]), list[str]()
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    phases = Phases(heard.append)
    for what in ("building x", "capturing 2 steps", "capturing 2 steps, left: 8"):
        phases(what)

    line = "seconds of the start, 10.0 after imports: opening 1.0, building 2.0, capturing 7.0"
    assert line == phases.line()
    assert ["building x", "capturing 2 steps", "capturing 2 steps, left: 8"] == heard
