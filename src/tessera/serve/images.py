"""Pictures from words: /v1/images/generations by a pipeline of diffusers, from a folder with all its parts.

    with ImageService(TextToImage.open(folder), name) as service:
        pictures = await service.generate(draft)

The pipeline is diffusers' own for pictures from text, whatever its encoders, denoiser and decoder are; it is
built from safetensors and from classes of the libraries, never from code that a folder brings. It is computed
undivided on one device, the first of those named, by a thread of this process, one picture after the other:
a client that goes stops its picture at the next step. `tessera run` places a denoiser on several devices.

Not handled: pictures that are changed or filled in, and pipelines for video or sound.
"""

import asyncio
import inspect
import io
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tessera.capture import place_of
from tessera.capture.models.checkpoint import blamed, first_line, read_json
from tessera.capture.models.diffusers import PIPELINE
from tessera.errors import ArtifactError, AskError, MissingExtra, ServiceBusy, ServiceClosing
from tessera.serve.openai_read import ImageDraft
from tessera.serve.records import Ask, DeviceView, Events, Snapshot

# Requests that may wait.
MAX_WAITING = 64
SAYS_NOTHING = "this model makes pictures. Use /v1/images/generations."


class _Gone(Exception):
    """Nobody waits for the picture any more."""


class TextToImage:
    """A pipeline on one device."""

    def __init__(self, pipeline: Any, device: str = "cpu") -> None:
        self._pipeline, self.device = pipeline.to(device), device
        self._pipeline.set_progress_bar_config(disable=True)
        self._takes = inspect.signature(type(pipeline).__call__).parameters

    @classmethod
    def open(cls, model: str, device: str = "cpu") -> "TextToImage":
        """The pipeline of a folder."""
        folder = Path(place_of(model))
        check_parts(folder)
        library = _diffusers()
        library.utils.logging.disable_progress_bar()
        with blamed(folder, "its pipeline cannot be built"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that options will be called otherwise
            pipeline = library.AutoPipelineForText2Image.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                torch_dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            )
        return cls(pipeline, device)

    def generate(self, draft: ImageDraft, gone: threading.Event) -> list[bytes]:
        """The pictures of a request, one after the other; AskError for what the pipeline does not take."""
        options: dict[str, Any] = {name: value for name, value in draft.options.items() if value is not None}
        for name in options:
            if name not in self._takes:
                raise AskError(f"{type(self._pipeline).__name__} takes none", "Leave it out.", name)
        if "callback_on_step_end" in self._takes:
            options["callback_on_step_end"] = _watch(gone)
        pictures = []
        for number in range(draft.n):
            if gone.is_set():
                raise _Gone
            if draft.seed is not None:
                options["generator"] = torch.Generator().manual_seed(draft.seed + number)
            pictures.append(_written(self._draw(draft.prompt, options), draft.form))
        return pictures

    def _draw(self, prompt: str, options: dict[str, Any]) -> Any:
        try:
            return self._pipeline(prompt=prompt, **options).images[0]
        except ValueError as error:  # how pipelines refuse what they are asked for
            raise AskError(f"the pipeline refuses this: {first_line(error)}", "", "prompt") from error


def _watch(gone: threading.Event) -> Any:
    def look(pipeline: Any, step: int, moment: Any, values: dict[str, Any]) -> dict[str, Any]:
        if gone.is_set():
            raise _Gone
        return values

    return look


def _written(picture: Any, form: str) -> bytes:
    target = io.BytesIO()
    picture.convert("RGB").save(target, form.upper())
    return target.getvalue()


def makes_images(model: str) -> bool:
    """True if a model is a pipeline's folder."""
    return (Path(place_of(model)) / PIPELINE).is_file()


def check_parts(folder: Path) -> None:
    """Raises unless all parts are there that the pipeline's folder lists."""
    listed = read_json(folder / PIPELINE)
    parts = [name for name, value in listed.items() if isinstance(value, list) and value and value[0]]
    missing = [name for name in parts if not (folder / name).is_dir()]
    if missing:
        remedy = "Download the whole pipeline; `tessera run` runs a denoiser alone."
        raise ArtifactError(f"it lacks its parts {', '.join(missing)}", remedy, str(folder))


def _diffusers() -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise MissingExtra("diffusers", "diffusers") from error
    return diffusers


class ImageService:
    """Answers requests for pictures, one at a time. Use it in a `with` statement, on one event loop."""

    failure = ""

    def __init__(self, pipeline: TextToImage, model: str) -> None:
        self.pipeline, self._model = pipeline, model
        self._thread = ThreadPoolExecutor(1, "tessera-images")
        self._waiting = self._running = 0
        self._is_closed = False
        self._busy_s, self._begun_s = 0.0, time.monotonic()
        self._finished = dict.fromkeys(("stop", "cancelled"), 0)

    def __enter__(self) -> "ImageService":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, grace_s: float = 0.0) -> None:
        """Refuses what comes and what waits; a picture that is being made is waited for."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    async def generate(self, draft: ImageDraft) -> list[bytes]:
        """The pictures of one request, encoded. Cancelled, it is left out or stopped at its next step."""
        if self._is_closed:
            raise ServiceClosing("the service is stopping", "Ask another one.")
        if self._waiting >= MAX_WAITING:
            raise ServiceBusy(f"{self._waiting} requests wait", "Try again later.")
        gone = threading.Event()
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._generate, draft, gone)
        finally:
            gone.set()
            self._waiting -= 1

    def _generate(self, draft: ImageDraft, gone: threading.Event) -> list[bytes]:
        begun_s, self._running = time.monotonic(), 1
        reason = "cancelled"
        try:
            pictures = self.pipeline.generate(draft, gone)
            reason = "stop"
            return pictures
        except _Gone:
            return []
        finally:
            self._running, self._busy_s = 0, self._busy_s + time.monotonic() - begun_s
            self._finished[reason] += 1

    # As of a service that answers.

    def answer(self, ask: Ask) -> Events:
        """Refuses."""
        raise AskError(SAYS_NOTHING, place="model")

    def snapshot(self) -> Snapshot:
        """What it is doing now."""
        share = self._busy_s / max(1e-9, time.monotonic() - self._begun_s)
        return Snapshot(
            model=self._model,
            policy="undivided",
            policies=("undivided",),
            devices=(DeviceView(self.pipeline.device, share, 0),),
            links=(),
            running=self._running,
            waiting=max(0, self._waiting - self._running),
            finished=dict(self._finished),
        )
