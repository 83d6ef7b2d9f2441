"""tessera worker: this machine computes for a service on another.

    tessera worker --rendezvous HOST:PORT --secret-file SECRET [--rank N]

The service sends what is to be run; the worker makes the model's weights itself, from the built-in name or
from the folder that the service names, or from --model, and is sent those that it cannot make. It goes on
until no service answers any more.
"""

from typing import Annotated

import typer

from tessera.cli.remote import Meeting, Rendezvous, SecretFile, UnderTorchrun, work
from tessera.errors import TesseraError

ANY = -1


def worker(
    rendezvous: Rendezvous = None,
    secret_file: SecretFile = None,
    rank: Annotated[
        int, typer.Option(help="Which device this is, counted from 0; -1: whichever has no worker.")
    ] = ANY,
    model: Annotated[
        str, typer.Option(help="The model's folder on this machine, where it is not the service's.")
    ] = "",
    patience: Annotated[float, typer.Option(help="Seconds to wait for a service at first.")] = 300.0,
    again: Annotated[float, typer.Option(help="Seconds to call again where none listens any more.")] = 5.0,
    torchrun: UnderTorchrun = False,
) -> None:
    """Compute for a service that runs on another machine."""
    if rendezvous is None and not torchrun:
        raise TesseraError("no address is given", "Name the service's: HOST:PORT.", "--rendezvous")
    if rank < ANY:
        raise TesseraError(f"there is no rank {rank}", "Number the devices from 0.", "--rank")
    if not min(patience, again) >= 0:
        raise TesseraError("a time below 0", "Use 0 or more seconds.", "--patience")
    from tessera.serve.joining import ModelHere

    meeting = Meeting.of(rendezvous, max(rank, 0), secret_file, torchrun)
    work(meeting, rank, ModelHere(model, may_import=bool(model)), patience, again)
