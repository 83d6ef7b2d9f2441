"""Muster: which of the callers that wait at the gate becomes the worker of a device.

A caller that says its rank gets that device and no other. One that says none gets a device that is left, once
there are enough of them for all such devices: before, a caller that says its rank may still come. Who is not
needed waits; it is there when a device needs it. Who cannot be needed is told why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.execute.gate import Caller
from tessera.execute.messages import ANY_RANK, Hello, Refused


@dataclass
class Muster:
    """Of one hub; asked under the gate's lock."""

    num_devices: int
    # Of the plans; what a worker that has plans must say.
    digest: str = ""
    # Devices that have no worker now.
    awaited: set[int] = field(default_factory=set)

    def refusal(self, hello: Hello) -> Refused | None:
        """Why a caller can never be needed; None if it can."""
        if hello.digest not in ("", self.digest):
            return Refused("it has other plans", "Copy the same plan files everywhere.")
        if not ANY_RANK <= hello.rank < self.num_devices:
            return Refused(f"there is no rank {hello.rank}", f"There are {self.num_devices}, from 0.")
        return None

    def choose(self, device: int, callers: Sequence[Caller]) -> Caller | None:
        """The worker for a device; or one that is to be refused, whoever looks first."""
        for caller in callers:
            if caller.hello.rank == device or self.refusal(caller.hello) is not None:
                return caller
        said = {caller.hello.rank for caller in callers}
        anyone = [caller for caller in callers if caller.hello.rank == ANY_RANK]
        if anyone and len(anyone) >= len(self.awaited - said):
            return anyone[0]
        return None
