"""Gathering: the workers of one service on several machines, gathered again whenever a stepper is made.

A service has one gate from its start to its end. Each stepper gets a hub that takes workers from the gate:
those that were started for it (on this machine, or by Ray), and those that call by themselves from other
machines. When one is lost and no lane avoids it, the next stepper's hub starts and awaits them anew. Who
has not called within `replace_s` is absent, and the service is planned without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tessera.execute.crew import MakeHub
from tessera.execute.gate import Gate
from tessera.execute.hub import START_TIMEOUT_S
from tessera.execute.remote import RemoteHub, Starter
from tessera.execute.worker import Setup

# How long the service waits for the workers of its devices after one was lost.
REPLACE_S = 60.0
# What a worker says that was handed its setup when it was started; the others are briefed.
BORN = "handed over"


@dataclass
class Gathering:
    """Makes the hubs of one service."""

    gate: Gate
    # Devices in the order of the ranks.
    names: Sequence[str]
    # Device -> how its worker is started; those without one call by themselves.
    starters: Mapping[str, Starter]
    start_s: float = START_TIMEOUT_S
    replace_s: float = REPLACE_S
    _hubs: list[RemoteHub] = field(default_factory=list)

    def hub_for(self, names: Sequence[str]) -> MakeHub:
        """Makes the hub of a stepper on these devices."""

        def make(setups: Sequence[Setup]) -> RemoteHub:
            starters = {d: self.starters[name] for d, name in enumerate(names) if name in self.starters}
            ranks = [self.names.index(name) for name in names]
            timeout_s = self.replace_s if self._hubs else self.start_s
            hub = RemoteHub(names, setups, self.gate, BORN, starters, ranks, True, timeout_s)
            self._hubs = [hub]
            return hub

        return make

    def absent(self) -> list[str]:
        """Devices whose workers did not call when the last hub was started."""
        return [name for hub in self._hubs for name in hub.absent]

    def close(self) -> None:
        """Nobody can call any more: workers on other machines leave."""
        self.gate.close()
