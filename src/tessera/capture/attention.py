"""attention: which operator F.scaled_dot_product_attention becomes on the GPUs a fake capture stands for.

Torch picks it by device and build: on a CPU build every fake CUDA call would fall apart into the operators
of the textbook formula, which no GPU would run. Here the choice is made as a CUDA build makes it for GPUs
of compute capability 8.0 and above, with the kernels that run on all of them: flash, then memory-efficient,
then the formula. cuDNN's attention, which newer GPUs prefer, is taken for a few queries under a mask alone,
which is what a decode is: there the memory-efficient kernel leaves most of the memory's bandwidth unused
(two thirds of an H200's at batch 8). A capture on a real GPU leaves it out.
"""

import math
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

# The efficient kernel wants every stride of its mask but the last to be a multiple of this.
MASK_ALIGNMENT = 8
# The flash kernel's widest head; it pads heads to a multiple of 8.
MAX_FLASH_HEAD = 256
FLASH_ALIGNMENT = 8
# cuDNN's kernel under a mask: so many queries, and heads as wide as every GPU's takes.
FEW_QUERIES = range(2, 9)
MAX_CUDNN_HEAD = 128


class TargetAttention(TorchFunctionMode):
    """While entered, attention on CUDA tensors becomes the operator of the target."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    kind = choose(query, key, value, attn_mask, enable_gqa)
    if kind == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kind == "cudnn" and attn_mask is not None:
        # With the sums of the softmax: without them the operator returns None in their place on a GPU alone.
        made = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, _additive(attn_mask, query), True, dropout_p, is_causal, False, scale=scale
        )
        return made[0]  # type: ignore[no-any-return]
    if kind == "efficient":
        mask = None if attn_mask is None else _prepare_mask(attn_mask, query, key)
        made = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, False, dropout_p, is_causal, scale=scale
        )
        return made[0]  # type: ignore[no-any-return]
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    enable_gqa: bool = False,
) -> str:
    """flash, cudnn, efficient or math, for compute capability 8.0 and above."""
    alike = query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype == value.dtype
    if query.device.type != "cuda" or not alike or any(n == 0 for n in (*query.shape, *key.shape)):
        return "math"
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and mask is None and same_width and query.shape[-1] <= MAX_FLASH_HEAD:
        return "flash"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    is_grouped = enable_gqa and not same_heads
    if is_grouped or not (half or query.dtype is torch.float32):
        return "math"
    alignment = 8 if half else 4
    is_few = half and mask is not None and mask.dim() == 4 and query.shape[2] in FEW_QUERIES
    if is_few and same_width and query.shape[-1] <= MAX_CUDNN_HEAD and query.shape[-1] % alignment == 0:
        return "cudnn"
    return "efficient" if query.shape[-1] % alignment == 0 == value.shape[-1] % alignment else "math"


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    width = query.shape[-1]
    missing = -width % FLASH_ALIGNMENT
    if missing:
        query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
    chosen = scale if scale is not None else 1.0 / math.sqrt(width)
    made = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=chosen
    )
    out: torch.Tensor = made[0]
    return out[..., :width] if missing else out


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    allowed, barred = (
        torch.scalar_tensor(x, dtype=query.dtype, device=query.device) for x in (0.0, -math.inf)
    )
    return torch.where(mask, allowed, barred)


def _prepare_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """An additive mask with strides the kernel takes, as wide as the scores."""
    mask = _additive(mask, query)
    missing = -mask.shape[-1] % MASK_ALIGNMENT
    is_aligned = mask.stride(-1) == 1 and all(s % MASK_ALIGNMENT == 0 for s in mask.stride()[:-1])
    if not is_aligned and missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
