"""tessera run and serve on several machines: one process per device.

Rank 0 runs the requests and prints the results; its own device computes in a process beside it. Workers of
`tessera serve` need no plan, those of `tessera run` have the same one. `tessera worker` makes the model's
weights, or receives them.
"""

import hashlib
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.cli.output import option, say
from tessera.errors import MismatchError, TesseraError
from tessera.ir import Device, Plan, digest
from tessera.ir.files import read_file
from tessera.profile import parse_devices

if TYPE_CHECKING:
    from tessera.execute.hub import Hub
    from tessera.execute.worker_stepper import MakeHub
    from tessera.serve.joining import LocalModel

# Key of torchrun's store under which rank 0 writes its port.
ADDRESS_KEY = "tessera/address"
# Seconds in which a rank joins another run on the same address.
AGAIN_S = 1.0
ANY = -1
Devices = tuple[Device, ...]


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    rendezvous: str | None = option(None, "HOST:PORT where the workers of several machines meet.")
    secret_file: Path | None = option(None, "A file with the secret of the rendezvous, the same everywhere.")
    torchrun: bool = option(False, "Take rendezvous and rank from torchrun.", "--torchrun")


@dataclass(frozen=True, kw_only=True)
class MeetingOptions(RendezvousOptions):
    rank: int = option(0, "Rank of this process's device; rank 0 also runs the requests.", min=0)
    ray: str | None = option(None, "Let Ray place the workers: local, auto or the address of a Ray cluster.")

    @property
    def meeting(self) -> "Meeting | None":
        """None: all workers are processes of this machine, or Ray's."""
        if not (self.rendezvous or self.torchrun or self.rank or self.secret_file):
            return None
        if self.ray is not None:
            raise TesseraError("the workers can meet in one way only", "Leave one out.", "--ray")
        return Meeting.of(self.rendezvous, self.rank, self.secret_file, self.torchrun)


@dataclass
class Meeting:
    rank: int
    host: str
    port: int
    secret: bytes
    # torchrun's store, in which rank 0 writes its port.
    store: Any = None
    world: int | None = None

    @staticmethod
    def of(rendezvous: str | None, rank: int, secret_file: Path | None, torchrun: bool) -> "Meeting":
        from tessera.execute.engine_connection import check_secret

        secret = _read_secret(secret_file)
        if torchrun:
            from torch.distributed.rendezvous import rendezvous as meet

            if "RANK" not in os.environ:
                remedy = "Start it so: torchrun ... -m tessera ..., or use --rendezvous."
                raise TesseraError("this process was not started by torchrun", remedy, "--torchrun")
            store, rank, world = next(iter(meet("env://")))
            host = os.environ["MASTER_ADDR"]
            return Meeting(rank, host, 0, check_secret(host, secret), store, world)
        host, colon, port = (rendezvous or "").rpartition(":")
        if not rendezvous:
            raise TesseraError("no address is given", "Name the service's: HOST:PORT.", "--rendezvous")
        if not colon or not port.isdigit() or not host:
            raise TesseraError(f"'{rendezvous}' is no HOST:PORT", "Use 10.0.0.1:29500.", "--rendezvous")
        return Meeting(rank, host, int(port), check_secret(host, secret))

    @contextmanager
    def hub_of(self, names: Sequence[str], digest: str = "") -> "Iterator[partial[Hub]]":
        """`digest` names the plans that workers may have."""
        from tessera.execute.hub import Hub
        from tessera.execute.rendezvous import Rendezvous as EngineRendezvous

        if self.world not in (None, len(names)):
            message = f"torchrun started {self.world} processes for {len(names)} devices"
            raise MismatchError(message, "Start one process per device.", "--torchrun")
        with closing(EngineRendezvous(self.host, self.port, self.secret, _complain)) as listening:
            if self.store is not None:
                self.store.set(ADDRESS_KEY, str(listening.port))
            yield partial(Hub, names, rendezvous=listening, local=frozenset({0}), digest=digest)

    def address(self) -> tuple[str, int]:
        port = self.port if self.store is None else int(self.store.get(ADDRESS_KEY))
        return self.host, port


def serve_rank(plans: Sequence[Plan], meeting: Meeting) -> None:
    from tessera.serve.joining import LocalModel

    names = plans[0].cluster.names
    if meeting.rank >= len(names):
        message = f"there is no rank {meeting.rank}"
        raise TesseraError(message, f"The plan has {len(names)} devices, from 0.", "--rank")
    work(meeting, LocalModel(may_import=True), again_s=AGAIN_S, digest=plans_digest(plans))


def work(
    meeting: Meeting,
    make: "LocalModel",
    rank: int | None = None,
    patience_s: float = 300.0,
    again_s: float = 5.0,
    digest: str = "",
) -> None:
    """Session after session, until no service answers."""
    from tessera.execute.engine_connection import EngineAddress
    from tessera.serve.joining import keep_working

    interruptible()
    if rank is None or meeting.store is not None:
        rank = meeting.rank
    engine = EngineAddress(*meeting.address(), meeting.secret, digest)
    say(f"a worker for {engine.place}")
    keep_working(engine, rank, make, patience_s, again_s, say)


def interruptible() -> None:
    """SIGTERM acts like Ctrl-C, so that sessions and workers end too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def gathered(
    devices: Devices | str, meeting: Meeting | None, ray: str | None, model: str = "", digest: str = ""
) -> "Iterator[tuple[Devices, MakeHub | None]]":
    """The devices and the way to their workers; None: processes of this machine.

    `devices` as text: Ray counts those of its machines.
    """

    if ray is not None:
        from tessera.serve import ray_cluster

        with ray_cluster.joined(ray) as host:
            if isinstance(devices, str):
                devices = parse_devices(ray_cluster.counted(devices, ray_cluster.nodes()))
            with ray_cluster.placed(host, devices, model, _complain) as make:
                yield devices, make
        return
    if isinstance(devices, str):
        devices = parse_devices(devices)
    if meeting is None:
        yield devices, None
    else:
        with meeting.hub_of([device.name for device in devices], digest) as hub:
            yield devices, hub


def _complain(line: str) -> None:
    say(f"a worker was refused: {line}")


def plans_digest(plans: Sequence[Plan]) -> str:
    return hashlib.sha256("".join(digest(plan) for plan in plans).encode()).hexdigest()


def _read_secret(path: Path | None) -> bytes | None:
    if path is None:
        return None
    secret = read_file(path).strip()
    if len(secret) < 16:
        raise TesseraError("a secret of fewer than 16 bytes", "head -c 32 /dev/urandom | base64", str(path))
    return secret


def worker(
    place: RendezvousOptions,
    rank: int = option(ANY, "Rank of this worker's device; -1: any device without a worker.", min=ANY),
    model: str = option("", "Folder of the model on this machine.", shown="the service's"),
    patience: float = option(300.0, "Seconds to wait for the first connection.", min=0),
    again: float = option(5.0, "Seconds to retry after a service has ended.", min=0),
) -> None:
    """Compute for a service that runs on another machine."""
    from tessera.serve.joining import LocalModel

    meeting = Meeting.of(place.rendezvous, max(rank, 0), place.secret_file, place.torchrun)
    work(meeting, LocalModel(model, may_import=bool(model)), rank, patience, again)
