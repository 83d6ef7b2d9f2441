"""Workers that Ray places: one actor a device, spread over the nodes of a Ray cluster.

Ray chooses the node and starts the process; that is all. The actor is told where the engine's gate is, its
rank and a secret that is fresh for this service, calls, and from then on speaks `messages` with the engine
and gloo with the other workers, as any worker does. So what Ray itself pickles is an address, a number, a
secret and the model's name, and the secret is as safe as the Ray cluster.

A device asks for one CPU, and for one of the custom resource that has its GPU's name, if any node has that:
`ray start --resources '{"l40s": 1}'`. Devices compute on the node's CPU. A lost actor is not restarted by
Ray but by the service, which gathers all workers anew; see `gathering`.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.errors import MissingExtra, TesseraError
from tessera.execute.handshake import Call
from tessera.execute.remote import Starter
from tessera.execute.worker import Setup
from tessera.ir import Device

CPUS_OF_A_WORKER = 1
# ray.init starts a cluster of this machine for this word, and takes one that runs for the other.
LOCAL, RUNNING = "local", "auto"


def ray_module() -> Any:
    """Ray, or the line that installs it."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    return ray


@contextlib.contextmanager
def joined(address: str) -> Iterator[str]:
    """Is part of a Ray cluster meanwhile; yields this machine's address as the nodes know it."""
    ray = ray_module()
    if address.startswith("ray://"):
        raise TesseraError(
            "a Ray client is no part of the cluster, and workers could not call it",
            "Run this command on a node of the cluster, with --ray auto.",
            "--ray",
        )
    was_there = ray.is_initialized()
    if not was_there:
        options = {"include_dashboard": False} if address == LOCAL else {}
        try:
            ray.init(address, log_to_driver=False, logging_level="error", **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            remedy = f"Start one with `ray start --head`, or use --ray {LOCAL}."
            raise TesseraError(f"no Ray cluster at '{address}': {said}", remedy, "--ray") from error
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        if not was_there:
            ray.shutdown()


def check_room(devices: Sequence[Device]) -> None:
    """Raises TesseraError if the cluster has too little for all workers, now and when all else has left."""
    there: Mapping[str, float] = ray_module().cluster_resources()
    wanted: Counter[str] = Counter()
    for device in devices:
        wanted.update({name: int(count) for name, count in demands(device, there).items()})
    for name, count in wanted.items():
        if there.get(name, 0.0) < count:
            raise TesseraError(
                f"{len(devices)} workers need {count} {name}; the Ray cluster has {there.get(name, 0.0):g}",
                "Add nodes, or use fewer devices.",
                "--ray",
            )


def demands(device: Device, there: Mapping[str, float]) -> dict[str, float]:
    """Resources that a device's worker asks for, by Ray's names, in a cluster that has these."""
    own = {device.gpu: 1.0} if device.gpu and device.gpu in there else {}
    return {"CPU": float(CPUS_OF_A_WORKER), **own}


def starters(devices: Sequence[Device], call: Call, model: str = "") -> dict[str, Starter]:
    """Device -> how Ray starts its worker."""
    there = ray_module().cluster_resources()
    return {device.name: _starter(demands(device, there), call, model) for device in devices}


def _starter(wants: dict[str, float], call: Call, model: str) -> Starter:
    def start(rank: int, setup: Setup, world: int) -> RayWorker:
        ray = ray_module()
        custom = {name: count for name, count in wants.items() if name != "CPU"}
        options = {"num_cpus": wants["CPU"], "resources": custom, "scheduling_strategy": "SPREAD"}
        actor = ray.remote(Seat).options(**options, max_restarts=0, max_task_retries=0).remote()
        return RayWorker(actor, actor.work.remote(call.address, call.secret, rank, model))

    return start


class Seat:
    """The actor: one session of one worker."""

    def work(self, address: tuple[str, int], secret: bytes, rank: int, model: str) -> None:
        """Calls the engine and works until it hangs up."""
        from tessera.execute.calling import serve_call
        from tessera.serve.joining import ModelHere

        serve_call(Call(address, secret), rank, ModelHere(model))


@dataclass(frozen=True)
class RayWorker:
    """An actor that works, as the hub sees it."""

    actor: Any
    work: Any

    def died(self) -> str:
        """By its task, which ends with the session or with the actor."""
        ray = ray_module()
        done, _ = ray.wait([self.work], timeout=0)
        if not done:
            return ""
        try:
            ray.get(self.work)
        except ray.exceptions.RayError as error:
            return str(error).strip().splitlines()[-1]
        return "it left"

    def stop(self, timeout_s: float) -> None:
        """Lets the session end by itself, then ends the actor and its threads."""
        ray = ray_module()
        ray.wait([self.work], timeout=timeout_s)
        ray.kill(self.actor)
