"""Checkpoint folders, checked before use: configuration, weights, memory.

Weights come from *.safetensors in the folder; links may lead only to Hugging Face's cache. A model is sized
on the meta device first. Nothing is downloaded. Library errors become one line with the folder.
"""

import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules import module as torch_module

from tessera.errors import CaptureError, TesseraError, extra_module, first_line
from tessera.ir import Step, units
from tessera.ir.files import packaged
from tessera.ir.host import available_bytes

MAX_JSON_BYTES = 64 * 2**20
# Not JSON numbers: transformers writes {"__float__": "Infinity"}.
SPECIAL_FLOATS = ("Infinity", "-Infinity", "NaN")
# Upper bounds of any integer, of counts, and of layers and heads.
MAX_INT, MAX_NUM, MAX_COUNT = 2**53, 2**20, 2**15
COUNTS = re.compile(r"layer|depth|block|group|expert|head|stage")
NO_COUNTS = re.compile(r"size|dim|len|token|window|position|vocab")
# `ignored`: what a configuration may not choose: code, kernels, files, attention. `adapter`: what one of an
# adapter may hold.
SETTINGS = packaged("capture.models", "settings.json", dict[str, frozenset[str]])
IGNORED = SETTINGS["ignored"]
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
BARE = ("F8_E4M3", "F8_E5M2")
MAX_TENSORS, MAX_SECONDS = 100_000, 60.0
# Model size to file size; files may hold 4 bits for 32.
MAX_GROWTH = 16
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REVISION = re.compile(r"[0-9a-f]{40}")
# In order of preference.
STEMS = ("model", "diffusion_pytorch_model")
PART = re.compile(r"-of-\d+\.safetensors$")
# Libraries whose errors are reported in one line.
LOGS = ("transformers", "torch._subclasses.fake_tensor")
AGAIN = "Download the model again."
CODE_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

CONVERT = "Use the model's GPTQ, AWQ, FP8 or MXFP4 checkpoint, or convert it to safetensors in bfloat16."

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Filled:
    module: Any
    missing: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()


Give = Callable[[Tensors], Filled]


def cached(name: str) -> Path | None:
    if not REPOSITORY.fullmatch(name) or "--" in name:
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    root = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or base) / "hub"
    repository = Path(root) / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / revision
    return folder if REVISION.fullmatch(revision) and folder.is_dir() else None


def read_json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise CaptureError("is no file", AGAIN, str(path))
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CaptureError(f"has more than {MAX_JSON_BYTES:,} bytes", AGAIN, str(path))
        document = json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"is no JSON: {first_line(error)}", AGAIN, str(path)) from error
    if not isinstance(document, dict):
        raise CaptureError(f"holds a {type(document).__name__}, not an object", AGAIN, str(path))
    return document


def read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        settings = read_json(path).items()
        return {name: _checked(value, name, path) for name, value in settings if name not in IGNORED}
    except RecursionError as error:
        raise CaptureError("is nested too deeply", AGAIN, str(path)) from error


def _checked(value: Any, name: str, path: Path) -> Any:
    if isinstance(value, dict) and value.get("__float__") in SPECIAL_FLOATS:
        return float(value["__float__"])
    if isinstance(value, dict):
        return {key: _checked(item, key, path) for key, item in value.items() if key not in IGNORED}
    if isinstance(value, list):
        return [_checked(item, name, path) for item in value]
    if value == "auto" and name in ("dtype", "torch_dtype"):
        return None  # that of the weights
    if isinstance(value, int) and not isinstance(value, bool):
        least = 1 if name in SETTINGS["positive"] else -MAX_INT
        most = MAX_NUM if name.startswith(("num_", "n_")) else MAX_INT
        if COUNTS.search(name) and not NO_COUNTS.search(name):
            most = MAX_COUNT
        if not least <= value <= most:
            raise CaptureError(f"no model has {name} = {_short(value)}", "Correct it.", str(path))
    return value


def no_config(folder: Path) -> CaptureError:
    if (folder / "adapter_config.json").exists():
        remedy = "Serve its base model with --lora NAME=FOLDER, or merge it (peft: merge_and_unload)."
        return CaptureError("this folder holds a LoRA adapter, not a model", remedy, str(folder))
    if any(folder.glob("*.gguf")):
        return CaptureError("GGUF weights are not supported", CONVERT, str(folder))
    remedy = "Name a Hugging Face model's folder."
    return CaptureError("this folder holds no config.json", remedy, str(folder))


def _short(value: int) -> str:
    text = str(value)
    return text if len(text) < 24 else f"{text[:8]}... ({len(text)} digits)"


def read_weights(folder: Path) -> dict[str, Any]:
    safetensors = extra_module("safetensors", "hf")
    index, names = _listed(folder)
    tensors: dict[str, Any] = {}
    for name in names:
        path = _inside(folder, name)
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
            tensors |= {key: file.get_slice(key) for key in file.keys() if index.get(key, name) == name}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise CaptureError(f"is broken: {first_line(error)}", AGAIN, str(path)) from error
    lost = sorted(index.keys() - tensors.keys())
    if lost:
        message = f"its index names {_some(lost)}, which {index[lost[0]]} does not hold"
        raise CaptureError(message, AGAIN, str(folder))
    return tensors


def dtype_of(folder: Path) -> torch.dtype:
    """Type of most weights of products."""
    sizes = Counter[torch.dtype]()
    for tensor in read_weights(folder).values():
        if dtype := DTYPES.get(str(tensor.get_dtype())):
            sizes[dtype] += math.prod(tensor.get_shape())
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def widened(model: Any, names: Iterable[str]) -> Any:
    """Weights of these names are in float32, as the model's library reads them."""
    kept = [re.compile(name.replace("*", ".*")) for name in names]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_short = tensor.is_floating_point() and tensor.itemsize < 4
        if is_short and any(pattern.search(name) for pattern in kept):
            path, _, key = name.rpartition(".")
            wide = tensor.detach().float()  # types of fake parameters cannot be changed
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            setattr(model.get_submodule(path), key, torch.nn.Parameter(wide) if is_parameter else wide)
    return model


def weight_bytes(folder: Path) -> int:
    return sum(_inside(folder, name).stat().st_size for name in _listed(folder)[1])


def _listed(folder: Path) -> tuple[dict[str, str], list[str]]:
    for stem in STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if index.exists():
            files = read_json(index).get("weight_map")
            is_map = isinstance(files, dict) and all(isinstance(x, str) for x in files.values())
            if not files or not is_map:
                raise CaptureError("has no weight_map from tensors to files", AGAIN, str(index))
            return files, sorted(set(files.values()))
        if os.path.lexists(folder / f"{stem}.safetensors"):
            return {}, [f"{stem}.safetensors"]
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) > 1 or any(PART.search(name) for name in others):
        message = f"has {others[0]}, {len(others)} in all, and no model.safetensors.index.json"
        raise CaptureError(message, AGAIN, str(folder))
    return {}, others


def _inside(folder: Path, name: str) -> Path:
    """The file must lie in the folder or its cache."""
    path = folder / name
    if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
        remedy = "Only *.safetensors beside config.json are read: convert them, or download them again."
        raise CaptureError(f"its index names {name!r} as a file of weights", remedy, str(folder))
    home, real = folder.resolve(), path.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if real.parent not in (home, blobs):
        raise CaptureError("is a link out of the folder", "Copy the file itself there.", str(path))
    if not path.is_file():
        raise CaptureError("is no file" if path.exists() else "is missing", AGAIN, str(path))
    return path


def load(folder: Path, step: Step, make: Callable[[], Any], give: Give, is_packed: bool = False) -> Any:
    """`make` creates the model without weights, `give` with them.

    Without values (fake tensors, meta device) no weights are read. `is_packed`: weights take the files' size;
    `give` fills in their parts without values too.
    """
    with _bounded(folder):
        if not has_values() and not is_packed:
            return make()
        with torch.device("meta"):
            empty = make()
    size = sum(tensor.nbytes for tensor in (*empty.parameters(), *empty.buffers()))
    need = weight_bytes(folder) if is_packed else size
    if has_values() and need > (have := available_bytes()):
        message = f"its weights take {units.size(need)}; {units.size(have)} of memory are free"
        remedy = "Plan it, or capture it with --device fake, which needs none."
        raise CaptureError(message, remedy, str(folder))
    if step.random_weights:
        with blamed(folder), seeded(step.seed):
            return make()
    tensors = read_weights(folder)
    if not tensors:
        raise _no_weights(folder)
    if size > MAX_GROWTH * (held := weight_bytes(folder)):
        message = f"its files hold {units.size(held)} of weights, and this model has {units.size(size)}"
        raise CaptureError(message, AGAIN, str(folder))
    with blamed(folder):
        filled = give(tensors)
    if filled.missing:
        message = f"its weights lack {_some(sorted(filled.missing))}"
        raise CaptureError(message, f"{AGAIN[:-1]}, or use --random-weights.", str(folder))
    if filled.unlike:
        message = f"config.json and the weights differ in the shape or type of {_some(sorted(filled.unlike))}"
        raise CaptureError(message, AGAIN, str(folder))
    return filled.module


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # and no other device's
        yield


def _no_weights(folder: Path) -> CaptureError:
    others = sorted(p.name for pattern in CODE_FILES for p in folder.glob(pattern))
    if others:
        message = f"its weights are in {others[0]}, which can run code when it is read"
        return CaptureError(message, "Convert them to safetensors, or use --random-weights.", str(folder))
    remedy = "Add them, or use --random-weights."
    return CaptureError("holds a config.json and no weights", remedy, str(folder))


def give_transformers(build: Callable[..., Any], folder: Path | None, tensors: Tensors) -> Filled:
    """Quantised weights are read from `folder`."""
    bare = sorted(name for name, tensor in tensors.items() if str(tensor.get_dtype()).startswith(BARE))
    if bare and folder is None:  # a cast is no weight
        message = f"{_some(bare)} in 8-bit floats, without scales that its configuration tells of"
        raise CaptureError(message, f"{AGAIN[:-1]}, with its quantization_config.")
    module, report = build(
        folder,
        state_dict=None if folder else dict(tensors),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **({"use_safetensors": True, "local_files_only": True} if folder else {}),
    )
    unlike = {name for name, *_ in report["mismatched_keys"]}
    for name, tensor in module.state_dict().items():
        # Other dtypes are cast silently.
        is_plain = getattr(module.config, "quantization_config", None) is None
        if name in tensors and tensor.is_floating_point() and _is_whole(tensors[name]) and is_plain:
            unlike.add(name)
    return Filled(module, tuple(report["missing_keys"]), tuple(unlike))


def _is_whole(tensor: Any) -> bool:
    return str(tensor.get_dtype()).startswith(("I", "U", "BOOL"))


def has_values() -> bool:
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return not is_fake and torch.empty(0).device.type != "meta"


@contextmanager
def _bounded(folder: Path) -> Iterator[None]:
    num, started_s = 0, time.monotonic()

    def add(module: Any, name: str, tensor: Any) -> None:
        nonlocal num
        num += 1
        if num > MAX_TENSORS or time.monotonic() - started_s > MAX_SECONDS:
            message = f"its configuration makes more than {num - 1:,} tensors"
            raise CaptureError(message, "Correct config.json.", str(folder))

    with (
        torch_module.register_module_parameter_registration_hook(add),
        torch_module.register_module_buffer_registration_hook(add),
        blamed(folder),
    ):
        yield


@contextmanager
def blamed(
    folder: Path | str, what: str = "a model cannot be built from it", remedy: str = "Check config.json"
) -> Iterator[None]:
    try:
        with _quiet_and_offline():
            yield
    except TesseraError as error:
        if type(error) is CaptureError and not error.place:
            raise CaptureError(error.message, error.remedy, str(folder)) from error
        raise
    except Exception as error:  # untrusted numbers in library code: any error
        message = f"{what}: {type(error).__name__}: {first_line(error)}"
        remedy += ", or write a module:callable that returns a Workload."
        if isinstance(error, ImportError):
            remedy = "Install the package that it names."
        raise CaptureError(message, remedy, str(folder)) from error


def blamed_for_run(model: str) -> AbstractContextManager[None]:
    """A folder's sizes may not fit."""
    remedy = "Check config.json and --inputs"
    return blamed(Path(model), "its step cannot be run", remedy) if Path(model).is_dir() else nullcontext()


@contextmanager
def _quiet_and_offline() -> Iterator[None]:
    try:
        from huggingface_hub import constants
        from transformers.utils import logging as bars
    except ImportError:
        yield
        return
    with ExitStack() as stack, patch.object(constants, "HF_HUB_OFFLINE", True):
        for log in map(logging.getLogger, LOGS):
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)
        if bars.is_progress_bar_enabled():
            stack.callback(bars.enable_progress_bar)
        bars.disable_progress_bar()
        yield


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0][:200]}{more}"
