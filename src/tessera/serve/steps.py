"""served: builds a model as the steps that serving runs, over one set of weights.

A language model has one kind of step, some tokens of some sequences (`capture.models.paged`), in few sizes
over the same pages, because each is captured, planned and made a graph; a vision-language model has encode
steps too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera.capture import Workload, build, known_models, place_of, record
from tessera.capture.models import another, checkpoint
from tessera.capture.models.examples import PIXELS
from tessera.capture.models.generic import takes
from tessera.capture.models.joined import JoinedLinear
from tessera.capture.models.packed import PackedWeight
from tessera.capture.models.paged import GATHERED, layout_of, max_positions, num_dense
from tessera.capture.models.pictures import form_of
from tessera.errors import CaptureError, TesseraError, UnknownName
from tessera.ir import Group, Step, units
from tessera.kernels import PAGE, max_pages
from tessera.serve.pages import modest_bytes, pages_for
from tessera.serve.pictures import PictureInputs, PictureReader
from tessera.serve.records import ServeSpec, Shape

# On a CPU.
MAX_BATCH_TOKENS = 128
# For a model without a limit.
CAPACITY = 32_768
# Sequences of a microbatch, where memory chooses; more cost graphs.
MIN_ROWS, MAX_ROWS = 8, 256
# Ratio of step sizes; smallest on a CPU, where padding costs as much as tokens.
RATIO, MIN_SIZE = 4, 8
# Smallest size and ratio with packed weights on a GPU: their products cost more for more rows.
PACKED_SIZE, PACKED_RATIO = 8, 2


@dataclass(frozen=True)
class ServedModel:
    model: str
    shape: Shape
    # By size, after encode.
    workloads: tuple[Workload, ...]
    # Why every step has one token of each sequence.
    reason: str = ""
    # Why prompts have no pictures; empty also for a model without eyes.
    text_only: str = ""

    @property
    def encode(self) -> Workload | None:
        return next((w for w in self.workloads if w.step.kind == "encode"), None)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.workloads[-1].weights()

    @property
    def picture_inputs(self) -> PictureInputs | None:
        return None if self.encode is None else PictureInputs.of(self.encode, self.workloads[-1])

    @property
    def picture_reader(self) -> PictureReader | None:
        return None if self.encode is None else PictureReader.of(self.encode)

    def resized(self, group: Group) -> "ServedModel":
        last, planned = self.workloads[-1], group.plan.graphs[-1].trace.step
        shape = self.shape.of_group(group)
        first = replace(last.step, reserve=group.pool_tokens, rows=group.sequences, length=planned.length)
        steps = (replace(first, batch=shape.num_sequences(size), context=size) for size in group.sizes)
        return replace(self, shape=shape, workloads=tuple(another(last, step) for step in steps))


def served(
    model: str,
    spec: ServeSpec,
    *,
    min_size: int = MIN_SIZE,
    max_bytes: int | None = None,
    room_bytes: Sequence[float] = (),
    pool_bytes: float | None = None,
) -> ServedModel:
    """A model with more than `max_bytes` of weights is refused before it is built.

    Unless the spec has the pool size, pages take what the weights leave of `room_bytes` (memory by device),
    at most `pool_bytes` per microbatch. Steps are priced for sequences in the middle of an average answer.
    """
    microbatches, capacity, pool_tokens = spec.microbatches, spec.capacity, spec.pool_tokens
    if model in known_models() and model not in servable_models():
        raise UnknownName("model to serve", model, servable_models())
    place = place_of(model)
    if max_bytes is not None:
        _check_bytes(model, weight_bytes(place), max_bytes)
    smallest = smallest_step(place, spec)
    first = build(smallest)
    config = _text_config(first, model)
    is_packed = any(isinstance(weight, PackedWeight) for weight in first.module.parameters())
    ratio = RATIO
    if is_packed and min_size > PACKED_SIZE:
        min_size, ratio = PACKED_SIZE, PACKED_RATIO
    steps, text_only = _encode_step(first, spec)
    layout = layout_of(first.module)
    is_flat, gathers, windows = layout.is_packed, layout.kind in GATHERED, layout.windows or (0,)
    most_tokens = 1 if gathers else spec.max_batch_tokens or MAX_BATCH_TOKENS
    rows = spec.rows or _rows(first, spec, _room(first, room_bytes) / microbatches, windows, most_tokens)
    size = _length(model, capacity, max_positions(first.module))
    sizes = sizes_of(rows, most_tokens, is_flat, min_size, ratio)
    if pool_tokens is None:
        pool_bytes = modest_bytes(microbatches) if pool_bytes is None else pool_bytes
        each, fixed = _bytes_of_state(first, rows)
        room = min(pool_bytes, _room(first, room_bytes) / microbatches - fixed)
        # A requested length is granted; the planner checks it.
        most, least = (PAGE * max_pages(n, windows, sizes[-1]) for n in (size, min(size, capacity or PAGE)))
        fitting = room / each // PAGE * PAGE if each else float("inf")
        pool_tokens = int(max(least, min(rows * most, fitting - PAGE))) + PAGE
    pool_tokens = PAGE * pages_for(pool_tokens)
    length = min(size, spec.load.prompt_tokens + spec.load.output_tokens // 2)
    pages = replace(smallest, reserve=pool_tokens, rows=rows, length=length, pictures=bool(steps))
    if gathers:
        size = min(size, num_dense(first.module, pages))
        if capacity is not None and size < capacity:
            message = f"with {pool_tokens} tokens in pages, {rows} sequences of {model} have at most {size}"
            raise CaptureError(message, "Use shorter sequences, fewer of them, or more memory.")
    shape = Shape(
        microbatches, rows, size, sizes, pool_tokens, config.vocab_size, is_flat,
        has_rows=bool(layout.rows), windows=windows,
    )  # fmt: skip
    steps += [replace(pages, batch=shape.num_sequences(x), context=x) for x in sizes]
    workloads = tuple(another(first, step) for step in steps)
    return ServedModel(model, shape, workloads, layout.reason, text_only)


def _text_config(first: Workload, model: str) -> Any:
    config: Any = getattr(first.module, "config", None)
    if getattr(config, "model_type", None) is None:
        raise UnknownName("model to serve", model, servable_models())
    return config.get_text_config()


def smallest_step(place: str, spec: ServeSpec) -> Step:
    return Step(
        place, "tokens", 1, 1, spec.seed, 2 * PAGE, spec.random_weights, joined_products=spec.joined,
        adapters=tuple(folder for _, folder in spec.adapters),
    )  # fmt: skip


def _rows(first: Workload, spec: ServeSpec, room: float, windows: Sequence[int], step: int) -> int:
    """A power of two for which there is memory if one sequence reads its prompt and the others answer."""
    rows, length = MAX_ROWS, spec.load.prompt_tokens + spec.load.output_tokens
    reading, answering = (max_pages(length, windows, size) for size in (step, 1))
    while rows > MIN_ROWS:
        each, fixed = _bytes_of_state(first, rows)
        if fixed + (reading + (rows - 1) * answering) * PAGE * each <= room:
            break
        rows //= 2
    return rows


def _length(model: str, length: int | None, positions: int | None) -> int:
    if length is not None and positions and length > positions:
        message = f"a length of {length} is beyond the {positions} positions that {model} is served with"
        raise CaptureError(message, f"Use at most {positions}: its limit, or where its attention changes.")
    return length or positions or CAPACITY


def sizes_of(
    rows: int, max_batch_tokens: int, is_flat: bool, min_size: int = MIN_SIZE, ratio: int = RATIO
) -> tuple[int, ...]:
    """Ascending: up to `rows`, by `ratio`, and larger ones where prompts are chunked.

    Except the largest of both groups, sizes are at least `min_size` and 2 * `min_size`. A minimum of one
    gives a step for a single token: padding would choose experts of its own.
    """
    sizes = [rows]
    while sizes[0] // ratio >= min_size:
        sizes.insert(0, _power(sizes[0] // ratio))
    if min_size == 1 and len(sizes) > 1:
        sizes[0] = 1
    larger: list[int] = []
    size = max(max_batch_tokens, 2 * rows) if is_flat else rows
    while size > rows and (not larger or size >= 2 * min_size):
        larger.insert(0, size)
        size = _power(size // RATIO)
    return (*sizes, *larger)


def _power(size: int) -> int:
    return 1 << (size.bit_length() - 1) if size else 0


def _room(first: Workload, room_bytes: Sequence[float]) -> float:
    """Room beside all weights on any device, or half of an even share if split."""
    if not room_bytes:
        return float("inf")
    weights = sum(tensor.nbytes for tensor in first.weights().values())
    return max(min(room_bytes) - weights, (sum(room_bytes) - weights) / (2 * len(room_bytes)))


def _bytes_of_state(first: Workload, rows: int) -> tuple[float, int]:
    """Bytes per token in pages, and fixed ones of a microbatch."""
    sizes = []
    for pages in (rows + 1, rows + 3):  # every sequence has one
        step = replace(first.step, batch=rows, context=rows, reserve=pages * PAGE)
        sizes.append(state_bytes(another(first, step)))
    each = (sizes[1] - sizes[0]) / (2 * PAGE)
    return each, int(sizes[0] - (rows + 1) * PAGE * each)


def state_bytes(workload: Workload) -> int:
    with torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True):
        return sum(tensor.nbytes for tensor in workload.make_state(0).values())


def for_cpu(model: ServedModel) -> ServedModel:
    """Transposed linear weights are fastest on a CPU for a few rows; no value changes."""
    modules = list(model.workloads[-1].module.modules())
    looked_up = {m.weight.data_ptr() for m in modules if isinstance(m, torch.nn.Embedding)}
    weights = [m.weight for m in modules if isinstance(m, torch.nn.Linear)]
    weights += [m.joined_weight for m in modules if isinstance(m, JoinedLinear)]
    for weight in weights:
        if not isinstance(weight, PackedWeight) and weight.data_ptr() not in looked_up:
            weight.data = weight.data.t().contiguous().t()
    return model


def for_host(model: ServedModel) -> ServedModel:
    """Weights of experts by output column: a CPU multiplies few rows by them faster."""
    for module in model.workloads[-1].module.modules():
        if getattr(module, "is_transposed", False):
            for weight in module.parameters(recurse=False):
                if weight.dim() == 3 and not isinstance(weight, PackedWeight):
                    weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    return model


def weight_bytes(place: str) -> int:
    if Path(place).is_dir() and (files := checkpoint.weight_bytes(Path(place))):
        return files
    with torch.device("meta"):
        return sum(tensor.nbytes for tensor in build(Step(place, "call", 1, 1)).weights().values())


def _check_bytes(model: str, size: int, most: int) -> None:
    if size > most:
        message = f"{model} has {units.size(size)} of weights; these devices compute on this machine's CPU"
        remedy = "Serve the tiny model of the same family, or name GPUs of this machine: --devices cuda:0."
        raise TesseraError(message, remedy, "--devices")


def _encode_step(first: Workload, spec: ServeSpec) -> tuple[list[Step], str]:
    """None, and why, if a model that sees takes no pictures."""
    if not takes(first.module, PIXELS) or spec.text_only:
        return [], spec.text_only if takes(first.module, PIXELS) else ""
    try:
        size = int(form_of(first.module, first.step.model).is_image.sum())
        step = replace(first.step, kind="encode", context=size, reserve=0, pictures=True)
        record(another(first, step))
    except TesseraError as error:
        return [], error.message
    return [step], ""


def servable_models() -> list[str]:
    return [name for name, steps in known_models().items() if "decode" in steps]
