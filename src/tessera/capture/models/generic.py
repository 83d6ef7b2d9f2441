"""Steps of transformers models, and the one call (`forward`) of decoders.

    prefill  reads `context` tokens per row and leaves room for `context + reserve` positions
    decode   reads one token per row, at the row's own position if the model takes positions
    encode   encoder of an encoder-decoder, over `context` tokens (or the model's audio length)
    call     the plain forward, without a cache

State of prefill and decode is the model's cache (`rows`, else what the model returns). If a decode changes
its cache's shapes, the cache is inputs and outputs at one context instead.

Prefill rows may be shorter than the step: `last` is each row's last token if every layer keeps keys by
position; recurrent models align rows at the end with a `mask`; models with both read full rows.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from tessera.capture.blocks import path
from tessera.capture.holders import Finder
from tessera.capture.models import checkpoint, examples
from tessera.capture.models.examples import PIXELS
from tessera.capture.reads import traced
from tessera.capture.recorder import NoReads
from tessera.capture.rng import forked
from tessera.capture.workload import UNFIT, Tensors, Workload
from tessera.errors import CaptureError, first_line
from tessera.ir import Step

NUM_LEARNED = 4
# Cache parameters of models; the first two are transformers caches.
CACHES = ("past_key_values", "cache_params", "state", "mems")
ENCODED = "encoder_hidden_states"
# Prefix of cache tensors that are inputs or outputs.
BEFORE, AFTER = "before.", "after."
NEXT = "next_positions"


def newest(hidden: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    if last is None:
        return hidden[:, -1]
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]


def check_length(config: Any, step: Step) -> int:
    capacity = step.context + step.reserve
    most = getattr(config, "max_position_embeddings", None) or 0
    if 0 < most < capacity:  # XLNet has -1: no limit
        message = f"context {capacity} is beyond the {most} positions of {step.model}"
        raise CaptureError(message, f"Use at most {most}.")
    return capacity


def generic_workload(model: Any, step: Step) -> Workload:
    if step.kind not in ("call", "encode"):
        return CachedSteps(model, step).workload()
    is_call = step.kind == "call"
    part = model if is_call else model.get_encoder()
    names = examples.call_names(model) if is_call else [model.main_input_name]
    parameters = inspect.signature(getattr(part, "forward", part)).parameters
    options = {"use_cache": False} if "use_cache" in parameters else {}
    given = examples.GivenInputs(step, parameters)

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        with traced(), attributes_kept(model):
            result = part(**inputs, **options)
            return flatten(result) if is_call else {ENCODED: result[0]}

    def make(seed: int) -> dict[str, torch.Tensor]:
        return given.over({} if step.inputs else examples.example_inputs(model, step, seed, names), seed)

    return Workload(step, model, call, make, lambda seed: {}, lambda first, run, last: dict(first))


def takes(part: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(getattr(part, "forward", part)).parameters


def parameter_of(part: Callable[..., Any], *names: str) -> str:
    """The first of the names that `part` takes; "": none."""
    return next((name for name in names if takes(part, name)), "")


def flatten(result: Any) -> dict[str, torch.Tensor]:
    named = [(path(keys), leaf) for keys, leaf in pytree.tree_flatten_with_path(result)[0]]
    records = [(name, leaf) for name, leaf in named if is_dataclass(leaf)]
    named += [(held.name, held.tensor) for held in Finder(None, records).tensors]
    return {name or "output": leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}


def embeddings(model: Any, features: Any) -> torch.Tensor:
    """What `get_image_features` returns, as a row for each token."""
    parts = flatten(getattr(features, "pooler_output", features)).values()
    width = model.config.get_text_config(decoder=True).hidden_size
    return torch.cat([part.reshape(-1, width) for part in parts])


def rope_index_of(model: Any) -> Callable[..., Any] | None:
    """The method that gives tokens positions in time, height and width."""
    return getattr(model.base_model, "get_rope_index", None)


@contextmanager
def attributes_kept(
    model: torch.nn.Module, tensors: Tensors | None = None
) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """Restores attributes; yields a function for the tensors that a call left in them."""
    parts = dict(model.named_modules())
    before = {path: dict(vars(part)) for path, part in parts.items()}
    for name, tensor in (tensors or {}).items():
        path, _, key = name.rpartition(".")
        parts[path].__dict__[key] = tensor

    def left() -> dict[str, torch.Tensor]:
        return {
            f"{path}.{key}" if path else key: value
            for path, part in parts.items()
            for key, value in vars(part).items()
            if value is not before[path].get(key) and isinstance(value, torch.Tensor)
        }

    try:
        yield left
    finally:
        for name in left():
            path, _, key = name.rpartition(".")
            parts[path].__dict__[key] = before[path].get(key)


@contextmanager
def isolated(model: torch.nn.Module) -> Iterator[None]:
    with traced(), torch.no_grad(), forked(), attributes_kept(model):
        yield


def placed(model: Any, make: Callable[[], Tensors]) -> dict[str, torch.Tensor]:
    with torch.device("cpu"):
        tensors = make()
    return {name: tensor.to(model.device) for name, tensor in tensors.items()}


def forward(
    model: Any,
    cache: tuple[str, Any],
    inputs: Tensors,
    pick: Callable[[torch.Tensor], torch.Tensor] | None = None,
    is_pair: bool = False,
    **arguments: Any,
) -> Any:
    """`pick` selects the hidden states for the head."""
    prefix = "decoder_" if is_pair else ""
    positions = inputs.get("positions")
    if "rotary" in inputs or "image" in inputs:
        arguments["inputs_embeds"] = embedded(model, inputs)
    else:
        arguments[f"{prefix}input_ids"] = inputs["tokens"]
    name = parameter_of(model, f"{prefix}position_ids", "position_ids")
    if name and positions is not None:
        arguments[name] = inputs.get("rotary", positions)
    if positions is not None and takes(model, "cache_position"):
        arguments["cache_position"] = positions[0]
    if cache[0]:
        arguments[cache[0]] = cache[1]
    with head_reads(model, pick) as is_picked:
        result = model(**arguments, use_cache=True)
    logits = getattr(result, "logits", None)
    if pick is not None and not is_picked and isinstance(logits, torch.Tensor) and logits.dim() == 3:
        result.logits = pick(logits)
    return result


def embedded(model: Any, inputs: Tensors) -> torch.Tensor:
    words: torch.Tensor = model.get_input_embeddings()(inputs["tokens"])
    if "is_image" in inputs:
        return torch.where(inputs["is_image"][..., None], inputs["image"], words)
    if "image" in inputs:
        rows = torch.arange(words.shape[0], device=words.device)[:, None]
        words[rows, inputs["image_places"]] = inputs["image"]
    return words


@dataclass(frozen=True)
class ModelMemory:
    cache: Any
    attributes: dict[str, torch.Tensor]


def learn_memory(
    model: Any,
    call: Callable[[ModelMemory, Tensors], tuple[Any, ModelMemory]],
    empty: ModelMemory,
    first: Tensors,
    following: Tensors,
) -> tuple[Any, ModelMemory, ModelMemory]:
    with isolated(model), NoReads():
        _, left = call(empty, first)
        copied = exchanged(left, {name: tensor.clone() for name, tensor in tensors_of(left)})
        result, after = call(copied, following)
    return result, left, after


class CachedSteps:
    def __init__(self, model: Any, step: Step) -> None:
        self._model, self._step = model, step
        self._config = model.config.get_text_config(decoder=True)
        self._is_pair = bool(model.config.is_encoder_decoder)
        self._is_prefill = step.kind == "prefill"
        self._capacity = check_length(self._config, step)
        self._tokens = "decoder_input_ids" if self._is_pair else "input_ids"
        self._given = examples.GivenInputs(step, tokens=self._tokens)
        self._positions = parameter_of(model, "decoder_position_ids", "position_ids")
        self._mask = parameter_of(model, "decoder_attention_mask", "attention_mask")
        self._cache = parameter_of(model, *CACHES)
        self._encoded: Any = self._encode() if self._is_pair else None
        self._picture: int | None = None
        self._num_seen = self._count_seen() if self._is_prefill else 0
        self._learn()

    def workload(self) -> Workload:
        return Workload(self._step, self._model, self._call, self._inputs, self.state, self._follow)

    def _examples(self, seed: int, name: str) -> dict[str, torch.Tensor]:
        return examples.example_inputs(self._model, self._step, seed, [name])

    def _encode(self) -> Any:
        inputs = placed(self._model, lambda: self._examples(0, self._model.main_input_name))
        with isolated(self._model):
            return self._model.get_encoder()(**inputs)

    def _count_seen(self) -> int:
        if takes(self._model, PIXELS):
            self._picture = examples.setting(self._model.config, examples.PICTURE_WORDS)
        if self._picture is None:
            return 0
        pixels = placed(self._model, lambda: self._examples(0, PIXELS))
        what, remedy = "its pictures are more than pixels", "Capture --step decode or call, which read text"
        with checkpoint.blamed(self._step.model, what, remedy), isolated(self._model):
            features = self._model.get_image_features(**pixels)
        count = len(embeddings(self._model, features)) // self._step.batch
        if count + 2 > self._step.context:
            message = f"a picture is {count} tokens, which a context of {self._step.context} does not hold"
            raise CaptureError(message, f"Use --context {count + 2} or more.", self._step.model)
        return count

    def _learn(self) -> None:
        """Uses the first that works: a row cache, one beside a mask that hides nothing (else some models read
        the length on the host), the model's own.
        """
        from tessera.capture.models.rows import RowCache, RowPairCache

        tries = [(True, False), (True, True), (False, False)]
        if self._cache not in CACHES[:2]:
            tries = tries[2:]
        errors = []
        for has_rows, has_mask in tries:
            self._has_mask = has_mask
            try:
                kind = RowPairCache if self._is_pair else RowCache
                return self._learn_with(kind(self._model.config, self._capacity) if has_rows else None)
            except UNFIT as error:
                errors.append(error)
        cause = next((e for e in errors if RowCache.__name__ not in str(e)), errors[0])
        message = f"the cache of {self._config.model_type} cannot be followed: {first_line(cause)}"
        remedy = "Write a module:callable that returns a Workload."
        with suppress(*UNFIT):
            call_on_fakes(self._model)
            remedy = "Capture --step call, or write a module:callable that returns a Workload."
        raise CaptureError(message, remedy, self._step.model) from cause

    def _learn_with(self, cache: Any) -> None:
        rows = getattr(cache, "self_attention_cache", cache)
        self._has_rows = rows is not None and rows.has_rows
        self._only_recurs = rows is not None and not rows.has_positions and bool(self._mask)
        self._has_positions = bool(self._positions) or (rows is not None and rows.has_positions)
        num = min(NUM_LEARNED, self._step.context) if cache is not None else max(1, self._step.context - 1)
        first, following = self._first_tokens(num)
        empty = ModelMemory(cache, {})
        _, left, after = learn_memory(self._model, self._step_on, empty, first, following)
        self._is_carried = describe(left) == describe(after)
        self._has_rows = self._has_rows and not left.attributes
        self._held, self._template = tensors_of(left), left
        if self._is_prefill:
            if cache is not None:
                cache.reset()
            self._template = ModelMemory(cache, {})
        if not self._held:
            raise ValueError("it holds no tensors")

    def _first_tokens(self, num: int) -> list[dict[str, torch.Tensor]]:
        random = torch.Generator().manual_seed(0)
        with torch.device("cpu"):
            start = torch.zeros((self._step.batch, 1), dtype=torch.long)
            first = {**self._tokens_at(start, num, random), "last": start[:, 0] + num - 1}
            following = self._tokens_at(start + num, 1, random)
        return [{n: t.to(self._model.device) for n, t in inputs.items()} for inputs in (first, following)]

    def _step_on(self, memory: ModelMemory, inputs: Tensors) -> tuple[Any, ModelMemory]:
        cache = memory.cache
        with traced(), attributes_kept(self._model, memory.attributes) as left:
            result = self._forward(inputs, cache)
            attributes = left()
        if hasattr(cache, "begin"):
            cache.begin(None, None)
        elif self._cache:
            cache = getattr(result, self._cache)
        return result, ModelMemory(cache, attributes)

    def _forward(self, inputs: Tensors, cache: Any) -> Any:
        """Only each row's newest token passes the head."""
        from tessera.capture.models.rows import row_latents, row_masks

        last = inputs.get("last")
        if self._has_positions and hasattr(cache, "begin"):
            cache.begin(inputs["positions"], last)
        arguments: dict[str, Any] = {}
        if self._is_pair:
            arguments["encoder_outputs"] = type(self._encoded)(last_hidden_state=inputs[ENCODED])
        if PIXELS in inputs:
            arguments[PIXELS] = inputs[PIXELS]
        if "mask" in inputs:
            arguments[self._mask] = inputs["mask"]
        elif self._has_mask and self._mask:
            size = (self._step.batch, self._capacity)
            arguments[self._mask] = torch.ones(size, dtype=torch.long, device=inputs["tokens"].device)

        def pick(hidden: torch.Tensor) -> torch.Tensor:
            return newest(hidden, last)[:, None] if self._has_rows and last is not None else hidden[:, -1:]

        is_latent = last is None and self._has_rows and not self._is_pair
        with row_masks(), row_latents(self._model) if is_latent else nullcontext():
            return forward(self._model, (self._cache, cache), inputs, pick, self._is_pair, **arguments)

    def _call(self, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        tensors = state if self._is_carried else {n.removeprefix(BEFORE): t for n, t in inputs.items()}
        memory = exchanged(self._template, tensors)
        if self._is_prefill and "last" not in inputs and self._has_positions:
            inputs = {**inputs, "last": torch.full_like(inputs["tokens"][:, 0], self._step.context - 1)}
        result, memory = self._step_on(memory, inputs)
        after = dict(tensors_of(memory))
        results = _results(result, self._cache) | self._following(inputs, inputs.get("last"))
        if not self._is_carried:
            return results | {AFTER + name: tensor for name, tensor in after.items()}
        for name, tensor in after.items():
            if tensor is not state[name]:
                state[name].copy_(tensor)
        return results

    def _following(self, inputs: Tensors, last: torch.Tensor | None) -> dict[str, torch.Tensor]:
        has_next = self._is_pair and self._has_positions
        return {NEXT: newest(inputs["positions"][:, :, None], last) + 1} if has_next else {}

    def _tokens_at(self, start: torch.Tensor, width: int, random: torch.Generator) -> dict[str, torch.Tensor]:
        size = (self._step.batch, width)
        inputs = {"tokens": examples.tokens(self._model.config, size, random)}
        if self._has_positions:
            inputs["positions"] = start + torch.arange(width)
        if self._encoded is not None:
            noise = torch.randn(self._encoded[0].shape, generator=random)
            inputs[ENCODED] = noise.to(self._encoded[0].dtype)
        return inputs

    def _inputs(self, seed: int) -> dict[str, torch.Tensor]:
        return self._given.over(self._random_inputs(seed), seed)

    def _random_inputs(self, seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        batch, context = self._step.batch, self._step.context
        lengths = torch.randint((context + 1) // 2, context + 1, (batch, 1), generator=random)
        if not self._is_prefill:
            return self._decode_inputs(lengths, random)
        inputs = self._tokens_at(torch.zeros_like(lengths), context, random)
        if self._picture is not None:
            inputs["tokens"][:, 1 : 1 + self._num_seen] = self._picture
            inputs |= self._examples(seed, PIXELS)
            lengths = lengths.clamp_min(self._num_seen + 2)
        if self._has_rows:
            return {**inputs, "last": lengths[:, 0] - 1}
        if self._only_recurs:
            inputs["mask"] = (torch.arange(context) >= context - lengths).to(self._model.dtype)
        return inputs

    def _decode_inputs(self, lengths: torch.Tensor, random: torch.Generator) -> dict[str, torch.Tensor]:
        if not self._is_carried:
            lengths = torch.full_like(lengths, self._step.context)
        elif not self._positions:  # rows share one position
            lengths = lengths[:1].expand(self._step.batch, 1)
        inputs = self._tokens_at(lengths - 1, 1, random)
        if not self._is_carried:
            inputs |= {BEFORE + name: tensor for name, tensor in self._remembered(random).items()}
        return inputs

    def state(self, seed: int) -> dict[str, torch.Tensor]:
        return self._remembered(torch.Generator().manual_seed(seed)) if self._is_carried else {}

    def _remembered(self, random: torch.Generator) -> dict[str, torch.Tensor]:
        state = {}
        for name, held in self._held:
            value = torch.zeros(held.shape, dtype=held.dtype)
            if not self._is_prefill:
                if held.device.type == "cpu" and not isinstance(held, FakeTensor):
                    value.copy_(held)
                if value.is_floating_point():
                    value += torch.randn(value.shape, generator=random).to(value.dtype)
            state[name] = value
        return state

    def _follow(self, first: Tensors, run: int, last: Tensors) -> dict[str, torch.Tensor]:
        """Each row reads its chosen token next; a prefill takes encoder results."""
        if ENCODED in last:
            return {**self._inputs(0), ENCODED: last[ENCODED].clone()}
        if "next_tokens" not in last or (not self._is_carried and not self._is_prefill):
            inputs = self._inputs(0)
            given = first if first.keys() == inputs.keys() else inputs
            return {name: tensor.clone() for name, tensor in given.items()}
        inputs = {"tokens": last["next_tokens"][:, None].clone()}
        if NEXT in last:
            inputs["positions"] = last[NEXT].clone()
        elif self._has_positions:
            positions = first["positions"]
            begins_after = positions[:, -1] + 1 if positions.shape[1] > 1 else positions[:, 0]
            start = first["last"] + 1 if "last" in first else begins_after
            inputs["positions"] = (start + run)[:, None].clone()
        if self._encoded is not None:  # a decode has it in the cache
            inputs[ENCODED] = (first if ENCODED in first else self._inputs(0))[ENCODED].clone()
        return inputs


def _results(result: Any, cache: str) -> dict[str, torch.Tensor]:
    logits = getattr(result, "logits", None)
    if isinstance(logits, torch.Tensor) and logits.dim() == 3:
        newest_logits = logits[:, -1]
        return {"logits": newest_logits, "next_tokens": newest_logits.argmax(-1)}
    return {n: t for n, t in flatten(result).items() if not n.startswith((cache, "encoder_"))}


@contextmanager
def head_reads(model: Any, pick: Callable[[torch.Tensor], torch.Tensor] | None) -> Iterator[bool]:
    head = model.get_output_embeddings()
    if pick is None or not isinstance(head, torch.nn.Module):
        yield False
        return
    with head.register_forward_pre_hook(lambda _, args: (pick(args[0]), *args[1:])):
        yield True


def call_on_fakes(model: Any) -> None:
    """A few tokens, without values."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mode = detect_fake_mode(list(held.values())) or FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes: dict[str, torch.Tensor] = {
            n: t if isinstance(t, FakeTensor) else mode.from_tensor(t) for n, t in held.items()
        }
        with isolated(model), model.device, NoReads():
            words = torch.zeros((2, 3), dtype=torch.long)
            torch.func.functional_call(model, fakes, (), {"input_ids": words, "use_cache": False})


def _leaves(value: Any, path: tuple[str, ...] = (), above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    items: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type):
        items = list(vars(value).items())
    else:
        yield _short(path), value
        return
    if id(value) not in above:
        for key, item in items:
            yield from _leaves(item, (*path, str(key)), (*above, id(value)))


def _short(path: tuple[str, ...]) -> str:
    """ "keys.3" for layer 3's keys, "cross." before an encoder's; attribute names otherwise."""
    unnamed = ("cache", "attributes", "self_attention_cache")
    words = ["cross" if w == "cross_attention_cache" else w for w in path if w not in unnamed]
    if "layers" in words:
        place = words.index("layers")
        words = [*words[:place], *words[place + 2 :], words[place + 1]]
    return ".".join(words)


def tensors_of(cache: Any) -> list[tuple[str, torch.Tensor]]:
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, leaf in _leaves(cache):
        if isinstance(leaf, torch.Tensor):
            tensors.setdefault(id(leaf), (name, leaf))
    return list(tensors.values())


def exchanged(cache: Any, tensors: Tensors) -> Any:
    return copy.deepcopy(cache, {id(held): tensors[name] for name, held in tensors_of(cache)})


def describe(cache: Any) -> dict[str, Any]:
    return {
        name: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in _leaves(cache)
        if isinstance(leaf, torch.Tensor | bool | int | float | str | None)
    }
