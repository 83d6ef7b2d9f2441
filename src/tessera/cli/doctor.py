"""tessera doctor: what this machine can do, and the line that installs what is missing."""

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.markup import escape
from rich.table import Table

from tessera import __version__
from tessera.cli.output import AsJson, console, print_json, progress
from tessera.errors import install_line

# extra -> modules it brings
EXTRAS = {
    "hf": ("transformers", "safetensors"),
    "serve": ("fastapi", "uvicorn"),
    "load": ("aiohttp",),
    "grammar": ("llguidance",),
    "diffusers": ("diffusers",),
    "report": ("matplotlib",),
    "tables": ("aiconfigurator_core", "pyarrow"),
    "ray": ("ray",),
    "gpu": ("triton",),
}
CORE = ("torch", "numpy", "scipy", "typer", "rich")


def doctor(as_json: AsJson = False) -> None:
    """Show devices, versions and extras of this machine."""
    with progress("importing torch"):
        found = {
            "tessera": __version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "versions": {name: _version(name) for name in CORE},
            "devices": _devices(),
            "transports": _transports(),
            "extras": {name: _extra(name, modules) for name, modules in EXTRAS.items()},
        }
    print_json(found) if as_json else _show(found)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """What launches can run on here. Emulated devices need nothing, so they are always there."""
    import torch

    from tessera.execute import driver

    devices: list[dict[str, Any]] = [
        {"name": "emu:GPU", "what": "computes on this CPU, keeps a known GPU's modelled time"}
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sms = properties.multi_processor_count
        what = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {sms} SMs"
        devices.append({"name": f"cuda:{index}", "what": what})
        cuts = driver.has("cuGreenCtxStreamCreate")
        part = "some of its SMs" if cuts else "missing: this driver has no green contexts (550 has them)"
        devices.append({"name": f"cuda:{index}/sm=K", "what": part})
        other = "computes on the card, keeps a known GPU's modelled time"
        devices.append({"name": f"cuda:{index}/as=GPU", "what": other})
    return devices


def _transports() -> dict[str, Any]:
    """The ways between workers, and which one a run would take."""
    from tessera.execute.cuda.direct import chosen, transports

    found = transports()
    return {
        "known": [
            {"name": t.name, "joins": t.joins, "present": t.is_present, "usable": t.is_usable, "why": t.why}
            for t in found
        ],
        "chosen": chosen(found),
    }


def _extra(name: str, modules: tuple[str, ...]) -> dict[str, Any]:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    install = install_line(name) if missing else None
    return {"installed": not missing, "missing": missing, "install": install}


def _show(found: dict[str, Any]) -> None:
    out = console()
    out.print(
        f"tessera {found['tessera']}, Python {found['python']}, {found['machine']}, {found['cores']} cores"
    )
    table = Table("what", "state", "to install", title="This machine")
    for name, number in found["versions"].items():
        table.add_row(name, number or "missing", "" if number else "pip install tessera")
    table.add_section()
    for device in found["devices"]:
        table.add_row(device["name"], device["what"], "")
    table.add_section()
    for transport in found["transports"]["known"]:
        state = "usable" if transport["usable"] else "there" if transport["present"] else "missing"
        joins = f"transport {transport['name']}: {transport['joins']}"
        table.add_row(joins, f"{state}: {transport['why']}", "")
    table.add_section()
    for name, extra in found["extras"].items():
        state = "installed" if extra["installed"] else f"missing: {', '.join(extra['missing'])}"
        table.add_row(f"extra {name}", state, escape(extra["install"] or ""))
    out.print(table)
