"""A service whose workers Ray places, on a real Ray cluster of two nodes on this machine."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import steps_factory
from tessera.errors import MissingExtra, TesseraError
from tessera.execute.gate import Gate
from tessera.execute.handshake import Call
from tessera.ir import Device, DeviceKind
from tessera.serve import ray_cluster
from tessera.serve.gathering import Gathering
from tessera.serve.local import Local
from tessera.serve.undivided import UndividedStepper

ray: Any = pytest.importorskip("ray", reason="ray is not installed")


@dataclass
class Placed:
    """A service on Ray."""

    local: Local
    gathering: Gathering

    def actors(self) -> list[Any]:
        """Device -> its actor."""
        (hub,) = self.gathering._hubs
        return [started.actor for _, started in sorted(hub._started.items())]  # type: ignore[attr-defined]

    def nodes(self) -> list[str]:
        """Device -> the node its actor is on."""
        places = {a["actor_id"]: a["node_id"] for a in map(dict, _actor_rows())}
        return [places[actor._actor_id.hex()] for actor in self.actors()]


def _actor_rows() -> list[dict[str, str]]:
    from ray._private.state import actors

    return [{"actor_id": n, "node_id": row["Address"]["NodeID"]} for n, row in actors().items()]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes with one CPU each, which say whose times they keep."""
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster: Any = Cluster(initialize_head=True, head_node_args={**small, "resources": {"a100": 1}})
    cluster.add_node(**small, resources={"l40s": 1})
    yield str(cluster.address)
    cluster.shutdown()


@pytest.fixture(scope="module")
def placed(address: str) -> Iterator[Placed]:
    """The service over both nodes."""
    made = steps_factory.over_both()
    with ray_cluster.joined(address) as host:
        ray_cluster.check_room(made.cluster.devices)
        secret = secrets.token_bytes(32)
        gate = Gate(host, 0, secret)
        starters = ray_cluster.starters(made.cluster.devices, Call(gate.address, secret))
        gathering = Gathering(gate, made.cluster.names, starters)
        with Local(made, gathering=gathering) as local:
            yield Placed(local, gathering)
        gathering.close()


def emulated(gpu: str) -> Device:
    """A device that keeps a GPU's time."""
    return Device(f"emu:{gpu}", DeviceKind.EMU, gpu, 1 << 30)


def test_every_device_has_a_node_and_the_bits_are_the_same(placed: Placed) -> None:
    """Workers of two nodes, met at the gate, give what the undivided model gives."""
    steps = steps_factory.script(3)
    with UndividedStepper(steps_factory.prepared().model, 1) as whole:
        whole.open(0, 0)
        wanted = steps_factory.play(whole, 0, steps)
    placed.local.stepper.open(0, 0)

    assert steps_factory.is_same(steps_factory.play(placed.local.stepper, 0, steps), wanted)
    assert 2 == len(set(placed.nodes()))


def test_a_lost_actor_is_replaced_on_its_node(placed: Placed) -> None:
    """Ray starts another worker of the same device, and the service goes on with the same bits."""
    steps = steps_factory.script(4)
    with UndividedStepper(steps_factory.prepared().model, 1) as whole:
        whole.open(0, 0)
        wanted = steps_factory.play(whole, 0, steps)
    before = placed.nodes()
    ray.kill(placed.actors()[1])
    loss = steps_factory.lost(placed.local.stepper)
    new = placed.local.replace(loss)
    new.open(0, 0)

    assert ("emu:l40s", True) == (loss.device, loss.is_over)
    assert steps_factory.is_same(steps_factory.play(new, 0, steps), wanted)
    assert before == placed.nodes()


def test_a_device_asks_for_its_gpu_where_nodes_have_it() -> None:
    """A custom resource of the GPU's name; otherwise a CPU is all."""
    there = {"CPU": 4.0, "a100": 1.0}

    assert {"CPU": 1.0, "a100": 1.0} == ray_cluster.demands(emulated("a100"), there)
    assert {"CPU": 1.0} == ray_cluster.demands(emulated("l40s"), there)


def test_too_small_a_cluster_is_said_before_anything_starts(placed: Placed) -> None:
    """Which resource, how many and what there is."""
    with pytest.raises(TesseraError, match=r"3 workers need 3 CPU; the Ray cluster has 2. Add nodes"):
        ray_cluster.check_room([emulated("h100")] * 3)
    with pytest.raises(TesseraError, match=r"2 workers need 2 a100; the Ray cluster has 1"):
        ray_cluster.check_room([emulated("a100")] * 2)


def test_a_ray_client_is_refused() -> None:
    """Workers could not call it."""
    with pytest.raises(TesseraError, match="--ray auto"), ray_cluster.joined("ray://10.0.0.1:10001"):
        pass


def test_without_ray_the_line_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, as for every extra."""
    import builtins

    real = builtins.__import__

    def fail(name: str, *rest: Any, **named: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(MissingExtra, match=r'pip install "tessera\[ray\]"'):
        ray_cluster.ray_module()
