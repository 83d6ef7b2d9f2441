"""Served: a model as the steps that serving runs, over one set of weights, with the shape they have.

A causal language model has chunk, insert and decode; a recurrent one insert and decode; a vision-language one
encode besides (`rows` says what they do). Other models are not served by steps and are refused here; so are
folders of vision-language models: their templates say where a picture stands in words of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera.capture import Workload, build, known_models, place_of
from tessera.capture.models import another, checkpoint
from tessera.capture.models.seeing import PICTURE_TOKENS
from tessera.errors import CaptureError, TesseraError, UnknownName
from tessera.execute.reference import ReferenceStepper, plan_alone
from tessera.execute.stepper import Tensors
from tessera.ir import Step
from tessera.serve.records import Shape, StepKind

# What is served where nobody says otherwise.
SLOTS, ROWS, CAPACITY, CHUNK = 2, 8, 1024, 64
# Rows are made no shorter than this to fit.
MIN_CAPACITY = 64
# A step that takes longer than this will never end.
STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ServedModel:
    """The steps of one model; their order is that of a work unit."""

    model: str
    shape: Shape
    workloads: Mapping[StepKind, Workload]

    def weights(self) -> dict[str, torch.Tensor]:
        """Of all steps."""
        return self.workloads["decode"].weights()

    def state(self) -> dict[str, torch.Tensor]:
        """The state of one microbatch before anything ran: zeros."""
        made = (w.make_state(0) for w in self.workloads.values())
        return {name: torch.zeros_like(tensor) for state in made for name, tensor in state.items()}


def served(
    model: str,
    *,
    slots: int = SLOTS,
    rows: int = ROWS,
    capacity: int | None = None,
    chunk: int | None = None,
    seed: int = 0,
    random_weights: bool = False,
    max_bytes: int | None = None,
    room_bytes: float | None = None,
) -> ServedModel:
    """Builds a model (a built-in name or a checkpoint folder) for serving; None: a size that suits it.

    A model with more than `max_bytes` of weights is refused before it is built. Rows that nobody gave a
    length are as long as `room_bytes`, of weights and of the state of all slots, leave it.
    """
    if min(slots, rows, capacity or 1) < 1 or (chunk is not None and chunk < 0):
        raise CaptureError(
            f"slots {slots}, rows {rows}, length {capacity} and chunk {chunk} make no service",
            "Use at least 1 of each.",
        )
    if model in known_models() and model not in servable_models():
        raise UnknownName("model to serve", model, servable_models())
    place = place_of(model)
    if max_bytes is not None:
        _check_bytes(model, weight_bytes(place), max_bytes)
    size = capacity or CAPACITY
    # The model once, for the smallest of steps: how long its rows may be is known from its configuration.
    first = build(Step(place, "decode", rows, 1, seed, 0, random_weights))
    config: Any = getattr(first.module, "config", None)
    kinds = _kinds(config, model)
    config = config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if capacity is None and most is not None:
        size = min(size, most)
    if capacity is None and room_bytes is not None:
        size = _fitting(first, Step(place, "insert", rows, size, seed, 0, random_weights), room_bytes, slots)
    width = 0 if "chunk" not in kinds else min(chunk or CHUNK, size)
    steps: dict[StepKind, Step] = {
        "encode": Step(place, "encode", 1, PICTURE_TOKENS, seed, 0, random_weights),
        "chunk": Step(place, "chunk", 1, width, seed, size - width, random_weights),
        "insert": Step(place, "insert", rows, size, seed, 0, random_weights),
        "decode": Step(place, "decode", rows, size, seed, 0, random_weights),
    }
    workloads = {kind: another(first, steps[kind]) for kind in kinds}
    return ServedModel(model, Shape(slots, rows, size, width, config.vocab_size), workloads)


def reference(model: ServedModel, num_threads: int | None = None) -> ReferenceStepper:
    """The model's own code as a stepper: what answers of every placement are compared with."""
    workloads = list(model.workloads.values())
    names = [(set(w.make_inputs(0)), set(w.make_state(0))) for w in workloads]

    def run(step: int, inputs: Tensors, state: dict[str, Any]) -> Tensors:
        wanted, own = names[step]
        given = {name: tensor for name, tensor in inputs.items() if name in wanted}
        return workloads[step].run(given, {name: state[name] for name in own})

    plan = plan_alone([workload.step for workload in workloads], model.shape.slots)
    return ReferenceStepper(plan, run, model.state, num_threads)


def for_cpu(model: ServedModel) -> ServedModel:
    """Lays the weights of linear layers out as the CPU multiplies fastest; changes no value.

    They are stored transposed, so that the products of a few rows read them along memory. Weights that are
    also looked up row by row stay as they are.
    """
    modules = list(model.workloads["decode"].module.modules())
    looked_up = {m.weight.data_ptr() for m in modules if isinstance(m, torch.nn.Embedding)}
    for module in modules:
        if isinstance(module, torch.nn.Linear) and module.weight.data_ptr() not in looked_up:
            module.weight.data = module.weight.data.t().contiguous().t()
    return model


def _fitting(first: Workload, step: Step, room_bytes: float, slots: int) -> int:
    """Positions of a row, halved until the state fits; the planner judges the shortest."""
    room = room_bytes - sum(tensor.nbytes for tensor in first.weights().values())
    while step.context > MIN_CAPACITY and slots * _state_bytes(another(first, step)) > room:
        step = replace(step, context=step.context // 2)
    return step.context


def _state_bytes(workload: Workload) -> int:
    with FakeTensorMode():
        return sum(tensor.nbytes for tensor in workload.make_state(0).values())


def weight_bytes(place: str) -> int:
    """Bytes of a model's weights, without making them: of a folder's files, or of the configuration."""
    if Path(place).is_dir() and (files := checkpoint.weight_bytes(Path(place))):
        return files
    with torch.device("meta"):
        return sum(tensor.nbytes for tensor in build(Step(place, "decode", 1, 1)).weights().values())


def _check_bytes(model: str, size: int, most: int) -> None:
    if size > most:
        raise TesseraError(
            f"{model} has {size / 1e9:.1f} GB of weights; these devices compute on this machine's CPU",
            "Serve the tiny model of the same family, or name GPUs of this machine: --devices cuda:0.",
            "--devices",
        )


def _kinds(config: object, model: str) -> tuple[StepKind, ...]:
    family = getattr(config, "model_type", None)
    if family is None or (family == "qwen2_5_vl" and model not in known_models()):
        raise UnknownName("model to serve", model, servable_models())
    if family == "qwen2_5_vl":
        return "encode", "chunk", "insert", "decode"
    return ("insert", "decode") if family == "mamba2" else ("chunk", "insert", "decode")


def servable_models() -> list[str]:
    """Built-in models that can be served by steps."""
    return [name for name, steps in known_models().items() if "decode" in steps]
