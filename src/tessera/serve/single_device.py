"""Models on one device: encoders for embeddings, and diffusers pipelines for images.

They run on a thread of this process, without plans and workers. An encoder pools the last hidden states as
the folder's sentence-transformers files (modules.json) say; the default is the mean. Waiting inputs of all
clients are batched, those of one request by length. A pipeline is built from safetensors and library classes,
never from code in the folder.

Not handled: modules after pooling other than Normalize, image editing, video and sound.
"""

import asyncio
import inspect
import io
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import torch

from tessera.capture import build, place_of
from tessera.capture.models import steps_of_model
from tessera.capture.models.checkpoint import blamed, blamed_for_run, read_json
from tessera.capture.models.denoisers import PIPELINE
from tessera.capture.models.hf import config_of
from tessera.errors import ArtifactError, AskError, ServiceBusy, ServiceClosing, extra_module, first_line
from tessera.ir import Step
from tessera.serve.answer import Answer
from tessera.serve.records import Ask, DeviceView, ImageDraft, Snapshot

MAX_ROWS, MAX_PADDED = 64, 8192
MAX_INPUTS, MAX_REQUESTS = 2**16, 64
# Larger values mean that a tokenizer has no limit.
NO_LIMIT = 2**20
POOLINGS = ("mean", "cls", "max", "lasttoken")


@dataclass(slots=True, eq=False)
class WaitingInput:
    value: Any
    future: "Future[Any]" = field(default_factory=Future)
    is_gone: bool = False


class SingleDeviceService:
    """Callable from any event loop."""

    failure = ""

    def __init__(self, model: "Encoder | TextToImage", name: str) -> None:
        self.model, self._name = model, name
        self._waiting: deque[WaitingInput] = deque()
        self._lock, self._is_closed = threading.Lock(), False
        self._thread = ThreadPoolExecutor(1, "tessera-single-device")
        self._running = self._tokens = 0
        self._busy_s, self._begun_s = 0.0, time.monotonic()
        self._finished = dict.fromkeys(("stop", "cancelled", "error"), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, grace_s: float = 0.0) -> None:
        """Waits for the running batch."""
        with self._lock:
            self._is_closed = True
            for one in self._waiting:
                one.future.cancel()
        self._thread.shutdown()

    @property
    def num_waiting(self) -> int:
        return sum(not one.is_gone for one in list(self._waiting))

    async def compute(self, inputs: Sequence[Any]) -> list[Any]:
        """Cancelling drops waiting inputs and stops an image at its next step."""
        added, most = [WaitingInput(value) for value in inputs], self.model.max_waiting
        with self._lock:
            if self._is_closed:
                raise ServiceClosing("the service is stopping", "Ask another one.")
            if len(self._waiting) + len(added) > most < self.num_waiting + len(added):
                raise ServiceBusy(f"the queue is full: {self.num_waiting} inputs wait", "Try again later.")
            self._waiting.extend(sorted(added, key=lambda one: self.model.length(one.value)))
            self._thread.submit(self._compute)
        try:
            return [await asyncio.wrap_future(one.future) for one in added]
        finally:
            for one in added:
                one.is_gone = True
                one.future.cancel()

    def _compute(self) -> None:
        while batch := self._next():
            begun_s, self._running = time.monotonic(), len(batch)
            values, outputs, reason = [one.value for one in batch], list[Any](), "stop"
            try:
                outputs = list(self.model.run(values, lambda: all(one.is_gone for one in batch)))
                self._tokens += sum(map(self.model.length, values))
            except Exception as error:  # noqa: BLE001 - refused, a bug, or memory: other batches go on
                reason = "cancelled" if isinstance(error, _Gone) else "error"
                for one in batch:
                    one.future.set_exception(error)
            self._finished[reason] += len(batch)
            self._running = 0
            self._busy_s += time.monotonic() - begun_s
            for one, output in zip(batch, outputs, strict=False):
                one.future.set_result(output)

    def _next(self) -> list[WaitingInput]:
        batch: list[WaitingInput] = []
        with self._lock:
            while self._waiting and self.model.fits([one.value for one in (*batch, self._waiting[0])]):
                one = self._waiting.popleft()
                if one.future.set_running_or_notify_cancel():
                    batch.append(one)
                else:
                    self._finished["cancelled"] += 1
        return batch

    def answer(self, ask: Ask, beside: Answer | None = None) -> Answer:
        raise AskError(f"this model makes {self.model.makes} only", place="model")

    def snapshot(self) -> Snapshot:
        share = self._busy_s / max(1e-9, time.monotonic() - self._begun_s)
        return Snapshot(
            model=self._name,
            policy="single-device",
            policies=("single-device",),
            devices=(DeviceView(self.model.device, share, 0),),
            links=(),
            running=self._running,
            waiting=self.num_waiting,
            prompt_tokens=self._tokens,
            finished=dict(self._finished),
        )


class PoolingModule(msgspec.Struct):
    """One entry of modules.json."""

    type: str
    path: Annotated[str, msgspec.Meta(pattern=r"^(\d+_\w+)?$")]

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Pooling:
    mode: str = "mean"
    is_normal: bool = False
    # None: the model's positions.
    max_tokens: int | None = None
    prompt: str = ""
    # Lengths a vector may be cut to; 0: any.
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> "Pooling":
        mode, is_normal = "mean", False
        for module in _modules(folder)[1:]:
            if module.kind == "Pooling":
                mode = _mode(folder / module.path)
            elif module.kind == "Normalize":
                is_normal = True
            else:
                message = f"its module {module.kind} is not supported"
                raise ArtifactError(message, "Use another model.", str(folder))
        config = _read(folder / "config.json")
        sizes = config.get("matryoshka_dimensions") or ([0] if config.get("is_matryoshka") else [])
        most = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        texts = _read(folder / "config_sentence_transformers.json")
        prompt = (texts.get("prompts") or {}).get(texts.get("default_prompt_name") or "", "")
        return cls(mode, is_normal, most, str(prompt), tuple(map(int, sizes)))

    def pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Vectors [inputs, size] of states [inputs, tokens, size]; the mask is 0 for padding."""
        real = mask[:, :, None].to(states.dtype)
        if self.mode == "cls":
            vectors = states[:, 0]
        elif self.mode == "lasttoken":
            vectors = states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
        elif self.mode == "max":
            vectors = states.masked_fill(real == 0, -torch.inf).amax(1)
        else:
            vectors = (states * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(vectors, dim=-1) if self.is_normal else vectors


def _modules(folder: Path) -> list[PoolingModule]:
    path = folder / "modules.json"
    if not path.exists():
        return [PoolingModule("Transformer", "")]
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[PoolingModule])
    except msgspec.DecodeError as error:
        raise ArtifactError(f"cannot be read: {error}", "Download the model again.", str(path)) from error
    if not modules or modules[0].kind != "Transformer":
        raise ArtifactError("its first module is not a Transformer", "Use another model.", str(path))
    return modules


def _mode(folder: Path) -> str:
    config = _read(folder / "config.json")
    named, prefix = config.get("pooling_mode"), "pooling_mode_"
    flags = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value]
    modes = [named] if named else [flag.removesuffix("s").removesuffix("_token") for flag in flags]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        message = f"pooling by {' and '.join(map(str, modes))} is not supported"
        raise ArtifactError(message, f"Supported: {', '.join(POOLINGS)}.", str(folder))
    return str(modes[0])


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


class Encoder:
    makes, max_waiting = "vectors", MAX_INPUTS

    def __init__(self, module: Any, pooling: Pooling, device: str = "cpu") -> None:
        self._module, self.pooling, self.device = module.to(device), pooling, device
        config = module.config
        self.vocab_size, self.size = int(config.vocab_size), int(config.hidden_size)
        self._pad = int(getattr(config, "pad_token_id", None) or 0)
        self.max_tokens = min(pooling.max_tokens or NO_LIMIT, self._positions(config))

    @classmethod
    def open(cls, model: str, device: str = "cpu", random_weights: bool = False) -> "Encoder":
        folder = place_of(model)
        module = build(Step(folder, "call", 1, 8, random_weights=random_weights)).module.base_model
        encoder = cls(module, Pooling.of(Path(folder)), device)
        with blamed_for_run(folder):  # at full length, so that no input fails later
            encoder.encode([(0,) * encoder.max_tokens])
        return encoder

    def _positions(self, config: Any) -> int:
        """Some models count positions from after the padding index."""
        most = int(getattr(config, "max_position_embeddings", NO_LIMIT))
        layer = getattr(getattr(self._module, "embeddings", None), "position_embeddings", None)
        skipped = getattr(layer, "padding_idx", None)
        return most if skipped is None else most - skipped - 1

    def length(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def fits(self, batch: Sequence[Sequence[int]]) -> bool:
        padded = len(batch) * max(map(len, batch))
        return len(batch) == 1 or (len(batch) <= MAX_ROWS and padded <= MAX_PADDED)

    def run(self, batch: Sequence[Sequence[int]], is_gone: Callable[[], bool]) -> Sequence[torch.Tensor]:
        return list(self.encode(batch))

    def encode(self, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
        longest = max(map(len, inputs))
        rows = [[*tokens, *[self._pad] * (longest - len(tokens))] for tokens in inputs]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in inputs]
        tokens, real = (torch.tensor(x, device=self.device) for x in (rows, mask))
        with torch.inference_mode():
            states = self._module(input_ids=tokens, attention_mask=real).last_hidden_state
            return self.pooling.pooled(states, real).float().cpu()


def cut(vector: torch.Tensor, size: int | None) -> torch.Tensor:
    return vector if size is None else torch.nn.functional.normalize(vector[:size], dim=-1)


def embeds(model: str) -> bool:
    """True for an encoder: it reads text and cannot generate."""
    folder = Path(place_of(model))
    if not (folder / "config.json").exists() or steps_of_model(model) != ("call",):
        return False
    return hasattr(config_of(folder), "vocab_size")


class _Gone(Exception):
    """The client has gone."""


class TextToImage:
    makes, max_waiting = "pictures", MAX_REQUESTS

    def __init__(self, pipeline: Any, device: str = "cpu") -> None:
        self._pipeline, self.device = pipeline.to(device), device
        self._pipeline.set_progress_bar_config(disable=True)
        self._takes = inspect.signature(type(pipeline).__call__).parameters

    @classmethod
    def open(cls, model: str, device: str = "cpu") -> "TextToImage":
        folder = Path(place_of(model))
        check_parts(folder)
        library = extra_module("diffusers", "diffusers")
        library.utils.logging.disable_progress_bar()
        with blamed(folder, "its pipeline cannot be built"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # renamed options
            pipeline = library.AutoPipelineForText2Image.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                torch_dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            )
        return cls(pipeline, device)

    def length(self, draft: ImageDraft) -> int:
        return 0

    def fits(self, batch: Sequence[ImageDraft]) -> bool:
        return len(batch) == 1

    def run(self, batch: Sequence[ImageDraft], is_gone: Callable[[], bool]) -> Sequence[list[bytes]]:
        return [self.generate(draft, is_gone) for draft in batch]

    def generate(self, draft: ImageDraft, is_gone: Callable[[], bool]) -> list[bytes]:
        options: dict[str, Any] = {name: value for name, value in draft.options.items() if value is not None}
        for name in options:
            if name not in self._takes:
                raise AskError(
                    f"{type(self._pipeline).__name__} does not support this option", "Leave it out.", name
                )
        if "callback_on_step_end" in self._takes:
            options["callback_on_step_end"] = _watch(is_gone)
        pictures = []
        for number in range(draft.n):
            if is_gone():
                raise _Gone
            if draft.seed is not None:
                options["generator"] = torch.Generator().manual_seed(draft.seed + number)
            pictures.append(_written(self._draw(draft.prompt, options), draft.form))
        return pictures

    def _draw(self, prompt: str, options: dict[str, Any]) -> Any:
        try:
            return self._pipeline(prompt=prompt, **options).images[0]
        except ValueError as error:  # how pipelines refuse arguments
            raise AskError(f"the pipeline refuses this: {first_line(error)}", "", "prompt") from error


def _watch(is_gone: Callable[[], bool]) -> Any:
    def look(pipeline: Any, step: int, moment: Any, values: dict[str, Any]) -> dict[str, Any]:
        if is_gone():
            raise _Gone
        return values

    return look


def _written(picture: Any, form: str) -> bytes:
    target = io.BytesIO()
    picture.convert("RGB").save(target, form.upper())
    return target.getvalue()


def makes_images(model: str) -> bool:
    return (Path(place_of(model)) / PIPELINE).is_file()


def is_single_device(model: str) -> bool:
    return makes_images(model) or embeds(model)


def check_parts(folder: Path) -> None:
    listed = read_json(folder / PIPELINE)
    parts = [name for name, value in listed.items() if isinstance(value, list) and value and value[0]]
    missing = [name for name in parts if not (folder / name).is_dir()]
    if missing:
        remedy = "Download the whole pipeline; `tessera run` runs a denoiser alone."
        raise ArtifactError(f"it lacks its parts {', '.join(missing)}", remedy, str(folder))
