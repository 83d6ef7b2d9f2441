"""tessera run on several machines: one process a device, which meet at an address or under torchrun.

    tessera run PLAN --rendezvous HOST:PORT --rank 0 --secret-file SECRET --requests 32 --verify
    tessera run PLAN --rendezvous HOST:PORT --rank 1 --secret-file SECRET

    torchrun --nnodes 2 --nproc-per-node 1 ... -m tessera run PLAN --torchrun --secret-file SECRET

Rank 0 runs the requests and prints what came of them; its own device computes in a process beside it.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.errors import MismatchError, TesseraError
from tessera.ir import Plan, digest

if TYPE_CHECKING:
    from tessera.execute.remote import RemoteHub
    from tessera.execute.worker import Setup

# Under torchrun, where rank 0 writes the address that it listens at.
ADDRESS_KEY = "tessera/address"


@dataclass
class Meeting:
    """Where the processes of one run meet, and which of them this is."""

    rank: int
    host: str
    port: int
    secret: bytes
    # torchrun's own store, through which rank 0 tells its port; None without torchrun.
    store: Any = None
    world: int | None = None

    @staticmethod
    def of(rendezvous: str | None, rank: int, secret_file: Path | None, torchrun: bool) -> "Meeting":
        """From the command's options, or from torchrun."""
        from tessera.execute.remote import check_secret

        secret = _read_secret(secret_file)
        if torchrun:
            from torch.distributed.rendezvous import rendezvous as meet

            if "RANK" not in os.environ:
                raise TesseraError("this process was not started by torchrun", place="--torchrun")
            store, own_rank, world = next(iter(meet("env://")))
            host = os.environ["MASTER_ADDR"]
            return Meeting(own_rank, host, 0, check_secret(host, secret), store, world)
        host, colon, port = (rendezvous or "").rpartition(":")
        if not colon or not port.isdigit() or not host:
            raise TesseraError(f"'{rendezvous}' is no HOST:PORT", "Use 10.0.0.1:29500.", "--rendezvous")
        if rank < 0:
            raise TesseraError(f"there is no rank {rank}", "Number the devices from 0.", "--rank")
        return Meeting(rank, host, int(port), check_secret(host, secret))

    def hub(self, plans: Sequence[Plan]) -> "Callable[[Sequence[Setup]], RemoteHub]":
        """For rank 0: what makes the engine's way to all workers."""
        from tessera.execute.remote import Call, RemoteHub

        names = plans[0].cluster.names
        self._check_world(len(names))
        try:
            listener = Listener((self.host, self.port), authkey=self.secret, backlog=len(names))
        except OSError as error:
            place = f"{self.host}:{self.port}"
            raise TesseraError(
                f"cannot listen: {error.strerror}", "Use this machine's address.", place
            ) from error
        address = (self.host, int(listener.address[1]))
        if self.store is not None:
            self.store.set(ADDRESS_KEY, str(address[1]))
        call = Call(address, self.secret, plans_digest(plans))
        return lambda setups: RemoteHub(names, setups, call, listener)

    def address(self) -> tuple[str, int]:
        """Where to call; under torchrun known when rank 0 has said so."""
        port = self.port if self.store is None else int(self.store.get(ADDRESS_KEY))
        return self.host, port

    def _check_world(self, num_devices: int) -> None:
        if self.world not in (None, num_devices):
            message = f"torchrun started {self.world} processes for {num_devices} devices"
            raise MismatchError(message, "Start one process a device.", "--torchrun")


def serve_rank(plans: Sequence[Plan], meeting: Meeting, is_plain: bool) -> None:
    """A rank above 0: its device's worker, until rank 0 hangs up."""
    from tessera.execute.remote import Call, serve_and_exit
    from tessera.execute.setups import setups_of
    from tessera.flow import workloads_of

    names = plans[0].cluster.names
    if meeting.rank >= len(names):
        raise TesseraError(
            f"there is no rank {meeting.rank}", f"The plan has {len(names)} devices, from 0.", "--rank"
        )
    weights = workloads_of(plans[0].unit)[0].weights()
    setup = setups_of(plans, weights, is_plain)[meeting.rank]
    serve_and_exit(setup, len(names), Call(meeting.address(), meeting.secret, plans_digest(plans)))


def plans_digest(plans: Sequence[Plan]) -> str:
    """Names several plans by their contents."""
    return hashlib.sha256("".join(digest(plan) for plan in plans).encode()).hexdigest()


def _read_secret(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise TesseraError(f"cannot read: {error.strerror}", place=str(path)) from error
    if len(secret) < 16:
        raise TesseraError("a secret of fewer than 16 bytes", "head -c 32 /dev/urandom | base64", str(path))
    return secret
