"""User errors: one message with its place and remedy.

`args` are the constructor's, as `Exception` sets them, so errors survive pickling. Any other exception that
reaches the command line is a bug and keeps its traceback.
"""

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

T = TypeVar("T")
DISTRIBUTION = "tessera-gpu"


class TesseraError(Exception):
    """Message as `place: message. remedy`."""

    def __init__(self, message: str, remedy: str = "", place: str = "") -> None:
        self.message, self.remedy, self.place = message, remedy, place

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text.rstrip('.')}. {self.remedy}" if self.remedy else text


class UnknownName(TesseraError):
    """The message lists the valid names."""

    def __init__(self, what: str, name: str, names: Iterable[str], place: str = "") -> None:
        self.args = (what, name, tuple(sorted(names)), place)
        super().__init__(f"unknown {what} '{name}'; known: {', '.join(self.args[2])}", place=place)


def check_known(what: str, name: str, names: Iterable[str], place: str = "") -> None:
    if name not in names:
        raise UnknownName(what, name, names, place)


def by_name(pairs: Iterable[tuple[str, T]], place: str) -> dict[str, T]:
    """Values of NAME=VALUE options; of a name that is given twice, one value would be lost."""
    values: dict[str, T] = {}
    for name, value in pairs:
        if name in values:
            raise TesseraError(f"'{name}' is given twice", "Leave one of them.", place)
        values[name] = value
    return values


def install_line(extra: str) -> str:
    return f'pip install "{DISTRIBUTION}[{extra}]"'


class MissingExtra(TesseraError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"this needs the package '{module}'", f"Install it: {install_line(extra)}")


def extra_module(name: str, extra: str, package: str = "") -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra(package or name, extra) from error


def first_line(text: object) -> str:
    """A library's error as one line; the next one too if it ends with a colon."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()] or [type(text).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]


def version_of(package: str) -> str | None:
    """None: not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class ArtifactError(TesseraError):
    """A file that is not the expected artifact."""


class MismatchError(TesseraError):
    """Artifacts that do not belong together, such as costs of another trace."""


class RuleBroken(TesseraError):
    """A record breaks a rule of its verifier."""


class CaptureError(TesseraError):
    """A workload cannot be recorded."""


class CannotTime(TesseraError):
    """A launch cannot be timed on a device; the next source prices it."""


class DeviceGone(TesseraError):
    """A device stopped while being measured; earlier measurements are kept."""


class ArrivalsError(TesseraError):
    """Invalid arrivals, lengths or limits, or an incomplete request log."""


class LoadError(TesseraError):
    """A failed request to a server; `kind` is for counting."""

    def __init__(self, kind: str, message: str, remedy: str = "", place: str = "") -> None:
        super().__init__(message, remedy, place)
        self.kind = kind


class PlanInfeasible(TesseraError):
    """No placement satisfies the constraints."""


class DeviceMemoryError(TesseraError):
    """A plan needs more memory than a device has."""


class AskError(TesseraError):
    """An invalid request; `place` is its field."""


class ServiceBusy(TesseraError):
    """The queue is full; a retry may succeed."""


class ServiceClosing(TesseraError):
    """The service is draining."""


class WorkerError(TesseraError):
    """A worker process failed, exited or timed out."""
