"""GPU workers with a stand-in for the GPU: bits, lanes, transports, faults; see `cuda_stub`."""

import ctypes
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import cuda_stub
from sampling import one_of_each
from tessera.capture import Workload, build, record
from tessera.errors import WorkerError
from tessera.execute import driver, messages
from tessera.execute.cuda.direct import Ipc, PeerAway
from tessera.execute.cuda.graphs import DeviceGraphs
from tessera.execute.cuda.measure import measure, whole_plan
from tessera.execute.cuda.share import ShareGraph, _Issue
from tessera.execute.cuda.transport import GpuTransport, InboxSpot
from tessera.execute.engine_connection import EngineConnection
from tessera.execute.launcher import Launcher
from tessera.execute.lower import lower
from tessera.execute.memory import Memory
from tessera.execute.offline import RunResult, run_offline
from tessera.execute.stepper import DeviceBack, DeviceLost, SpanLog, StepCall, StepDone, Tensors
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import UnitRequest, make_plan, make_unit, run_reference
from tessera.ir import (
    AWAY,
    BufferKind,
    Cluster,
    Device,
    DeviceKind,
    Fetch,
    Lane,
    Link,
    Objective,
    Placement,
    Plan,
    Program,
    Step,
    WorkUnit,
)
from tessera.kernels.tensors import same_bits
from tessera.plan import QUICK, PlanConfig
from tessera.profile import parse_devices
from tessera.profile.measured import combine

MICROBATCHES = 3
STEPS = (Step("tiny-llama", "prefill", 2, 16, reserve=3), Step("tiny-llama", "decode", 2, 19))


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    cuda_stub.install(monkeypatch)
    yield
    torch.set_num_threads(threads)


@functools.cache
def workloads() -> list:  # type: ignore[type-arg]
    """The two steps of a small model."""
    return [build(step) for step in STEPS]


@functools.cache
def unit() -> WorkUnit:
    """One request of it."""
    return make_unit([record(workload) for workload in workloads()])


@functools.cache
def plan(policy: str, is_dilated: bool = True) -> Plan:
    """A policy on two devices of one card."""
    return plan_of(unit(), policy, is_dilated)


def plan_of(of: WorkUnit, policy: str, is_dilated: bool = True) -> Plan:
    """The same for any work unit."""
    emulated = parse_devices("emu:a100,emu:l40s")
    devices = tuple(
        Device(f"cuda:0/as={d.gpu}", DeviceKind.CUDA, d.gpu, 1 << 34, is_dilated=is_dilated) for d in emulated
    )
    links = tuple(Link(a.name, b.name, "pcie4", 10.0, 25.0) for a in devices for b in devices if a is not b)
    costs = tuple(replace(combine(g.trace, emulated, {})[0], devices=devices) for g in of.graphs)
    config = PlanConfig(Objective.THROUGHPUT, MICROBATCHES, policy, search=QUICK)
    return make_plan(of, costs, Cluster(devices, links), config)


@functools.cache
def beside_cpu(policy: str) -> Plan:
    """A policy on a GPU and a CPU."""
    made = plan(policy, is_dilated=False)
    devices = (made.cluster.devices[0], Device("cpu", DeviceKind.CPU, "", 1 << 34, num_cores=1))
    links = tuple(Link(a.name, b.name, "pcie4", 10.0, 25.0) for a in devices for b in devices if a is not b)
    costs = tuple(replace(each, devices=devices) for each in made.costs)
    return replace(made, cluster=Cluster(devices, links), costs=costs)


@pytest.mark.parametrize("policy", ["attention-ffn", pytest.param("prefill-decode", marks=pytest.mark.slow)])
def test_a_gpu_and_a_cpu_exchange_through_shared_memory(policy: str) -> None:
    """Graphs and the CPU's worker set and wait for one another's flags, also after a worker is lost."""
    weights = workloads()[0].weights()
    with WorkerStepper([beside_cpu(policy)], weights, transport="shm", timeout_s=30.0) as stepper:
        for lost in (1, 0):
            done = 0

            def on_done(number: int, lost: int = lost) -> None:
                nonlocal done
                done += 1
                if done == 2:
                    cuda_stub.cut_off(stepper, lost)

            results = run_offline(stepper, [request(n % 2) for n in range(8)], on_done=on_done).results
            assert all(is_right(n % 2, result) for n, result in enumerate(results))
        assert all(status.restarts for status in stepper.use().devices.values())


@functools.cache
def fetching() -> Plan:
    """All weights of the GPU are fetched, in all steps."""
    made = beside_cpu("attention-ffn")
    lanes = []
    for lane in made.lanes:
        read = [dict[str, int](), dict[str, int]()]
        for graph, places in zip(made.graphs, lane.placement.devices, strict=True):
            for launch, device in zip(graph.trace.launches, places, strict=True):
                buffers = [graph.trace.buffers[access.buffer] for access in launch.accesses]
                names = [b.name for b in buffers if b.kind is BufferKind.WEIGHT and not b.constant_hex]
                read[device] |= dict.fromkeys(names, 1)
        lanes.append(replace(lane, placement=replace(lane.placement, fetched=tuple(read[0].items()))))
    return replace(made, lanes=tuple(lanes))


def test_fetched_weights_give_the_same_bits_and_are_never_in_the_gpus_memory() -> None:
    made, weights = fetching(), workloads()[0].weights()
    programs = [program for lane in lower(made) for program in lane]
    assert all(len({x.launch for x in p.instructions[0] if isinstance(x, Fetch)}) > 5 for p in programs)
    held = {made.graphs[p.step].trace.buffers[b].constant_hex != "" for p in programs for b in p.weights[0]}
    assert held <= {True}
    with WorkerStepper([made], weights, transport="shm", timeout_s=30.0) as stepper:
        results = run_offline(stepper, [request(n % 2) for n in range(4)]).results
        assert all(is_right(n % 2, result) for n, result in enumerate(results))
        card, host = stepper.footprints
    assert card.weight_bytes < host.weight_bytes


def test_weights_that_are_not_aligned_are_fetched_from_a_copy() -> None:
    """As tensors of files are."""
    made, weights = fetching(), workloads()[0].weights()
    name, _ = made.lanes[0].placement.fetched[0]
    size = weights[name].nbytes
    memory = torch.zeros(size + 8, dtype=torch.uint8).untyped_storage()[8 : size + 8]
    given = torch.empty(0, dtype=weights[name].dtype).set_(memory).view(weights[name].shape)
    given.copy_(weights[name])
    trace = made.graphs[0].trace
    graphs = DeviceGraphs(messages.Setup(0, made.cluster, (), (), 1, weights=weights | {name: given}))
    graphs.add_steps([g.trace for g in made.graphs])
    index = next(n for n, buffer in enumerate(trace.buffers) if buffer.name == name)
    found = graphs._pinned(0, index)

    assert (8, 0) == (given.data_ptr() % 16, found.data_ptr() % driver.FETCH_ALIGN)
    assert found.nbytes() == size
    assert torch.equal(torch.empty(0, dtype=given.dtype).set_(found), given.flatten())
    assert graphs._pinned(0, index).data_ptr() == found.data_ptr()


def test_a_graph_is_captured_again_where_the_state_that_it_had_was_freed() -> None:
    """Also if another lane has an equal one."""
    made = plan("single", is_dilated=False)
    alone, weights = (
        replace(made.cluster, devices=made.cluster.devices[:1], links=()),
        workloads()[0].weights(),
    )
    graphs = DeviceGraphs(messages.Setup(0, alone, (), (), 2, weights=weights))
    graphs.add_steps([graph.trace for graph in made.graphs])
    programs = lower(whole_plan(made.unit, alone, 0))[0]
    first, other = graphs.add(programs, (0,)), graphs.add(programs, (1,))
    before, beside = graphs.graph(0, first[0]), graphs.graph(1, other[0])
    graphs.state.drop((), {1})
    graphs.drop(first)
    again = graphs.add(programs, (0,))

    assert beside is graphs.graph(1, other[0])
    assert before is not graphs.graph(0, again[0])


def test_what_a_measurement_held_is_free_when_it_ends() -> None:
    """Not when garbage is collected: the next one needs the card's memory."""
    made, weights = fetching(), workloads()[0].weights()
    cluster, given = replace(made.cluster, devices=made.cluster.devices[:1], links=()), request(0)
    gc.collect()
    gc.disable()
    try:
        measure(made.unit, cluster, weights, given)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(kept).__name__ for kept in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert not {"Tensor", "UntypedStorage"} & set(left), left


class Clocked:
    """A stream with a vector clock: what is done before its next work is issued."""

    all: list["Clocked"] = []  # noqa: RUF012 - cleared by the test

    def __init__(self) -> None:
        self.cuda_stream = len(self.all)
        self.seen = {self.cuda_stream: 0}
        self.all.append(self)

    def tick(self) -> dict[int, int]:
        self.seen[self.cuda_stream] += 1
        return dict(self.seen)

    def wait_event(self, event: "Clocked.Event") -> None:
        self.seen |= {n: max(at, self.seen.get(n, 0)) for n, at in event.seen.items()}

    class Event:
        def record(self, stream: "Clocked") -> None:
            self.seen = dict(stream.seen)


def test_a_place_is_not_overwritten_before_its_launch_has_run_nor_read_before_its_weights_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the events alone: copies and launches of different streams run in any order that they allow."""
    made, log = fetching(), list[tuple[str, dict[int, int], int, int]]()
    monkeypatch.setattr(Clocked, "all", [])

    def copy(stream: Clocked, target: int, source: int, num: int) -> None:
        log.append(("copy", stream.tick(), stream.cuda_stream, target))

    def run(self: Launcher, launch: int, memory: Memory) -> None:
        clock = compute.tick()
        log.extend(
            ("run", clock, compute.cuda_stream, p.data_ptr()) for p in memory.slots.get(launch, {}).values()
        )

    graphs = DeviceGraphs(messages.Setup(0, made.cluster, (), (), 1, weights=workloads()[0].weights()))
    graphs.add_steps([g.trace for g in made.graphs])
    origin, compute, fetch = Clocked(), Clocked(), Clocked()
    room = replace(
        graphs._open_buffers(0), origin=origin, compute={False: compute, True: compute},
        sends={1: Clocked()}, fetching=fetch,
    )  # fmt: skip
    graphs.buffers[0] = room
    graphs.add(lower(made)[0], (0,))
    monkeypatch.setattr(driver, "fetch", copy)
    monkeypatch.setattr(torch.cuda, "Event", Clocked.Event)
    monkeypatch.setattr(Launcher, "run", run)
    for method in ("_receive", "_send"):  # of values
        monkeypatch.setattr(_Issue, method, lambda *words: None)
    graphs._rehearsed |= {0, 1}
    for number in (0, 1, 0):
        graph = graphs.graph(0, number)
        assert graph is not None
        graph.replay()

    def is_before(first: tuple[str, dict[int, int], int, int], then: dict[int, int]) -> bool:
        return first[1][first[2]] <= then.get(first[2], 0)

    last: dict[int, tuple[str, dict[int, int], int, int]] = {}
    for entry in log:
        what, clock, _, place = entry
        before = last.get(place)
        if before is not None and before[0] != what:
            assert is_before(before, clock), entry
        assert what == "copy" or before is not None
        last[place] = entry
    assert sum(what == "run" for what, *_ in log) > 10


def opened(*policies: str, transport: str = "ipc", **more: object) -> WorkerStepper:
    """Workers with plans of these policies."""
    plans, weights = [plan(policy) for policy in policies], workloads()[0].weights()
    options = {"transport": transport, "timeout_s": 30.0, **more}
    return WorkerStepper(plans, weights, **options)  # type: ignore[arg-type]


def request(seed: int) -> UnitRequest:
    """One of several."""
    return UnitRequest(workloads(), workloads()[0].make_inputs(seed), seed)


def is_right(seed: int, result: RunResult) -> bool:
    """Has it every bit of the model's own run?"""
    wanted = run_reference(unit(), request(seed))
    outputs = [
        same_bits(t, other[name])
        for one, other in zip(wanted.outputs, result.outputs, strict=True)
        for name, t in one.items()
    ]
    state = [same_bits(t.reshape(-1).view(torch.uint8), result.state[n]) for n, t in wanted.state.items()]
    return not result.error and all(outputs) and all(state)


ALL_CASES = list(product(("attention-ffn", "prefill-decode"), ("ipc", "host")))
CASES = one_of_each(ALL_CASES, lambda case: case[0])


@pytest.mark.parametrize(("policy", "transport"), CASES)
def test_divided_runs_have_the_models_own_bits(policy: str, transport: str) -> None:
    """Transfers within steps, and state that moves between them: every output and state is equal."""
    with opened(policy, transport=transport) as stepper:
        results = run_offline(stepper, [request(seed) for seed in range(5)]).results
        assert all(is_right(seed, result) for seed, result in enumerate(results))


def test_a_worker_beside_the_engine_takes_its_first_gpu_for_one_of_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 of a service on away:a100,away:l40s computes in a process of its own machine."""
    whole = plan("attention-ffn")
    devices = tuple(replace(device, ordinal=AWAY) for device in whole.cluster.devices)
    costs = tuple(replace(cost, devices=devices) for cost in whole.costs)
    away = replace(whole, cluster=replace(whole.cluster, devices=devices), costs=costs)
    weights = workloads()[0].weights()
    with WorkerStepper([away], weights, transport="host", timeout_s=30.0) as stepper:
        (result,) = run_offline(stepper, [request(0)]).results
        assert is_right(0, result)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    stepper = WorkerStepper([away], weights, transport="host", timeout_s=30.0)
    with pytest.raises(WorkerError, match="has no CUDA device"), stepper:
        pass


def sorted_and_back(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
    """As mixtures of experts do: sort, work, and take the order back by an index that is filled in."""
    order = torch.argsort(inputs["x"])
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    return {"y": (inputs["x"][order] * 2)[back]}


def test_an_index_that_comes_from_another_device_exists_in_the_rehearsal() -> None:
    """Before it is captured a share runs without its peers: what they would have filled is no index."""
    draw = torch.Generator().manual_seed(0)
    workload = Workload(
        Step("sorted", "call", 1, 1), torch.nn.Module(), sorted_and_back,
        lambda seed: {"x": torch.randn(4096, generator=draw)}, lambda seed: {},
        lambda first, run, last: dict(first),
    )  # fmt: skip
    made = make_unit([record(workload)])
    trace = made.graphs[0].trace
    first = next(n for n in range(len(trace.launches)) if "sort" in trace.kernel_of(n).name)
    places = tuple(int(n > first) for n in range(len(trace.launches)))
    whole = plan_of(made, "data-parallel")
    divided = replace(whole, lanes=(Lane(Placement((places,)), 1.0),), lane_table=())
    asked = UnitRequest([workload], workload.make_inputs(0), 0)
    torch.use_deterministic_algorithms(True)  # fills what was only allocated with the largest number
    try:
        with WorkerStepper([divided], {}, transport="ipc", timeout_s=30.0) as stepper:
            (result,) = run_offline(stepper, [asked]).results
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(result.outputs[0]["y"], asked.inputs(0, 0, {})["x"] * 2)


def doubled(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
    return {"y": inputs["x"] * 2, "z": inputs["few"] + 1}


def test_an_input_may_be_given_in_part() -> None:
    """The rest of it has any earlier value, and inputs behind it are whole."""
    workload = Workload(
        Step("doubled", "call", 1, 1), torch.nn.Module(), doubled,
        lambda seed: {"x": torch.ones(1 << 18), "few": torch.ones(3)}, lambda seed: {},
        lambda first, run, last: dict(first),
    )  # fmt: skip
    whole = plan_of(make_unit([record(workload)]), "data-parallel")
    with WorkerStepper([whole], {}, transport="ipc", timeout_s=30.0) as stepper:
        lane = stepper.lanes.take(0)
        assert lane is not None
        stepper.open(0, lane.number)
        outputs: dict[str, torch.Tensor] = {}
        for num in (5, 1, 9):
            given = {"x": torch.arange(float(num)), "few": torch.full((3,), float(num))}
            stepper.start(StepCall(0, 0, given))
            done = stepper.take(30.0)
            assert isinstance(done, StepDone)
            outputs = dict(done.outputs)
            assert torch.equal(outputs["y"][:num], given["x"] * 2)
            assert torch.equal(outputs["z"], given["few"] + 1)
        assert torch.equal(outputs["y"][9:], torch.zeros((1 << 18) - 9))


def test_policies_share_weights_and_state() -> None:
    """Requests under plans that alternate are right, and each follows its own plan."""
    with opened("attention-ffn", "data-parallel") as stepper:
        results = run_offline(stepper, [request(n) for n in range(6)], policy=lambda done: done % 2).results
        assert {0, 1} == {result.policy for result in results}
        assert all(is_right(seed, result) for seed, result in enumerate(results))


def test_plans_are_loaded_while_workers_run() -> None:
    """A plan that comes later is followed without a restart; its inbox is there for those after it."""
    with opened("data-parallel") as stepper:
        for _ in range(4):
            stepper.load([plan("attention-ffn")])
        (result,) = run_offline(stepper, [request(0)]).results
        assert is_right(0, result)
        # A plan that is loaded again needs no more memory: one inbox a device, and the first plan's.
        assert len(cuda_stub.IpcMemory.made) <= 4
        assert all(status.restarts == 0 for status in stepper.use().devices.values())


def test_a_lost_worker_comes_back_and_its_peers_find_its_new_memory() -> None:
    """Requests in flight start again, and those after it are right over the new inbox."""
    with opened("attention-ffn") as stepper:
        lost = stepper.plans[0].cluster.names[1]
        done = 0

        def on_done(number: int) -> None:
            nonlocal done
            done += 1
            if done == 2:
                cuda_stub.cut_off(stepper, 1)

        results = run_offline(stepper, [request(n % 2) for n in range(8)], on_done=on_done).results
        assert all(is_right(n % 2, result) for n, result in enumerate(results))
        assert stepper.use().devices[lost].restarts >= 1


@pytest.mark.parametrize("name", ["ipc", "host"])
def test_a_released_graph_reads_zeros_in_place_of_what_has_not_arrived(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places are shared by programs: values of another step there are no valid indices."""
    found: list[DeviceGraphs] = []
    plain = DeviceGraphs.add

    def add(self: DeviceGraphs, programs: Sequence[Program], *more: Any) -> list[int]:
        found.append(self)
        return plain(self, programs, *more)

    monkeypatch.setattr(DeviceGraphs, "add", add)
    with opened("attention-ffn", transport=name) as stepper:
        run_offline(stepper, [request(0)])
        for graphs in found:
            transport = graphs.transport
            assert transport is not None
            here = graphs.device.number
            arrivals = [
                driver.bytes_at(transport._ends(InboxSpot(0, 0, number), here)[0], moved.num_bytes, 0)
                for number, moved in enumerate(graphs._programs[0].transfers)
                if moved.dst == here
            ]
            assert any(place.any() for place in arrivals)
            transport.release(0)
            assert not any(place.any() for place in arrivals)
            transport.reset(0, 0)


def test_what_a_peer_sent_before_it_died_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that could not be launched here, after its peer had sent for it: those flags are cleared."""
    refused: list[int] = []
    plain, is_away = DeviceGraphs.graph, threading.Event()

    def graph(self: DeviceGraphs, microbatch: int, number: int) -> ShareGraph | None:
        if self.device.number == 0 and is_away.is_set():
            assert self.transport is not None
            self.transport.release(microbatch)  # what the peer has sent
            refused.append(microbatch)
            raise PeerAway("its memory is gone", 1)
        return plain(self, microbatch, number)

    monkeypatch.setattr(DeviceGraphs, "graph", graph)
    with opened("attention-ffn") as stepper:

        def die() -> None:
            while not refused and not over.wait(0.005):
                pass
            is_away.clear()
            cuda_stub.cut_off(stepper, 1)

        run_offline(stepper, [request(1)])
        is_away.set()
        over, thread = threading.Event(), threading.Thread(target=die)
        thread.start()
        try:
            (result,) = run_offline(stepper, [request(0)]).results
        finally:
            over.set()
            thread.join()
        assert [0] == refused
        assert result.restarts in (1, 2)  # two if it is begun anew before the peer is cut off
        assert is_right(0, result)


def flags(transport: GpuTransport) -> list[int]:
    """Flags of what device 0 receives in the first program of microbatch 0."""
    moved = transport._inboxes.programs[0].transfers
    here = [transport._ends(InboxSpot(0, 0, n), 0)[1] for n, x in enumerate(moved) if x.dst == 0]
    return [ctypes.c_uint32.from_address(address).value for address in here]


def until(is_so: Callable[[], bool]) -> None:
    """Waits for it, and not for ever."""
    limit = time.monotonic() + 20.0
    while not is_so() and time.monotonic() < limit:
        time.sleep(1e-3)


def test_flags_are_cleared_where_a_cancelled_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end and the order to cancel it may cross."""
    found: list[GpuTransport] = []
    plain = Ipc.__init__

    def open_ipc(self: Ipc, setup: messages.Setup, ordinal: int, store: EngineConnection) -> None:
        plain(self, setup, ordinal, store)
        found.extend([self] if setup.device == 0 else [])

    monkeypatch.setattr(Ipc, "__init__", open_ipc)
    with opened("attention-ffn") as stepper:
        run_offline(stepper, [request(0)])
        for run in range(1, stepper.new_run()):
            found[0].release(0)
            stepper.hub.order(0, messages.Cancel(run))
        until(lambda: 1 not in flags(found[0]))
        assert {0} == set(flags(found[0]))


def test_what_a_peer_sent_for_a_run_that_was_cleared_here_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sends after this worker has cancelled the run, and dies before it has cancelled it itself."""
    phase, cleared = "usual", threading.Event()
    plain, plain_reset = DeviceGraphs.graph, Ipc.reset
    found: dict[str, list[int]] = {"late": [], "next": []}

    def graph(self: DeviceGraphs, microbatch: int, number: int) -> ShareGraph | None:
        nonlocal phase
        if (microbatch, number) == (0, 0) and self.transport is not None and self.device.number == 0:
            if phase == "cut":
                receivers.append(self.transport)
                raise PeerAway("its memory is gone", 1)
            found["next"] = flags(self.transport) if phase == "next" else found["next"]
            phase = "over" if phase == "next" else phase
        elif (microbatch, number) == (0, 0) and phase in ("cut", "next"):
            until(cleared.is_set if phase == "cut" else lambda: phase == "over")
        return plain(self, microbatch, number)

    def reset(self: Ipc, microbatch: int, program: int) -> None:
        plain_reset(self, microbatch, program)
        if self in receivers:
            cleared.set()

    def run(seed: int) -> StepDone | DeviceLost:
        lane = stepper.lanes.take(0)
        assert lane is not None
        stepper.open(0, lane.number, workloads()[0].make_state(seed))
        stepper.start(StepCall(0, 0, request(seed).inputs(0, 0, {})))
        event = stepper.take(30.0)
        assert isinstance(event, StepDone | DeviceLost)
        return event

    receivers: list[GpuTransport] = []
    monkeypatch.setattr(DeviceGraphs, "graph", graph)
    monkeypatch.setattr(Ipc, "reset", reset)
    with opened("attention-ffn") as stepper:
        run_offline(stepper, [request(2)])
        phase = "cut"
        assert isinstance(run(1), DeviceLost)  # of the link: both workers live
        assert isinstance(stepper.take(30.0), DeviceBack)
        until(lambda: 1 in flags(receivers[0]))
        found["late"] = flags(receivers[0])
        cuda_stub.cut_off(stepper, 1)
        phase = "usual"
        assert isinstance(stepper.take(30.0), DeviceLost)
        assert isinstance(stepper.take(30.0), DeviceBack)
        phase = "next"
        done = run(0)
    assert 1 in found["late"]
    assert {0} == set(found["next"])
    assert isinstance(done, StepDone)
    wanted = run_reference(unit(), request(0)).outputs[0]
    assert all(same_bits(value, done.outputs[name]) for name, value in wanted.items())


def test_plans_that_come_while_a_request_runs_leave_its_state_alone() -> None:
    """Graphs of the new plan are captured in a microbatch that is at work; its launches are not run on it."""
    with opened("data-parallel") as stepper:
        number = 0

        def on_done(done: int) -> None:
            nonlocal number
            number += 1
            if number == 1:  # two others are between their steps
                stepper.load([plan("attention-ffn")])

        results = run_offline(stepper, [request(n % 2) for n in range(6)], on_done=on_done).results
        assert all(is_right(n % 2, result) for n, result in enumerate(results))


def test_stamped_runs_report_launches_and_sends() -> None:
    """A profiled run has a span for every launch and every transfer."""
    with opened("attention-ffn", is_profiled=True) as stepper:
        stepper.spans = SpanLog(stepper.plans[0])
        run_offline(stepper, [request(0)], spans=stepper.spans)
        timeline = stepper.spans.timeline()
        steps = zip(unit().graphs, unit().counts, strict=True)
        launches = sum(count * len(graph.trace.launches) for graph, count in steps)
        assert launches == sum(not span.is_transfer for span in timeline.spans)
        assert any(span.is_transfer for span in timeline.spans)


def test_a_card_that_is_too_small_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is counted before anything is allocated."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 16, 1 << 16))
    with pytest.raises(WorkerError, match="that are free"), opened("attention-ffn"):
        pass
