"""Plans of services between starts: what a second start of the same model on the same devices finds ready.

Plans lie under `$XDG_CACHE_HOME/tessera/plans`, in a folder named by a hash of everything that they depend
on: this package's own code, the versions of torch, transformers and Triton, the model's files, the sizes, the
devices and the memory that pages are given. So nothing in it can be out of date; what cannot be read is made
again, and a folder that cannot be written is done without. The newest `MAX_KEPT` are kept.

A small model's weights lie beside them, as its steps read them, so that it is served without being built:
to import what builds it takes longer than everything else. Larger ones are built at every start.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

import tessera
from tessera.errors import TesseraError
from tessera.ir import Plan, load, save
from tessera.serve.records import Shape

if TYPE_CHECKING:
    from tessera.serve.sight import Eyes, Sight

MAX_KEPT = 32
# Of weights that are kept.
MAX_WEIGHT_BYTES = 64 << 20
# What captured steps and their costs come from, besides this package.
PACKAGES = ("torch", "transformers", "triton", "aiconfigurator-core")
_MORE, _WEIGHTS = "more.json", "weights.pt"
_UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, pickle.UnpicklingError,
)  # fmt: skip


class ServableModel(Protocol):
    """What a service needs to know of a model: built (`steps.ServedModel`), or kept from an earlier start."""

    @property
    def shape(self) -> Shape:
        """Its sizes."""

    @property
    def state_bytes(self) -> int:
        """Of one microbatch."""

    def weights(self) -> "dict[str, torch.Tensor]":
        """By name."""

    def senses(self) -> "tuple[Sight, Eyes] | None":
        """How it sees; None for one that does not."""


@dataclass(frozen=True)
class KeptModel:
    shape: Shape
    state_bytes: int
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: ServableModel) -> "KeptModel | None":
        """What is worth keeping; None for large ones, and for those that see: their eyes are not kept."""
        weights = model.weights()
        if sum(tensor.nbytes for tensor in weights.values()) > MAX_WEIGHT_BYTES or model.senses():
            return None
        return cls(model.shape, model.state_bytes, weights)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.tensors)

    def senses(self) -> "tuple[Sight, Eyes] | None":
        return None


@dataclass(frozen=True)
class KeptPlans:
    """The plans of a service, and what was found out with them."""

    plans: tuple[Plan, ...]
    scale: float = 1.0
    # Policy -> tokens a second.
    rehearsed: Mapping[str, float] = field(default_factory=dict)
    # None: it has to be built.
    model: KeptModel | None = None


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera" / "plans"


def key_of(place: str, *given: object) -> str:
    """Names the plans of a model (a built-in name or a folder) for what is given, by its `repr`."""
    digest = hashlib.sha256(repr((_code(), _versions(), place, given)).encode())
    folder = Path(place)
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):  # gone meanwhile
                stamp = path.stat()
                digest.update(repr((path.name, stamp.st_size, stamp.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


def find(key: str, folder: Path | None = None) -> KeptPlans | None:
    own = (folder or default_folder()) / key
    try:
        more = json.loads((own / _MORE).read_text())
        plans = tuple(load(Plan, own / f"{n}.plan") for n in range(int(more["plans"])))
        found = KeptPlans(plans, float(more["scale"]), dict(more["rehearsed"]), _find_model(own, more))
        os.utime(own)
    except (*_UNREADABLE, TesseraError):
        return None
    return found if plans else None


def _find_model(own: Path, more: Mapping[str, Any]) -> KeptModel | None:
    if more["shape"] is None:
        return None
    shape = Shape(**{**more["shape"], "sizes": tuple(more["shape"]["sizes"])})
    return KeptModel(shape, int(more["state_bytes"]), torch.load(own / _WEIGHTS, weights_only=True))


def keep(
    key: str,
    found: KeptPlans,
    folder: Path | None = None,
    warn: Callable[[str], None] = lambda what: None,
) -> None:
    """Keeps plans under this name, whole or not at all; `warn` hears why not."""
    home = folder or default_folder()
    model = found.model
    more = {
        "plans": len(found.plans),
        "scale": found.scale,
        "rehearsed": dict(found.rehearsed),
        "shape": None if model is None else asdict(model.shape),
        "state_bytes": 0 if model is None else model.state_bytes,
    }
    part = None
    try:
        home.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=home))
        for number, plan in enumerate(found.plans):
            save(plan, part / f"{number}.plan")
        if model is not None:
            torch.save(dict(model.tensors), part / _WEIGHTS)
        (part / _MORE).write_text(json.dumps(more))
        shutil.rmtree(home / key, ignore_errors=True)
        part.rename(home / key)
    except (OSError, RuntimeError, TesseraError) as error:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        warn(f"{home}: {getattr(error, 'message', None) or getattr(error, 'strerror', None) or error}")
        return
    _drop_old(home)


def _drop_old(home: Path) -> None:
    with contextlib.suppress(OSError):
        own = [path for path in home.iterdir() if not path.name.startswith(".")]
        for path in sorted(own, key=lambda p: p.stat().st_mtime, reverse=True)[MAX_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)


@cache
def _code() -> str:
    """Of this package's own source."""
    root = Path(tessera.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> Sequence[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(name)
    return found
