"""Models of transformers: from a configuration with random weights, or a checkpoint folder.

`attend` reads the key/value cache once. Hugging Face repeats keys and values for every query head, several
copies of the cache per decode; here query heads that share a key head are rows of one call. Attention sinks
(`s_aux`) and `softcap`, without a torch kernel, are computed by formula.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import scaled_dot_product_attention

from tessera.capture.models import checkpoint
from tessera.capture.models.packed import PACKINGS, Packing, Unread, packed_tensors, packing_of, put_packed
from tessera.capture.workload import Workload, move
from tessera.errors import CaptureError, UnknownName, extra_module
from tessera.ir import Step
from tessera.kernels.paged import by_formula

CAUSAL_STEPS = ("prefill", "decode")
STEPS = {"qwen2_5_vl": ("encode", "prefill", "decode")}
SERVED_STEPS = ("tokens", "call")
_AUTO = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModel",
)
# They advise implementations that no step uses.
_ADVISERS = ("transformers.integrations.hub_kernels", "transformers.models.mamba2.modeling_mamba2")
ATTENTION = "tessera"


def built_in(family: str, sizes: dict[str, Any], dtype: torch.dtype, step: Step) -> Workload:
    return _workload(_transformers().AutoConfig.for_model(family, **sizes), step, dtype, None)


def from_folder(step: Step) -> Workload:
    folder = Path(step.model)
    config = config_of(folder)
    steps = steps_of(config)
    if step.kind not in (*steps, *SERVED_STEPS):
        raise UnknownName(f"step of {step.model}", step.kind, steps)
    dtype = getattr(config, "dtype", None) or checkpoint.dtype_of(folder)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CaptureError(f"no model has dtype = {dtype}", "Use bfloat16.", str(folder / "config.json"))
    with checkpoint.blamed(folder, "its step cannot be run"):
        return _workload(config, step, dtype, folder)


def config_of(folder: Path) -> Any:
    """Runs none of the folder's code."""
    settings = checkpoint.read_settings(folder)
    if packing_of(folder, settings) is not None:  # transformers' own readers are not used
        settings = {name: value for name, value in settings.items() if name not in PACKINGS}
        for inner in (value for value in settings.values() if isinstance(value, dict)):
            inner.pop(PACKINGS[0], None)
    families = _transformers().CONFIG_MAPPING
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in families:
        remedy = "Use a configuration of a model type that transformers knows."
        message = f"transformers knows no model_type {family!r}"
        raise CaptureError(message, remedy, str(folder / "config.json"))
    with checkpoint.blamed(folder):
        config = families[family].from_dict(settings)
        steps_of(config)  # refuses unknown classes
    return config


def model_class(config: Any) -> Any:
    library = _transformers()
    for kind in (getattr(library, name, None) for name in config.architectures or ()):
        if isinstance(kind, type) and issubclass(kind, library.PreTrainedModel):
            return kind
    for name in _AUTO[0 if config.is_encoder_decoder else 2 :]:
        kinds = getattr(library, name)._model_mapping
        if type(config) in kinds:
            choice = kinds[type(config)]
            return choice[0] if isinstance(choice, tuple) else choice
    message = f"transformers has no model for a {config.model_type}"
    raise CaptureError(message, "Name its class in config.json, under architectures.")


def steps_of(config: Any) -> tuple[str, ...]:
    if config.model_type in STEPS:
        return (*STEPS[config.model_type], "call")
    if not (kind := model_class(config)).can_generate():
        return ("call",)
    decoders = _transformers().AutoModelForCausalLM._model_mapping
    is_pair = config.is_encoder_decoder and kind is not decoders.get(type(config), None)
    return (*(("encode",) if is_pair else ()), *CAUSAL_STEPS, "call")


def attention_of(kind: Any) -> str:
    is_fixed = any(name.endswith("_ATTENTION_CLASSES") for name in vars(sys.modules[kind.__module__]))
    if kind._supports_attention_backend and not is_fixed:
        return ATTENTION
    return "sdpa" if kind._supports_sdpa else "eager"


def another(workload: Workload, step: Step) -> Workload:
    return _maker(workload.module.config, step)(workload.module, step)


def _transformers() -> Any:
    transformers = extra_module("transformers", "hf")
    for name in _ADVISERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    return transformers


def _workload(config: Any, step: Step, dtype: torch.dtype, folder: Path | None) -> Workload:
    model = _model(config, step, dtype, folder)
    if torch.get_default_device().type == "cuda" and checkpoint.has_values():
        move(model, torch.get_default_device())  # joined products, adapters and layout are made there
    if step.joined_products:
        from tessera.capture.models.generic import call_on_fakes
        from tessera.capture.models.joined import join_products

        join_products(model, partial(call_on_fakes, model))
    if step.adapters:
        from tessera.capture.models.lora import add_adapters

        add_adapters(model, step.adapters)
    return _maker(config, step)(model, step)


def _maker(config: Any, step: Step) -> Callable[[Any, Step], Workload]:
    from tessera.capture.models.generic import generic_workload
    from tessera.capture.models.paged import paged_workload
    from tessera.capture.models.pictures import encode_workload
    from tessera.capture.models.vision import vision_workload

    if step.kind == "tokens":
        return paged_workload
    if step.kind == "encode" and step.pictures:
        return encode_workload
    if config.model_type in STEPS and step.kind != "call":
        return vision_workload
    return generic_workload


def _model(config: Any, step: Step, dtype: torch.dtype, folder: Path | None) -> Any:
    from tessera.capture.models.paged import check_served

    register_attention()
    kind = model_class(config)
    options, packing = {"attn_implementation": attention_of(kind), "dtype": dtype}, None

    def make() -> Any:
        model = kind._from_config(config, **options)
        also = model._keep_in_fp32_modules if dtype is torch.float16 else None
        return checkpoint.widened(model, (*(model._keep_in_fp32_modules_strict or ()), *(also or ())))

    if folder is None:
        with checkpoint.seeded(step.seed):
            model = make()
    else:
        packing = packing_of(folder, checkpoint.read_settings(folder))
        quantised = folder if getattr(config, "quantization_config", None) else None
        is_unknown = packing is None and not checkpoint.has_values()
        if (quantised or packing) and (step.random_weights or is_unknown):
            remedy = "Give them (--device cpu), or take quantization_config out of config.json."
            raise CaptureError("its weights are quantised, and only they say how", remedy, str(folder))
        read = partial(kind.from_pretrained, config=config, **options)
        give = partial(checkpoint.give_transformers, read, quantised)
        if packing is not None:
            give = partial(_give_packed, give, make, packing, dtype)
        is_read = not step.random_weights and checkpoint.has_values()
        if is_read and step.kind == "tokens":
            with checkpoint.blamed(folder), torch.device("meta"):
                check_served(make())  # before weights are read
        with torch.device("cpu") if is_read and torch.get_default_device().type == "cuda" else nullcontext():
            model = checkpoint.load(folder, step, make, give, packing is not None)
    if model._can_set_experts_implementation():
        # Eager experts read the routing on the host; grouped products need rows of 16 bytes.
        experts = [p for name, p in model.named_parameters() if name.endswith("_proj") and p.dim() == 3]
        is_even = all(n * p.element_size() % 16 == 0 for p in experts for n in p.shape[1:])
        model.set_experts_implementation("grouped_mm" if is_even or packing else "batched_mm")
    return model.eval()


def _give_packed(
    give: Callable[[checkpoint.Tensors], checkpoint.Filled],
    make: Callable[[], Any],
    packing: Packing,
    dtype: torch.dtype,
    tensors: checkpoint.Tensors,
) -> checkpoint.Filled:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    is_outline = not checkpoint.has_values()
    weights = packed_tensors(tensors, packing, dtype, shapes, is_outline)
    try:
        if not is_outline:
            return give(weights)
        with unset_fake_temporarily(), torch.device("cpu"):
            filled = give(weights)
    finally:
        for error in (t.error for t in weights.values() if isinstance(t, Unread) and t.error):
            raise error
    return replace(filled, module=put_packed(make(), filled.module))


def register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Arguments have heads before positions, the result has positions before heads."""
    batch, heads, num, width = query.shape
    groups = heads // key.shape[1]
    causal = num > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if s_aux is not None or softcap is not None:
        if attention_mask is None and causal:
            attention_mask = torch.full((num, num), float("-inf"), dtype=query.dtype, device=query.device)
            attention_mask = attention_mask.triu(1)
        scale = width**-0.5 if scaling is None else scaling
        out = by_formula(query, key, value, attention_mask, scale, s_aux, softcap)
    elif attention_mask is None:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scaling, enable_gqa=groups > 1
        )
    elif num == 1:
        rows = query.reshape(batch, key.shape[1], groups, -1)
        if attention_mask.shape[1] > 1:  # a mask per head
            attention_mask = attention_mask.reshape(batch, key.shape[1], groups, -1)
        out = scaled_dot_product_attention(rows, key, value, attention_mask, scale=scaling)
        out = out.reshape(batch, heads, 1, -1)
    else:
        # Many queries, one mask row each: repeating keys costs little beside the products.
        key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
