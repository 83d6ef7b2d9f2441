"""Embeddings: texts as vectors, by an encoder from its folder.

    with EmbeddingService(Encoder.open(folder), name) as service:
        vectors = await service.embed(inputs)

Tokens go through the encoder, and their last hidden states become one vector as the folder says in the files
of sentence-transformers (modules.json): the mean, the largest of each number, or the state of the first or
the last token, of length 1 if it says so. Without these files it is the mean, as that library does.

Inputs of all clients that wait are computed together, those of one request from the shortest to the longest.
The encoder is computed on one device, the first of those named, by a thread of this process: an
encoder has no state to place, and small ones fit anywhere. Plans, workers and emulated times are for models
that generate. Not handled: modules behind the pooling other than Normalize, and models that generate as
encoders.
"""

import asyncio
import json
import re
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tessera.capture import build, place_of
from tessera.capture.models import steps_of_model
from tessera.capture.models.checkpoint import blamed_for_run, read_json
from tessera.capture.models.hf import config_of
from tessera.errors import ArtifactError, ServiceBusy, ServiceClosing
from tessera.ir import Step
from tessera.serve.alone import AloneService

# Of one computation: inputs, and tokens with those that fill shorter inputs up.
MAX_ROWS, MAX_PADDED = 64, 8192
# Inputs that may wait.
MAX_WAITING = 2**16
# Larger figures mean that a tokenizer knows no limit.
NO_LIMIT = 2**20
POOLINGS = ("mean", "cls", "max", "lasttoken")
# Folders of modules, as sentence-transformers names them.
MODULE = re.compile(r"\d+_\w+")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the states of an input's tokens become one vector."""

    mode: str = "mean"
    is_normal: bool = False
    # Tokens of an input, at most; None: as many as the model has positions.
    max_tokens: int | None = None
    # Stands before every text.
    prompt: str = ""
    # Lengths that a vector may be cut to; empty: none. 0: any.
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> "Pooling":
        """As a folder says; ArtifactError for what is not handled."""
        mode, is_normal = "mean", False
        for kind, path in _modules(folder)[1:]:
            if kind == "Pooling":
                mode = _mode(path)
            elif kind == "Normalize":
                is_normal = True
            else:
                raise ArtifactError(f"its module {kind} is not supported", "Use another model.", str(folder))
        settings = _read(folder / "config.json")
        sizes = settings.get("matryoshka_dimensions") or ([0] if settings.get("is_matryoshka") else [])
        most = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        told = _read(folder / "config_sentence_transformers.json")
        prompt = (told.get("prompts") or {}).get(told.get("default_prompt_name") or "", "")
        return cls(mode, is_normal, most, str(prompt), tuple(int(size) for size in sizes))

    def pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Vectors [inputs, size] of states [inputs, tokens, size]; the mask is 1 for tokens of an input."""
        there = mask[:, :, None].to(states.dtype)
        if self.mode == "cls":
            found = states[:, 0]
        elif self.mode == "lasttoken":
            found = states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
        elif self.mode == "max":
            found = states.masked_fill(there == 0, -torch.inf).amax(1)
        else:
            found = (states * there).sum(1) / there.sum(1)
        return torch.nn.functional.normalize(found, dim=-1) if self.is_normal else found


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(kind, folder) of each module of a folder; a plain encoder has none but itself."""
    path = folder / "modules.json"
    if not path.exists():
        return [("Transformer", folder)]
    found = []
    try:
        for module in json.loads(path.read_text()):
            place = str(module["path"])
            if place and not MODULE.fullmatch(place):
                raise ValueError(f"no folder is called {place!r}")
            found.append((str(module["type"]).rpartition(".")[2], folder / place))
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"cannot be read: {error}", "Download the model again.", str(path)) from error
    if not found or found[0][0] != "Transformer":
        raise ArtifactError("its first module is no Transformer", "Use another model.", str(path))
    return found


def _mode(folder: Path) -> str:
    settings = _read(folder / "config.json")
    named = settings.get("pooling_mode")
    flags = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    words = [
        name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens") for name in flags
    ]
    modes = [named] if named else words
    if len(modes) != 1 or modes[0] not in POOLINGS:
        remedy = f"One of {', '.join(POOLINGS)} is."
        raise ArtifactError(
            f"pooling by {' and '.join(map(str, modes))} is not supported", remedy, str(folder)
        )
    return str(modes[0])


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


class Encoder:
    def __init__(self, module: Any, pooling: Pooling, device: str = "cpu") -> None:
        self._module, self.pooling, self.device = module.to(device), pooling, device
        config = module.config
        self.vocab_size, self.size = int(config.vocab_size), int(config.hidden_size)
        self._pad = int(getattr(config, "pad_token_id", None) or 0)
        self.max_tokens = min(pooling.max_tokens or NO_LIMIT, self._positions(config))

    @classmethod
    def open(cls, model: str, device: str = "cpu", random_weights: bool = False) -> "Encoder":
        """The encoder of a folder; what a class puts on top of it is left out."""
        folder = place_of(model)
        module = build(Step(folder, "call", 1, 8, random_weights=random_weights)).module.base_model
        made = cls(module, Pooling.of(Path(folder)), device)
        with blamed_for_run(folder):  # at its full length, so that no input fails later
            made.encode([(0,) * made.max_tokens])
        return made

    def _positions(self, config: Any) -> int:
        """Tokens that it has positions for; some count them from behind the number that stands for none."""
        most = int(getattr(config, "max_position_embeddings", NO_LIMIT))
        layer = getattr(getattr(self._module, "embeddings", None), "position_embeddings", None)
        skipped = getattr(layer, "padding_idx", None)
        return most if skipped is None else most - skipped - 1

    def encode(self, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
        longest = max(map(len, inputs))
        rows = [[*tokens, *[self._pad] * (longest - len(tokens))] for tokens in inputs]
        mask = [[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in inputs]
        tokens, there = (torch.tensor(x, device=self.device) for x in (rows, mask))
        with torch.inference_mode():
            states = self._module(input_ids=tokens, attention_mask=there).last_hidden_state
            return self.pooling.pooled(states, there).float().cpu()


def cut(vector: torch.Tensor, size: int | None) -> torch.Tensor:
    """The first numbers of a vector, which is of length 1 again; all of them if no size is given."""
    return vector if size is None else torch.nn.functional.normalize(vector[:size], dim=-1)


def embeds(model: str) -> bool:
    """True if a model is a folder that makes embeddings: it reads text and cannot generate."""
    folder = Path(place_of(model))
    if not (folder / "config.json").exists() or steps_of_model(model) != ("call",):
        return False
    return hasattr(config_of(folder), "vocab_size")


@dataclass(slots=True, eq=False)
class _Input:
    tokens: Sequence[int]
    future: "Future[torch.Tensor]" = field(default_factory=Future)


class EmbeddingService(AloneService):
    """Answers requests for embeddings; `embed` from any event loop."""

    def __init__(self, encoder: Encoder, model: str) -> None:
        super().__init__(model, encoder.device, "embeddings and says nothing. Use /v1/embeddings")
        self.encoder = encoder
        self._waiting: deque[_Input] = deque()
        self._lock, self._is_closed = threading.Lock(), False
        self._thread = ThreadPoolExecutor(1, "tessera-embeddings")

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def stop(self, grace_s: float = 0.0) -> None:
        with self._lock:
            self._is_closed = True
            for x in self._waiting:
                x.future.cancel()
        self._thread.shutdown()

    async def embed(self, inputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """A vector for each input. Cancelled, those that are not being computed yet are left out."""
        waiting = [_Input(tokens) for tokens in inputs]
        with self._lock:
            if self._is_closed:
                raise ServiceClosing("the service is stopping", "Ask another one.")
            if len(self._waiting) + len(waiting) > MAX_WAITING:
                raise ServiceBusy(f"{len(self._waiting)} inputs wait", "Try again later.")
            self._waiting.extend(sorted(waiting, key=lambda x: len(x.tokens)))
            self._thread.submit(self._compute)
        try:
            return [await asyncio.wrap_future(x.future) for x in waiting]
        finally:
            for x in waiting:
                x.future.cancel()

    def _compute(self) -> None:
        """All that wait."""
        while batch := self._next():
            try:
                with self._computing(len(batch)):
                    vectors = self.encoder.encode([x.tokens for x in batch])
            except Exception as error:  # noqa: BLE001 - a bug, or memory: these inputs are told, others go on
                for x in batch:
                    x.future.set_exception(error)
                continue
            for x, vector in zip(batch, vectors, strict=True):
                x.future.set_result(vector)
                self._tokens += len(x.tokens)
            self._finished["stop"] += len(batch)

    def _next(self) -> list[_Input]:
        """Those at the front that are computed together; who has gone is left out."""
        batch: list[_Input] = []
        longest = 0
        with self._lock:
            while self._waiting and len(batch) < MAX_ROWS:
                longest = max(longest, len(self._waiting[0].tokens))
                if batch and (len(batch) + 1) * longest > MAX_PADDED:
                    break
                one = self._waiting.popleft()
                if one.future.set_running_or_notify_cancel():
                    batch.append(one)
                else:
                    self._finished["cancelled"] += 1
        return batch
