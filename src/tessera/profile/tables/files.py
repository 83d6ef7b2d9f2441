"""Finds the table files of an installed `aiconfigurator-core`; never runs its code.

Layout: `<package>/systems/data/<system>/<family>/<stack>/<version>/<file>.parquet`. Which stack and version:
the first of the kind's stacks that has a sound table on that GPU, in the same order for every GPU, and of one
stack the newest version. So two GPUs are compared on the same software wherever the package has it for both.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tessera.profile.counts import OpClass
from tessera.profile.tables.kinds import KINDS

PACKAGE = "aiconfigurator_core"
DISTRIBUTION = "aiconfigurator-core"
# Which GPU each system of the package is.
SYSTEMS = {
    "a100": "a100_sxm", "l40s": "l40s", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm",
    "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
# What the tables call the card itself.
CARDS = {
    "a100": "A100", "l40s": "L40S", "h100": "H100", "h200": "H200", "b200": "B200",
    "rtx-pro-6000": "RTX PRO 6000",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableFile:
    """One table of one GPU, as one version of one stack ran it."""

    gpu: str
    op: OpClass
    stack: str
    version: str
    path: Path

    @property
    def name(self) -> str:
        """How people call it: "sglang 0.5.14"."""
        return f"{self.stack} {self.version}"


@cache
def installed_root() -> Path | None:
    """The folder of systems of the installed package; None without it."""
    spec = find_spec(PACKAGE)
    for place in spec.submodule_search_locations or () if spec else ():
        root = Path(place) / "systems" / "data"
        if root.is_dir():
            return root
    return None


def table_files(root: Path, gpu_name: str, op: OpClass) -> tuple[TableFile, ...]:
    """The tables of one GPU and class, best first."""
    if gpu_name not in SYSTEMS or op not in KINDS:
        return ()
    kind, found = KINDS[op], []
    for stack in kind.stacks:
        folder = root / SYSTEMS[gpu_name] / kind.family / stack
        versions = sorted(folder.glob(f"*/{kind.file}"), key=_version_key, reverse=True)
        found += [TableFile(gpu_name, op, stack, path.parent.name, path) for path in versions]
    return tuple(found)


def _version_key(path: Path) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", path.parent.name))
