"""Pictures from words: /v1/images/generations by a pipeline of diffusers, from a folder with all its parts.

    with ImageService(TextToImage.open(folder), name) as service:
        pictures = await service.generate(draft)

The pipeline is diffusers' own for pictures from text, whatever its encoders, denoiser and decoder are; it is
built from safetensors and from classes of the libraries, never from code that a folder brings. It is computed
on one device, the first of those named, by a thread of this process, one picture after the other:
a client that goes stops its picture at the next step. `tessera run` places a denoiser on several devices.

Not handled: pictures that are changed or filled in, and pipelines for video or sound.
"""

import asyncio
import inspect
import io
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tessera.capture import place_of
from tessera.capture.models.checkpoint import blamed, first_line, read_json
from tessera.capture.models.denoisers import PIPELINE
from tessera.errors import ArtifactError, AskError, ServiceBusy, ServiceClosing, extra_module
from tessera.serve.alone import AloneService
from tessera.serve.records import ImageDraft

# Requests that may wait.
MAX_WAITING = 64


class _Gone(Exception):
    """Nobody waits for the picture any more."""


class TextToImage:
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
    return (Path(place_of(model)) / PIPELINE).is_file()


def check_parts(folder: Path) -> None:
    """Raises unless all parts are there that the pipeline's folder lists."""
    listed = read_json(folder / PIPELINE)
    parts = [name for name, value in listed.items() if isinstance(value, list) and value and value[0]]
    missing = [name for name in parts if not (folder / name).is_dir()]
    if missing:
        remedy = "Download the whole pipeline; `tessera run` runs a denoiser alone."
        raise ArtifactError(f"it lacks its parts {', '.join(missing)}", remedy, str(folder))


class ImageService(AloneService):
    """Answers requests for pictures, one at a time, on one event loop."""

    def __init__(self, pipeline: TextToImage, model: str) -> None:
        super().__init__(model, pipeline.device, "pictures. Use /v1/images/generations")
        self.pipeline = pipeline
        self._thread = ThreadPoolExecutor(1, "tessera-images")
        self._inside, self._is_closed = 0, False

    @property
    def num_waiting(self) -> int:
        return max(0, self._inside - self._running)

    def stop(self, grace_s: float = 0.0) -> None:
        """A picture that is being made is waited for."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    async def generate(self, draft: ImageDraft) -> list[bytes]:
        """The pictures of one request, encoded. Cancelled, it is left out or stopped at its next step."""
        if self._is_closed:
            raise ServiceClosing("the service is stopping", "Ask another one.")
        if self._inside >= MAX_WAITING:
            raise ServiceBusy(f"{self._inside} requests wait", "Try again later.")
        gone = threading.Event()
        self._inside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._generate, draft, gone)
        finally:
            gone.set()
            self._inside -= 1

    def _generate(self, draft: ImageDraft, gone: threading.Event) -> list[bytes]:
        reason = "cancelled"
        try:
            with self._computing(1):
                pictures = self.pipeline.generate(draft, gone)
            reason = "stop"
            return pictures
        except _Gone:
            return []
        finally:
            self._finished[reason] += 1
