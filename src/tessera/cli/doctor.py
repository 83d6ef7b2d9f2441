"""tessera doctor: what this machine can do, and the line that installs what is missing."""

import importlib.util
import os
import platform
from typing import Annotated

import msgspec

from tessera import __version__
from tessera.cli.output import HIDDEN, Record, progress, shown
from tessera.errors import install_line, version_of
from tessera.ir.files import packaged

# Extra -> the modules that it installs.
EXTRAS = packaged("cli", "extras.json", dict[str, tuple[str, ...]])
CORE = ("torch", "numpy", "scipy", "msgspec", "pyzmq", "typer", "rich")


class DeviceLine(Record, frozen=True):
    name: str
    what: str


class TransportLine(Record, frozen=True):
    name: str
    joins: str
    is_present: Annotated[bool, HIDDEN]
    is_usable: Annotated[bool, shown("usable")]
    why: str


class ExtraLine(Record, frozen=True):
    name: str
    is_installed: Annotated[bool, shown("installed")]
    missing: tuple[str, ...]
    install: Annotated[str | None, shown("to install")]


class Doctor(Record, frozen=True):
    tessera: str
    python: str
    machine: str
    cores: int
    versions: dict[str, str | None]
    devices: tuple[DeviceLine, ...]
    transports: tuple[TransportLine, ...]
    # What is joined -> transport that `--transport auto` takes.
    chosen_transports: dict[str, str | None]
    extras: tuple[ExtraLine, ...]


def doctor() -> Doctor:
    """Show devices, versions and extras of this machine."""
    with progress("importing torch"):
        from tessera.execute.cuda.direct import chosen, transports

        usable = transports()
        return Doctor(
            tessera=__version__,
            python=platform.python_version(),
            machine=platform.machine(),
            cores=os.cpu_count() or 1,
            versions={name: version_of(name) for name in CORE},
            devices=_devices(),
            transports=msgspec.convert(usable, tuple[TransportLine, ...], from_attributes=True),
            chosen_transports=chosen(usable),
            extras=tuple(_extra(name, modules) for name, modules in EXTRAS.items()),
        )


def _devices() -> tuple[DeviceLine, ...]:
    import torch

    from tessera.execute import driver
    from tessera.ir.host import host_nodes, instructions

    devices = {"emu:GPU": "computes on this CPU, keeps a known GPU's modelled time"}
    for node in host_nodes():
        gib, vectors = node.memory_bytes / 2**30, ", ".join(instructions())
        devices[f"cpu/node={node.number}"] = f"{len(node.cores)} cores ({vectors}), {gib:.0f} GiB"
    has_parts = driver.has("cuGreenCtxStreamCreate")
    part = "some of its SMs" if has_parts else "missing: this driver has no green contexts (550 has them)"
    for index in range(torch.cuda.device_count()):
        card, name = torch.cuda.get_device_properties(index), f"cuda:{index}"
        sms, gib = card.multi_processor_count, card.total_memory / 2**30
        devices[name] = f"{card.name}, {gib:.0f} GiB, {sms} SMs"
        devices[f"{name}/sm=K"] = part
        devices[f"{name}/as=GPU"] = "computes on the card, keeps a known GPU's modelled time"
    return tuple(DeviceLine(name=name, what=what) for name, what in devices.items())


def _extra(name: str, modules: tuple[str, ...]) -> ExtraLine:
    missing = tuple(m for m in modules if importlib.util.find_spec(m) is None)
    install = install_line(name) if missing else None
    return ExtraLine(name=name, is_installed=not missing, missing=missing, install=install)
