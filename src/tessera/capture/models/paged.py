"""Step of a served language model: tokens of several sequences, keys and values in pages.

At most `batch` sequences, `context` tokens, `reserve` positions in all pages (see `kernels.paged`); padding
writes to page 0. Layers of each window have their own page table (`slots`, `page_starts`; `of_group`), all in
the same pages. The first layout that works is used:

    flat   all tokens in one row; recurrent state has a row per sequence: `rows` tells which, and which begin
    split  each token in a row, for models with their own attention: keys and values are gathered from pages
           and masked
    rows   one token per sequence, a fixed row each, for other recurrent layers: state is zeroed where `fresh`
           is set
    dense  as rows, with keys and values as in split

Outputs are logits of each sequence's newest token and the next one, by tessera::choose; unused sequences get
any finite numbers. A negative token is the previous step's choice (-1: first sequence), in the state
`newest`, so steps need not wait for the host. Steps with pictures take `image` and `is_image`, of some models
`rotary`, those with LoRA adapters each token's (`adapters`).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode

from tessera.capture.models import generic
from tessera.capture.models.checkpoint import AGAIN
from tessera.capture.models.examples import tokens as make_tokens
from tessera.capture.models.generic import ModelMemory
from tessera.capture.models.lora import num_adapters, using_adapters
from tessera.capture.models.pages import (
    NUM_FIRST_PAGES,
    PagedCache,
    PageMask,
    PageTables,
    chunk_of,
    clear_rows,
    exchanged_attention,
    is_indexer,
)
from tessera.capture.models.recurrent import PackedCache, exchanged_recurrence
from tessera.capture.models.selected import selecting
from tessera.capture.reads import traced
from tessera.capture.recorder import HostRead
from tessera.capture.workload import UNFIT, Tensors, Workload
from tessera.errors import CaptureError
from tessera.ir import Step
from tessera.kernels import BY_ROW, NEWEST, PAGE, of_group
from tessera.kernels.choice import EDIT_FIELDS, INPUTS, Number, Setting, max_edits, num_words
from tessera.kernels.choose import choose

FLAT, SPLIT, ROWS, DENSE = "flat", "split", "rows", "dense"
# Several tokens of a sequence in a step; keys and values by row.
PACKED, GATHERED = (FLAT, SPLIT), (SPLIT, DENSE)
# Per row; each has a copy of its sequence's keys.
SPLIT_TOKENS = 2
NUM_TRIED, TRIED_POSITIONS = 3, NUM_FIRST_PAGES * PAGE
SHARE_OF_ANSWERS, SHARE_OF_PICTURES = 0.5, 0.25
# One answer in three has its token from the host.
ANSWERS_PER_HOST_TOKEN = 3
# Relative to the largest logit. Rounding of 64 layers with 32-bit numbers is 5e-6; a wrong decay of two
# layers is above 1e-3.
MAX_ERROR = 3e-4
HALF_TYPES = (torch.bfloat16, torch.float16)
NUM_USED_PAGES = 64
OWN_ATTENTION = "its attention is none of transformers' registered functions"
READS = (HostRead, DataDependentOutputException, DynamicOutputShapeException)
OWN_CACHE = "it takes no cache but its own"
ANOTHER = "Serve another model, or run this one's prefill and decode by tessera run."
LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


@dataclass(frozen=True)
class StepLayout:
    kind: str
    # Memory after a first call; later calls replace its tensors.
    memory: ModelMemory
    pages: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    # Positions, for each group of paged layers; 0: none.
    windows: tuple[int, ...] = ()
    # Why tokens cannot be packed.
    reason: str = ""
    # See `selected`.
    selects: bool = False

    @property
    def is_packed(self) -> bool:
        return self.kind in PACKED


_LAYOUTS: "WeakKeyDictionary[torch.nn.Module, StepLayout]" = WeakKeyDictionary()


def layout_of(model: Any) -> StepLayout:
    if model not in _LAYOUTS:
        _LAYOUTS[model] = _find_layout(model)
    return _LAYOUTS[model]


def check_served(model: Any) -> None:
    """Refuses models that cannot be served with any weights."""
    name, config = model.config.model_type, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or not model.can_generate() or not _cache_name(model):
        message = f"{name} is not served by steps: it is no decoder with a cache"
        raise CaptureError(message, "Serve a causal language model.")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        remedy = "Serve a causal language model, or this one's --step call by tessera run."
        raise CaptureError(f"{name} cannot be served by steps: its prompts attend in both directions", remedy)
    try:
        PagedCache(model.config)
    except ValueError as error:
        raise CaptureError(f"{name} cannot be served by steps: {error}", ANOTHER) from error


def _find_layout(model: Any) -> StepLayout:
    check_served(model)
    _fix_frequencies(model)
    selects = _selects(model)
    errors = []
    for kind in (FLAT, SPLIT, ROWS, DENSE):
        try:
            layout = _try(model, kind, selects)
        except UNFIT as error:
            errors.append(error)
            continue
        return replace(layout, reason="" if layout.is_packed else _first_line(errors[0]))
    lines = {_first_line(error): type(error).__name__ for error in errors}
    named = [line for line, kind in lines.items() if not line.startswith(f"{kind}: ")]
    said = "; ".join(named or lines)
    name = model.config.model_type
    raise CaptureError(f"{name} cannot be served: no way to call it works: {said}", ANOTHER) from errors[-1]


def _fix_frequencies(model: Any) -> None:
    """Frequencies that follow the longest sequence stay those up to `max_positions`."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {name: _fixed(kind) for name, kind in kinds.items()}
        elif kinds is not None:
            module.rope_type = _fixed(kinds)


def _fixed(kind: str) -> str:
    return "default" if kind == "longrope" or "dynamic" in kind else kind


def _first_line(error: Exception) -> str:
    said = str(error).partition("\n")[0]
    if PageMask.__name__ in said:
        return OWN_ATTENTION
    if PackedCache.__name__ in said or PagedCache.__name__ in said:
        return OWN_CACHE
    is_plain = isinstance(error, (ValueError, CaptureError)) and said
    return said if is_plain else f"{type(error).__name__}: {said}"


def _cache_name(model: Any) -> str:
    return generic.parameter_of(model, *generic.CACHES[:2])


def _try(model: Any, kind: str, selects: bool) -> StepLayout:
    cache = (PackedCache if kind == FLAT else PagedCache)(model.config)
    if kind not in PACKED and (model_cache := _own_cache(model)) is not None:
        cache.adopt(model_cache)
    needs_positions = kind not in GATHERED and bool(cache.paged) and not generic.takes(model, "position_ids")
    cache.counts_tokens = needs_positions and kind == FLAT
    num = 2 * NUM_TRIED if kind in PACKED else NUM_TRIED
    step = Step("", "tokens", NUM_TRIED, num, reserve=TRIED_POSITIONS)
    make = partial(_make_inputs, model, step, kind, seed=0, has_rows=True)
    parts = ([(length, 1)] * NUM_TRIED for length in (1, 2))
    first, following = (generic.placed(model, partial(make, part)) for part in parts)
    call = partial(_run, model, kind, selects, step)
    logits, left, after = generic.learn_memory(model, call, ModelMemory(cache, {}), first, following)
    if needs_positions and not after.cache.is_counted:
        raise ValueError("it takes no positions")
    if generic.describe(left) != generic.describe(after):
        raise ValueError("its cache changes shape with every token")
    if logits.dim() != 2 or len(logits) != NUM_TRIED:
        raise ValueError("it returns no logits per sequence")
    layout = replace(_describe_layout(kind, left), selects=selects)
    # GPU kernels are untried with 32 bits of every shape.
    is_sure = model.device.type == "cuda" and (kind == ROWS or (kind == FLAT and not layout.rows))
    is_sure = is_sure and not needs_positions and not selects
    if not is_sure and model.device.type != "meta" and not isinstance(logits, FakeTensor):
        _check_logits(model, layout)
    return layout


def _selects(model: Any) -> bool:
    """True if a call reads which experts its tokens choose.

    Transformers' paths for experts of most models do not.
    """
    if model._can_set_experts_implementation() or "expert" not in model.config.to_json_string():
        return False
    try:
        generic.call_on_fakes(model)
    except UNFIT as error:
        return isinstance(error, READS)
    return False


def _own_cache(model: Any) -> Any:
    """After a token of each sequence; None for transformers' classes."""
    tokens = torch.ones((NUM_TRIED, 1), dtype=torch.long, device=model.device)
    with generic.isolated(model):
        cache = getattr(model(input_ids=tokens, use_cache=True), _cache_name(model), None)
    return cache if hasattr(cache, "__dict__") and "cache_utils" not in type(cache).__module__ else None


def _check_logits(model: Any, layout: StepLayout) -> None:
    """Raises unless a few tokens, in parts, get the plain forward's logits.

    A model's attention may treat masks and lengths in any way, its recurrence may have another form. Both run
    with 32-bit numbers: many layers amplify the rounding of 16-bit ones to any error.
    """
    parts = ((0, 2), (2, 3)) if layout.is_packed else ((0, 1), (1, 2), (2, 3))
    num, pages = NUM_TRIED * parts[0][1], 1 + NUM_TRIED * max(1, len(layout.windows))
    step = Step("", "tokens", NUM_TRIED, num, reserve=pages * PAGE, windows=layout.windows)
    workload = PagedSteps(model, step, layout).workload()
    state = generic.placed(model, lambda: workload.make_state(0))
    state = {name: torch.zeros_like(t, dtype=_widened(t.dtype)) for name, t in state.items()}
    random = torch.Generator().manual_seed(0)
    prompts = generic.placed(model, lambda: {"tokens": make_tokens(model.config, (NUM_TRIED, 3), random)})
    plain_choices = generic.placed(model, partial(greedy_choices, model, step))
    make = partial(_make_inputs, model, step, layout.kind, seed=0, has_rows=bool(layout.rows))
    without_tf32 = torch.backends.cudnn.flags(enabled=False)
    with generic.isolated(model), _Widened(), without_tf32:
        for first, last in parts:
            inputs = generic.placed(model, partial(make, [(last, last - first)] * NUM_TRIED))
            read = prompts["tokens"][:, first:last].flatten()
            inputs["tokens"][: len(read)] = read
            if "adapters" in inputs:  # the plain forward has none
                inputs["adapters"].zero_()
            logits = workload.run({**inputs, **plain_choices}, state)["logits"]
        plain = model(input_ids=prompts["tokens"], use_cache=False).logits[:, -1]
    if not plain.isfinite().all():
        raise CaptureError("its weights give no finite logits", f"{AGAIN[:-1]}, or correct config.json.")
    error = float((logits - plain).abs().max() / plain.abs().max())
    if not error <= MAX_ERROR:
        raise ValueError(f"its logits differ from those of its plain forward by {error:.2g} of the largest")


class _Widened(TorchFunctionMode):
    """A weight is widened where it is used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_widened(args), **_widened(kwargs or {}))


def _widened(argument: Any) -> Any:
    kind = type(argument)
    if kind in (tuple, list):
        return kind(map(_widened, argument))
    if kind is dict:
        return {name: _widened(value) for name, value in argument.items()}
    if kind in (torch.Tensor, torch.nn.Parameter):  # packed weights widen in their products
        return argument.float() if argument.dtype in HALF_TYPES else argument
    return torch.float32 if isinstance(argument, torch.dtype) and argument in HALF_TYPES else argument


def _describe_layout(kind: str, memory: ModelMemory) -> StepLayout:
    windows = memory.cache.join_layers()
    in_pages = {id(t) for layer in memory.cache.paged for t in (layer.keys, layer.values)}
    pages: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    rows: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in generic.tensors_of(memory):
        if id(tensor) not in in_pages and (not tensor.dim() or len(tensor) != NUM_TRIED):
            raise ValueError(f"its {name} has no row for each sequence")
        (pages if id(tensor) in in_pages else rows)[name] = (tuple(tensor.shape[1:]), tensor.dtype)
    if not pages and not rows:
        raise ValueError("it keeps no cache")
    return StepLayout(kind, memory, pages, rows, windows if any(windows) else ())


def _run(
    model: Any, kind: str, selects: bool, step: Step, memory: ModelMemory, inputs: Tensors
) -> tuple[torch.Tensor, ModelMemory]:
    cache = memory.cache
    with (
        traced(),
        generic.attributes_kept(model, memory.attributes) as left,
        exchanged_attention(model, cache, kind in GATHERED),
        using_adapters(model, inputs.get("adapters")),
        selecting() if selects else nullcontext(),
        ExitStack() as stack,
    ):
        tables = [_table(model, kind, step, inputs, group) for group in range(num_groups(step))]
        cache.begin(tables)
        if "rows" in inputs:
            exchanged = exchanged_recurrence(model, cache, inputs["query_starts"], inputs["rows"])
            stack.enter_context(exchanged)
        if memory.attributes and kind in PACKED:
            raise ValueError("its layers keep a state of their own")
        states = () if kind in PACKED else (memory.attributes, cache.states)
        for _, tensor in generic.tensors_of(states):
            clear_rows(tensor, inputs["fresh"])
        logits = _logits(model, kind, inputs, cache, tables[0])
        attributes = left()
    if kind not in GATHERED and any(layer.is_unread for layer in cache.paged):
        raise ValueError(OWN_ATTENTION)
    cache.begin(())
    return logits, ModelMemory(cache, attributes)


def _table(model: Any, kind: str, step: Step, inputs: Tensors, group: int) -> PageTables:
    slots, starts = (inputs[of_group(name, group)] for name in ("slots", "page_starts"))
    pages, positions = inputs["pages"], inputs["positions"]
    seen = by_row = None
    if kind in GATHERED:
        if kind == SPLIT:
            places = torch.arange(len(positions), device=pages.device)
            starts = starts[(places[:, None] >= inputs["query_starts"][1:-1]).sum(1)]
        seen = positions[:, None] - torch.arange(num_dense(model, step) - 1, -1, -1, device=pages.device)
        place = seen.clamp_min(0)
        by_row = pages[starts[:, None] + place // PAGE] * PAGE + place % PAGE
    return PageTables(
        positions, slots // PAGE, slots % PAGE, pages, starts, inputs["lengths"], inputs["query_starts"],
        step.context == step.batch, expected_length(step), seen, by_row,
    )  # fmt: skip


def _logits(model: Any, kind: str, inputs: Tensors, cache: PagedCache, tables: PageTables) -> torch.Tensor:
    by_row = kind != FLAT
    tensors = {name: inputs[name] for name in ("tokens", "positions", "is_image", "image") if name in inputs}
    tensors = {name: tensor[:, None] if by_row else tensor[None] for name, tensor in tensors.items()}
    if "rotary" in inputs:
        tensors["rotary"] = inputs["rotary"][:, None]
    newest = (inputs["query_starts"][1:] - 1).clamp_min(0) if kind in PACKED else None
    pick = None if newest is None else lambda hidden: hidden[newest] if by_row else hidden[:, newest]
    more: dict[str, Any] = {}
    if generic.takes(model, "attention_mask"):
        if tables.seen is not None:  # biases may follow it
            more["attention_mask"] = (tables.seen >= 0).long()
        elif cache.counts_tokens:  # a mask of its own would have the counted length
            more["attention_mask"] = torch.ones_like(tensors["tokens"])
    logits: torch.Tensor = generic.forward(model, (_cache_name(model), cache), tensors, pick, **more).logits
    return logits[:, -1] if by_row else logits[0]


def num_rows(step: Step) -> int:
    return max(step.rows, step.batch)


def num_groups(step: Step) -> int:
    return max(1, len(step.windows))


def expected_length(step: Step) -> int:
    return step.length or max(1, step.reserve // num_rows(step) // num_groups(step))


def num_entries(step: Step) -> int:
    """Twice the pages, since sequences may share them."""
    return 2 * (step.reserve // PAGE)


def num_dense(model: Any, step: Step) -> int:
    """Positions per row: twice its share of all pages."""
    share = num_entries(step) // num_rows(step) * PAGE
    return min(share, max_positions(model) or share)


def max_positions(model: Any) -> int:
    """Positions up to which attention in chunks or to selected keys is full attention."""
    config = model.config.get_text_config(decoder=True)
    limits = [n for name in LIMITS if (n := getattr(config, name, None))][:1]
    limits += [module.index_topk for module in model.modules() if is_indexer(module)]
    limits += [chunk] if (chunk := chunk_of(config)) else []
    rotary = getattr(config, "rope_parameters", None) or {}
    for settings in (rotary, *(x for x in rotary.values() if isinstance(x, dict))):
        if settings.get("rope_type") == "longrope":  # longer sequences have other frequencies
            limits.append(settings["original_max_position_embeddings"])
    return min(limits, default=0)


def paged_workload(model: Any, step: Step) -> Workload:
    if step.context < step.batch:
        message = f"a step of {step.context} tokens cannot serve {step.batch} sequences"
        raise CaptureError(message, "Use at least one token per sequence.")
    if step.reserve % PAGE or step.reserve < 2 * PAGE:
        remedy = f"Use a multiple of {PAGE}, at least {2 * PAGE}: the first page takes what padding writes."
        raise CaptureError(f"{step.reserve} positions do not fill pages of {PAGE}", remedy)
    layout = layout_of(model)
    most = {FLAT: step.context, SPLIT: SPLIT_TOKENS * num_rows(step)}.get(layout.kind, step.batch)
    if step.context > most:
        reads = "each token's keys apart" if layout.is_packed else "one token of each sequence a step"
        raise CaptureError(
            f"{step.model} reads {reads}: {step.context} tokens of {step.batch} sequences are no step of it",
            f"Use at most {most} tokens.",
        )
    if layout.kind in GATHERED and not num_dense(model, step):
        message = f"{step.reserve} positions are too few for {num_rows(step)} sequences"
        raise CaptureError(message, f"Use at least {num_rows(step) * PAGE}.")
    return PagedSteps(model, step, layout).workload()


class PagedSteps:
    def __init__(self, model: Any, step: Step, layout: StepLayout) -> None:
        self._model, self._layout = model, layout
        self._step = replace(step, windows=layout.windows)

    def workload(self) -> Workload:
        return Workload(self._step, self._model, self._call, self._inputs, self._state, self._follow)

    def _call(self, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        held = {name: state[name] for name in self._layout.pages}
        is_flat = self._layout.is_packed
        rows = slice(None if is_flat else self._step.batch)
        held |= {name: state[BY_ROW + name][rows] for name in self._layout.rows}
        memory = generic.exchanged(self._layout.memory, held)
        tokens, newest = inputs["tokens"], state[NEWEST]
        tokens = torch.where(tokens < 0, newest[(-1 - tokens).clamp_min(0)], tokens)
        layout, inputs = self._layout, {**inputs, "tokens": tokens}
        logits, after = _run(self._model, layout.kind, layout.selects, self._step, memory, inputs)
        for name, tensor in generic.tensors_of(after):
            if tensor is not held[name]:
                held[name].copy_(tensor)
        last = tokens[(inputs["query_starts"][1:] - 1).clamp_min(0)] if is_flat else tokens
        chosen, logprobs, top = choose(logits[:, : _vocab_size(self._model)], last, inputs)
        newest[: self._step.batch].copy_(chosen.clamp_min(0))
        return {"logits": logits, "next_tokens": chosen, "logprobs": logprobs, "top_tokens": top}

    def _inputs(self, seed: int) -> dict[str, torch.Tensor]:
        parts = _example_parts(self._model, self._step, Random(seed))
        kind, has_rows = self._layout.kind, bool(self._layout.rows)
        inputs = _make_inputs(self._model, self._step, kind, parts, seed, has_rows)
        answers = [number for number, (length, new) in enumerate(parts) if new == 1 < length]
        unknown = [number for number in answers if number % ANSWERS_PER_HOST_TOKEN]
        firsts = list(accumulate((new for _, new in parts), initial=0))
        references = inputs["tokens"].new_tensor([-1 - number for number in unknown])
        inputs["tokens"][[firsts[number] for number in unknown]] = references
        return inputs

    def _state(self, seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        num_pages, rows = self._step.reserve // PAGE, num_rows(self._step)
        pages, by_row = self._layout.pages.items(), self._layout.rows.items()
        sizes = {name: ((num_pages, *shape), dtype) for name, (shape, dtype) in pages}
        sizes |= {BY_ROW + name: ((rows, *shape), dtype) for name, (shape, dtype) in by_row}
        used = {name: _used(size, dtype, random) for name, (size, dtype) in sizes.items()}
        return {NEWEST: make_tokens(self._model.config, (rows,), random), **used}

    def _follow(self, first: Tensors, run: int, last: Tensors) -> dict[str, torch.Tensor]:
        seed = int(first["tokens"].sum()) if "tokens" in first else 0
        inputs = self._inputs(seed + run)
        chosen = last.get("next_tokens")
        if chosen is not None and len(chosen) <= len(inputs["tokens"]):
            inputs["tokens"][: len(chosen)] = chosen
        if "image" in last and "image" in inputs:
            image = last["image"].flatten(0, 1)
            num = min(len(image), len(inputs["image"]))
            inputs["image"][:num] = image[:num]
        return inputs


def _used(size: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    some = torch.randn((min(size[0], NUM_USED_PAGES), *size[1:]), generator=random).to(dtype)
    times = -(-size[0] // len(some))
    return some.repeat(times, *[1] * (len(size) - 1))[: size[0]].clone()


def _example_parts(model: Any, step: Step, chance: Random) -> list[tuple[int, int]]:
    num_pages = max(1, (step.reserve // PAGE - 1) // num_groups(step))
    num = min(chance.randint(-(-step.batch // 2), step.batch), num_pages)
    room = min(num_pages // num * PAGE, max_positions(model) or step.reserve)
    average = min(room, expected_length(step))
    is_mixed = step.context > step.batch
    left = chance.randint(max(num, -(-step.context // 2)), step.context) if is_mixed else num
    parts = []
    for later in reversed(range(num)):
        most = min(room, left - later)
        is_answer = not is_mixed or (later > 0 and chance.random() < SHARE_OF_ANSWERS)
        new = 1 if is_answer else chance.randint(1, min(most, 2 * most // (later + 1) + 1))
        parts.append((chance.randint(max(new, average // 2), max(new, min(room, 3 * average // 2))), new))
        left -= new
    return parts


def _make_inputs(
    model: Any, step: Step, kind: str, parts: Sequence[tuple[int, int]], seed: int, has_rows: bool
) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    free = list(range(1, step.reserve // PAGE))
    Random(seed).shuffle(free)
    used = sum(new for _, new in parts)
    words = make_tokens(model.config, (step.context,), random)
    words[used:] = 0
    inputs = {"tokens": words, **lay_out(step, parts, free), **_example_choices(model, step, random)}
    fresh = torch.tensor([length == new for length, new in _padded(parts, step.batch)])
    if kind not in PACKED:
        inputs["fresh"] = fresh
    elif has_rows and kind == FLAT:
        rows = torch.randperm(num_rows(step), generator=random)[: step.batch]
        inputs["rows"] = torch.where(fresh, -1 - rows, rows).int()
    if num := num_adapters(model):
        inputs["adapters"] = torch.randint(num + 1, (step.context,), generator=random)
    if step.pictures:
        size = (step.context, model.config.get_text_config(decoder=True).hidden_size)
        if generic.rope_index_of(model) is not None:
            inputs["rotary"] = inputs["positions"].repeat(3, 1)
        inputs["image"] = torch.randn(size, generator=random).to(model.dtype)
        inputs["is_image"] = torch.rand(step.context, generator=random) < SHARE_OF_PICTURES
        inputs["is_image"][used:] = False  # unused tokens share a slot and write the same
    return inputs


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def greedy_choices(model: Any, step: Step) -> dict[str, torch.Tensor]:
    rows, vocab = step.batch, _vocab_size(model)
    tables = (
        torch.zeros(rows, len(Setting)),
        torch.zeros(rows, len(Number), dtype=torch.int64),
        torch.zeros(max_edits(rows, vocab), EDIT_FIELDS, dtype=torch.int32),
        torch.zeros(rows, num_words(vocab), dtype=torch.int32),
    )
    return dict(zip(INPUTS, tables, strict=True))


def _example_choices(model: Any, step: Step, random: torch.Generator) -> dict[str, torch.Tensor]:
    inputs = greedy_choices(model, step)
    settings, numbers, edits, masks = (inputs[name] for name in INPUTS)
    numbers[:, Number.SEED] = torch.randint(2**31, (step.batch,), generator=random)
    numbers[:, Number.POSITION] = torch.arange(step.batch)
    settings[:, Setting.TOP_P], settings[:, Setting.REPETITION] = 1.0, 1.0
    settings[1::4, Setting.SHARPNESS], settings[1::4, Setting.TOP_P] = 1.25, 0.95
    settings[2::4, Setting.SHARPNESS], numbers[2::4, Number.TOP_K] = 1.0, 20
    numbers[2::4, Number.NUM_TOP], numbers[2::4, Number.MASK] = 3, 1
    masks[:1] = torch.randint(-(2**31), 2**31 - 1, masks[:1].shape, generator=random)
    settings[3::4, Setting.SHARPNESS], settings[3::4, Setting.REPETITION] = 1.0, 1.3
    numbers[3::4, Number.EDITS_END], numbers[3::4, Number.COUNTS_LAST] = min(32, _vocab_size(model)), 1
    edits[:, 0] = torch.arange(len(edits))
    return inputs


def _padded(parts: Sequence[tuple[int, int]], num: int) -> list[tuple[int, int]]:
    return [*parts, *[(0, 0)] * (num - len(parts))]


def lay_out(step: Step, parts: Sequence[tuple[int, int]], free: Sequence[int]) -> dict[str, torch.Tensor]:
    """Positions and page tables; groups have the same pages where too few are free."""
    lengths, new = np.array(_padded(parts, step.batch)).T
    starts, firsts = (np.cumsum([0, *each]) for each in (-(-lengths // PAGE), new))
    num, used = firsts[-1], starts[-1]
    positions = np.arange(num) + np.repeat(lengths - new - firsts[:-1], new)
    entries = np.repeat(starts[:-1], new) + positions // PAGE
    groups, held = range(num_groups(step)), np.array(free)
    apart = used if len(groups) * used <= len(free) else 0
    slots = [held[entries + group * apart] * PAGE + positions % PAGE for group in groups]
    pages = held[: groups[-1] * apart + used]
    by_token = {"positions": positions, **{of_group("slots", group): slots[group] for group in groups}}
    others = {
        "pages": np.pad(pages, (0, num_entries(step) - len(pages))),
        **{of_group("page_starts", group): starts[:-1] + group * apart for group in groups},
        "lengths": lengths,
        "query_starts": firsts,
    }
    laid = {n: torch.tensor(np.pad(held, (0, step.context - num)).tolist()) for n, held in by_token.items()}
    return laid | {n: torch.tensor(held.tolist(), dtype=torch.int32) for n, held in others.items()}
