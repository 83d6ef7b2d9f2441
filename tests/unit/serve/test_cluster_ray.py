"""Workers that Ray places, on a real Ray cluster on this machine: a worker is killed, and a node."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import engine_factory as made
import stepper_factory as factory
from commands import without_transformers
from tessera.errors import MissingExtra, TesseraError
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Device, DeviceKind
from tessera.profile.devices import parse_devices
from tessera.serve import ray_cluster
from tessera.serve.ray_cluster import check_room, counted, demands

ray: Any = pytest.importorskip("ray", reason="ray is not installed")
SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
# Nobody looks at pages. A node that is killed is found out by five calls that are refused, within a second.
HEAD: dict[str, Any] = {
    "include_dashboard": False,
    "no_monitor": True,
    "_system_config": {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 200,
        "worker_niceness": 0,  # as in a cluster that Tessera starts
    },
}
# Three nodes as Ray describes them.
NODES: list[dict[str, float]] = [
    {"CPU": 8.0, "GPU": 2.0, "accelerator_type:A100": 1.0},
    {"CPU": 8.0, "GPU": 4.0, "accelerator_type:A100": 1.0},
    {"CPU": 1.0, "GPU": 1.0, "accelerator_type:L40S": 1.0, "h20": 1.0},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A node with one CPU, which says whose times it keeps."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        bare = without_transformers(tmp_path_factory.mktemp("ray"))
        patch.setenv("PYTHONPATH", bare["PYTHONPATH"])
        found: Any = Cluster(initialize_head=True, head_node_args={**SMALL, **HEAD, "resources": {"a100": 1}})
        yield found
        found.shutdown()


def emulated(gpu: str) -> Device:
    """A device that keeps a GPU's time."""
    return Device(f"emu:{gpu}", DeviceKind.EMU, gpu, 1 << 30)


def test_a_killed_worker_that_ray_placed_costs_no_request(cluster: Any) -> None:
    """Under load, on the one node: it is there again, and all bits are right.

    The model is known to this process alone, so the worker is sent its weights.
    """
    plan = made.plan_of([made.scattered(random.Random(0), [0])], 1)

    def kill_at_two(num_done: int) -> None:
        if num_done == 2:
            pid = before["d0"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    with ray_cluster.joined(cluster.address) as host, ray_cluster.placed(host, [emulated("a100")]) as make:
        stepper = WorkerStepper([plan], made.workloads()[0].weights(), hub=make, timeout_s=60.0)
        with stepper:
            before = stepper.use().devices
            results, told = factory.play(stepper, list(range(4)), between=kill_at_two, limit_s=120.0)
            after = stepper.use().devices

    assert factory.are_right(results)
    assert "d0" == told.back[-1].device
    assert before["d0"].pid != after["d0"].pid


@pytest.mark.slow  # by default a worker is killed, not its node
def test_a_killed_node_costs_no_request(cluster: Any) -> None:
    """Under load: the other worker goes on, Ray places the lost one on a new node, all bits are right."""
    plan = made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)
    devices = [emulated("a100"), emulated("l40s")]
    second = cluster.add_node(**SMALL, resources={"l40s": 1})

    def kill_at_five(num_done: int) -> None:
        if num_done == 5:
            cluster.remove_node(second, allow_graceful=False)
            cluster.add_node(**SMALL, resources={"l40s": 1})

    with ray_cluster.joined(cluster.address) as host, ray_cluster.placed(host, devices) as make:
        stepper = WorkerStepper([plan], made.workloads()[0].weights(), hub=make, timeout_s=60.0)
        with stepper:
            before = stepper.use().devices
            results, told = factory.play(stepper, list(range(6)), between=kill_at_five, limit_s=120.0)
            after = stepper.use().devices

    assert factory.are_right(results)
    assert {"d1"} == {event.device for event in told.lost}
    assert "d1" == told.back[-1].device
    assert before["d0"] == after["d0"]
    assert "ready" == after["d1"].state
    assert before["d1"].pid != after["d1"].pid


def test_a_star_is_as_many_as_the_nodes_have() -> None:
    """By Ray's own names of GPUs; other words stay as they are."""
    found = counted("away:a100*, away:l40s:1,emu:h20", NODES)

    assert "away:a100:6,away:l40s:1,emu:h20" == found
    assert 8 == len(parse_devices(found))
    with pytest.raises(TesseraError, match=r"no h100. It has accelerator_type:A100, accelerator_type:L40S"):
        counted("away:h100*", NODES)


def test_a_device_asks_for_what_it_needs() -> None:
    """A GPU of its kind, or a CPU and the custom resource of its name where a node has that."""
    (away,) = parse_devices("away:l40s")

    assert {"CPU": 1.0, "GPU": 1.0, "accelerator_type:L40S": 0.001} == demands(away, NODES)
    assert {"CPU": 1.0, "h20": 1.0} == demands(emulated("h20"), NODES)
    assert {"CPU": 1.0} == demands(emulated("a100"), NODES)


def test_too_small_a_cluster_is_said_before_anything_starts() -> None:
    """Which resource, how many and what there is."""
    check_room(parse_devices("away:a100:6,away:l40s"), NODES)
    with pytest.raises(
        TesseraError, match=r"no node of the Ray cluster has .*accelerator_type:H100 for away:h100"
    ):
        check_room(parse_devices("away:h100"), NODES)
    with pytest.raises(TesseraError, match=r"8 workers need 8 GPU; the Ray cluster has 7. Add nodes"):
        check_room(parse_devices("away:a100:8"), NODES)
    with pytest.raises(TesseraError, match=r"2 workers need 2 h20; the Ray cluster has 1"):
        check_room([emulated("h20")] * 2, NODES)


def test_a_ray_client_is_refused() -> None:
    """Workers could not call it."""
    with pytest.raises(TesseraError, match="--ray auto"), ray_cluster.joined("ray://10.0.0.1:10001"):
        pass


def test_without_ray_the_line_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, as for every extra."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r'pip install "tessera-gpu\[ray\]"'):
        ray_cluster.ray_module()
