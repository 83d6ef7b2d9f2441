"""Every error that a user can cause: one message, the place it concerns, and what to do about it.

Errors carry plain fields through `super().__init__`, so that they survive pickling between
worker processes. Anything else that reaches the command line is a bug and keeps its traceback.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

# The name on the package index, where `tessera` belongs to somebody else; what is imported is `tessera`.
DISTRIBUTION = "tessera-gpu"


class TesseraError(Exception):
    """A user's mistake or a machine's limit: `place: message. remedy`, never a traceback."""

    def __init__(self, message: str, remedy: str = "", place: str = "") -> None:
        super().__init__(message, remedy, place)
        self.message, self.remedy, self.place = message, remedy, place

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text.rstrip('.')}. {self.remedy}" if self.remedy else text


class UnknownName(TesseraError):
    """A name nobody registered; the message lists the known ones."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.what, self.name, self.known = what, name, tuple(sorted(known))
        TesseraError.__init__(self, f"unknown {what} '{name}'; known: {', '.join(self.known)}")

    def __reduce__(self) -> tuple[type["UnknownName"], tuple[str, str, tuple[str, ...]]]:
        return UnknownName, (self.what, self.name, self.known)


def install_line(extra: str) -> str:
    """What a user types to have an optional part."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


class MissingExtra(TesseraError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        self.module, self.extra = module, extra
        TesseraError.__init__(
            self, f"this needs the package '{module}'", f"Install it: {install_line(extra)}"
        )

    def __reduce__(self) -> tuple[type["MissingExtra"], tuple[str, str]]:
        return MissingExtra, (self.module, self.extra)


def extra_module(name: str, extra: str, package: str = "") -> Any:
    """A module of an optional part, or MissingExtra with the package that it is in."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra(package or name, extra) from error


class ArtifactError(TesseraError):
    """A file that is not the artifact it should be."""


class MismatchError(TesseraError):
    """Two artifacts that do not belong together, such as costs of another trace."""


class RuleBroken(TesseraError):
    """A record that breaks a rule of its verifier."""


class CaptureError(TesseraError):
    """A workload that cannot be recorded as it stands."""


class CannotTime(TesseraError):
    """One launch that cannot be timed on one device; it is priced by the next source."""


class DeviceGone(TesseraError):
    """A device that stopped answering while it was measured; what was measured before is kept."""


class ArrivalsError(TesseraError):
    """Arrivals, lengths or limits that make no sense, or a log of requests with holes."""


class LoadError(TesseraError):
    """A server cannot be asked, or its answer is none: `kind` is a short name to count by."""

    def __init__(self, kind: str, message: str, remedy: str = "", place: str = "") -> None:
        TesseraError.__init__(self, message, remedy, place)
        self.kind = kind

    def __reduce__(self) -> tuple[type["LoadError"], tuple[str, str, str, str]]:
        return LoadError, (self.kind, self.message, self.remedy, self.place)


class PlanInfeasible(TesseraError):
    """No placement satisfies the constraints."""


class DeviceMemoryError(TesseraError):
    """A plan needs more memory than a device has; says what to lower."""


class AskError(TesseraError):
    """A request that cannot be served as it stands: too long, empty, a wrong token; `place` is its field."""


class ServiceBusy(TesseraError):
    """Too many requests wait already; the same request may be served later."""


class ServiceClosing(TesseraError):
    """The service finishes what runs and takes nothing new."""


class WorkerError(TesseraError):
    """A worker process failed, vanished or did not answer in time."""
