"""Watcher: what a monitor's driver sees of a simulated server and may do to it; see `simulate.adaptive`."""

from typing import TYPE_CHECKING, Protocol

from tessera.simulate.seats import Slot

if TYPE_CHECKING:
    from tessera.simulate.online import Server


class Watcher(Protocol):
    """Called by the server at the moments named."""

    def on_start(self, server: "Server") -> None:
        """Before the first request."""

    def on_arrival(self, server: "Server") -> None:
        """One request more is waiting."""

    def on_run(self, server: "Server", slot: Slot) -> None:
        """A slot has finished a decode."""

    def on_lost(self, server: "Server", device: str) -> None:
        """A device is gone, and so is what ran on it."""
