"""Workers placed by Ray: one actor per device, in one placement group with a bundle per device.

Ray restarts lost actors where their bundle fits. It pickles only the engine's address, a rank, the model's
name and a secret of this service, as safe as the Ray cluster.

A GPU of another machine (`away:a100`) requests that accelerator type. Other devices request a CPU, and one of
the custom resource with the GPU's name, if a node has it: `ray start --resources '{"l40s": 1}'`. GPUs are
packed onto few nodes, CPUs are spread.
"""

import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tessera.errors import TesseraError, extra_module, first_line
from tessera.execute.engine_connection import EngineAddress
from tessera.execute.hub import Hub
from tessera.execute.rendezvous import Rendezvous
from tessera.ir import Device, DeviceKind

if TYPE_CHECKING:
    from tessera.execute.worker_stepper import MakeHub

# Start a cluster on this machine.
LOCAL = "local"
# Ray gives workers a low priority (nice 15): they would wait for all else on the machine.
OWN_CLUSTER: dict[str, Any] = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
# Ray's prefix of GPU types, and the amount a bundle requests.
ACCELERATOR, A_LITTLE = "accelerator_type:", 0.001
ANSWER_S = 2.0

Resources = Mapping[str, float]


def ray_module() -> Any:
    return extra_module("ray", "ray")


@contextlib.contextmanager
def joined(address: str) -> Iterator[str]:
    """Yields this machine's address in the cluster."""
    ray = ray_module()
    if address.startswith("ray://"):
        message = "a Ray client is no part of the cluster, and workers could not call it"
        raise TesseraError(message, "Run this command on a node of the cluster, with --ray auto.", "--ray")
    was_there = ray.is_initialized()
    if not was_there:
        options = OWN_CLUSTER if address == LOCAL else {}
        try:
            ray.init(address, log_to_driver=False, logging_level="error", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            remedy = f"Start one with `ray start --head`, or use --ray {LOCAL}."
            raise TesseraError(
                f"no Ray cluster at '{address}': {first_line(error)}", remedy, "--ray"
            ) from error
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        if not was_there:
            ray.shutdown()


def nodes() -> list[Resources]:
    return [node["Resources"] for node in ray_module().nodes() if node["Alive"]]


def counted(text: str, resources: Sequence[Resources]) -> str:
    """Devices with every `*` replaced by the number of such GPUs; `resources` by node."""
    words = []
    for word in (word.strip() for word in text.split(",")):
        if not word.endswith("*"):
            words.append(word)
            continue
        gpu = word[:-1].rpartition(":")[2]
        number = sum(int(node.get("GPU", 0)) for node in resources if _accelerator(gpu, node))
        if not number:
            kinds = sorted({name for node in resources for name in node if name.startswith(ACCELERATOR)})
            remedy = f"It has {', '.join(kinds) or 'no GPU'}."
            raise TesseraError(f"the Ray cluster has no {gpu}", remedy, "--devices")
        words.append(f"{word[:-1]}:{number}")
    return ",".join(words)


def _accelerator(gpu: str, node: Resources) -> str:
    return next((name for name in node if name.lower() == f"{ACCELERATOR}{gpu}"), "")


def demands(device: Device, resources: Sequence[Resources]) -> dict[str, float]:
    if device.kind is DeviceKind.CUDA:
        names = {_accelerator(device.gpu, node) for node in resources} - {""}
        kind = next(iter(names), f"{ACCELERATOR}{device.gpu.upper()}")
        return {"CPU": 1.0, "GPU": 1.0, kind: A_LITTLE}
    is_resource = any(device.gpu in node for node in resources)
    return {"CPU": 1.0} | ({device.gpu: 1.0} if device.gpu and is_resource else {})


def check_room(devices: Sequence[Device], resources: Sequence[Resources]) -> None:
    """Raises if the cluster is too small, now or even when empty."""
    totals: Counter[str] = Counter()
    for device in devices:
        bundle = demands(device, resources)
        if not any(all(node.get(name, 0.0) >= n for name, n in bundle.items()) for node in resources):
            need = ", ".join(name if n < 1 else f"{n:g} {name}" for name, n in bundle.items())
            raise TesseraError(
                f"no node of the Ray cluster has {need} for {device.name}", "Add one.", "--ray"
            )
        totals.update({name: int(n) for name, n in bundle.items() if n >= 1})
    for name, count in totals.items():
        available = sum(node.get(name, 0.0) for node in resources)
        if available < count:
            message = f"{len(devices)} workers need {count} {name}; the Ray cluster has {available:g}"
            raise TesseraError(message, "Add nodes, or use fewer devices.", "--ray")


@contextlib.contextmanager
def placed(
    host: str, devices: Sequence[Device], model: str = "", complain: Callable[[str], None] = lambda line: None
) -> "Iterator[MakeHub]":
    check_room(devices, nodes())
    secret = secrets.token_bytes(32)
    rendezvous = Rendezvous(host, 0, secret, complain)
    workers = RayWorkers(devices, EngineAddress(host, rendezvous.port, secret), model)
    names = [device.name for device in devices]
    try:
        yield partial(Hub, names, rendezvous=rendezvous, about=workers.about)
    finally:
        rendezvous.close()
        workers.close()


class RayWorkers:
    def __init__(self, devices: Sequence[Device], engine: EngineAddress, model: str = "") -> None:
        self._engine, self._model = engine, model
        resources = nodes()
        self._bundles = [demands(device, resources) for device in devices]
        has_gpus = any(device.kind is DeviceKind.CUDA for device in devices)
        group = ray_module().util.placement_group
        self._group = group(self._bundles, strategy="PACK" if has_gpus else "SPREAD")
        self.actors = [self._start(rank) for rank in range(len(devices))]

    def about(self, rank: int) -> str:
        """Why a worker is missing, empty if it runs; one that has ended is started again."""
        ray = ray_module()
        try:
            failure = ray.get(self.actors[rank].failure.remote(), timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            return "Ray has no place for it now"
        except ray.exceptions.ActorUnavailableError:
            return "Ray starts it anew"
        except ray.exceptions.RayActorError as error:
            self.actors[rank] = self._start(rank)
            return f"Ray gave it up: {str(error).strip().splitlines()[-1].strip()}"
        if not failure:
            return ""
        ray.kill(self.actors[rank], no_restart=False)
        return f"it said: {failure}; Ray starts it anew"

    def close(self) -> None:
        ray = ray_module()
        for actor in self.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._group)

    def _start(self, rank: int) -> Any:
        ray, wants = ray_module(), dict(self._bundles[rank])
        strategies = ray.util.scheduling_strategies
        options = {
            "num_cpus": wants.pop("CPU"),
            "num_gpus": wants.pop("GPU", 0.0),
            "resources": wants,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self._group, rank),
            "max_restarts": -1,
        }
        actor = ray.remote(RayWorker).options(**options)
        return actor.remote(self._engine, rank, self._model)


class RayWorker:
    def __init__(self, engine: EngineAddress, rank: int, model: str) -> None:
        self._failure = ""
        threading.Thread(target=self._work, args=(engine, rank, model), daemon=True).start()

    def failure(self) -> str:
        """Why it stopped; empty while it works."""
        return self._failure

    def _work(self, engine: EngineAddress, rank: int, model: str) -> None:
        from tessera.serve.joining import LocalModel, keep_working

        try:
            keep_working(engine, rank, LocalModel(model))
            self._failure = "it left"
        except TesseraError as error:
            self._failure = str(error)
