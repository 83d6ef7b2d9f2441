"""Probes: operators at shapes that no model of the benchmarks has, so that costs can be fitted without them.

A probe is one call of an ATen operator on tensors made on the GPU. `gpu_profile.py --fronts probes` records
and measures each group as if it were a step; `scripts/fit_overheads.py` can then be fitted to probes alone,
and every model's step is a test of it. Shapes are chosen around those of models, never equal to them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tessera.capture import Workload
from tessera.ir import Step

aten = torch.ops.aten
BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
Tensors = dict[str, torch.Tensor]
# Names tensors, makes them on first use, and hands them back when the step runs.
Get = Callable[..., torch.Tensor]


def _attention(get: Get) -> None:
    for batch, heads, length, width in (
        (2, 16, 2048, 128),
        (1, 12, 6144, 64),
        (4, 20, 1536, 64),
        (8, 8, 768, 128),
    ):
        q, k, v = (get("qkv"[i], (batch, heads, length, width)) for i in range(3))
        mask = get("mask", (batch, 1, length, length)).expand(-1, heads, -1, -1)
        for causal in (False, True):
            aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        aten._scaled_dot_product_efficient_attention(q, k, v, mask, False)
        aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)


def _decode(get: Get) -> None:
    for batch, heads, queries, keys in (
        (16, 8, 4, 4096),
        (48, 4, 8, 1536),
        (64, 8, 2, 1024),
        (8, 16, 1, 8192),
    ):
        q = get("q", (batch, heads, queries, 128))
        k, v = (get(name, (batch, heads, keys, 128)) for name in "kv")
        mask = get("mask", (batch, 1, 1, keys)).expand(-1, heads, queries, -1)
        aten._scaled_dot_product_efficient_attention(q, k, v, mask, False)
        aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)
        aten._scaled_dot_product_flash_attention(q, k, v)


def _masked(get: Get) -> None:
    """Decodes as models with few key heads make them: four queries a head, and a row of the mask for each."""
    for batch, keys in ((8, 1088), (16, 1088), (32, 1088), (64, 1088), (128, 1088), (8, 4096), (64, 4096)):
        q = get("q", (batch, 8, 4, 128))
        k, v = (get(name, (batch, 8, keys, 128)) for name in "kv")
        mask = get("mask", (batch, 1, 1, keys)).expand(-1, -1, 4, -1)
        aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False)
        aten._scaled_dot_product_efficient_attention(q, k, v, mask.expand(-1, 8, -1, -1), False)


def _single(get: Get) -> None:
    """One query a head under a mask: models with as many key heads as query heads."""
    for batch, keys in ((8, 1088), (64, 1088)):
        q = get("q", (batch, 32, 1, 128))
        k, v = (get(name, (batch, 32, keys, 128)) for name in "kv")
        mask = get("mask", (batch, 1, 1, keys))
        aten._scaled_dot_product_efficient_attention(q, k, v, mask.expand(-1, 32, -1, -1), False)
        aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False)


def _elementwise(get: Get) -> None:
    for dtype in (BF16, FP32):
        for batch, rows, width in ((4, 3000, 2048), (3, 700, 5120), (16, 1, 6144), (1, 12000, 3072)):
            x = get("x", (batch, rows, width), dtype)
            y = get("y", (batch, rows, width), dtype)
            aten.add.Tensor(x, y)
            aten.silu.default(x)
            aten.mul.Tensor(x, get("row", (width,), dtype))
            aten.mul.Tensor(x, get("column", (batch, rows, 1), dtype))
            aten.add.Tensor(x, get("shift", (batch, 1, width), dtype))
            aten.mul.Tensor(x, x[..., : width // 2].repeat_interleave(2, -1) if rows < 2 else y)
            aten.neg.default(x[..., width // 2 :])
            aten.add.Tensor(x, get("turned", (batch, width, rows), dtype).transpose(1, 2))
            aten.masked_fill.Scalar(x, get("mask", (batch, rows, 1), torch.bool), 0.0)
            aten.clone.default(x.transpose(0, 1), memory_format=torch.contiguous_format)
            aten.clone.default(x.transpose(1, 2), memory_format=torch.contiguous_format)
            aten._to_copy.default(x, dtype=FP32 if dtype is BF16 else BF16)
            aten.clone.default(x[..., : width // 2], memory_format=torch.contiguous_format)
            aten.cat.default([x, y], -1)
            aten.cat.default([x[..., :-8], y[..., :8]], -1)
            aten.cat.default([x[..., : width // 2], y[..., width // 2 :]], -1)
        heads = get("heads", (4, 1500, 20, 96), dtype)
        aten.mul.Tensor(heads.transpose(1, 2), get("angle", (4, 1, 1500, 96), dtype))
        aten.mul.Tensor(get("outer", (24, 96, 80, 1), dtype), get("inner", (24, 96, 1, 160), dtype))
        aten.cat.default([heads.transpose(1, 2), get("more", (4, 20, 200, 96), dtype)], 2)
        aten.clone.default(
            heads.unsqueeze(3).expand(-1, -1, -1, 3, -1), memory_format=torch.contiguous_format
        )
    aten.add.Tensor(get("wide", (3, 1700, 2816), FP32), get("narrow", (3, 1700, 2816), BF16))
    aten.mul.Tensor(get("narrow", (2816,), BF16), get("wide", (3, 1700, 2816), FP32))


def _rows(get: Get) -> None:
    for rows, width in (
        (24, 3072),
        (48, 5120),
        (1500, 2560),
        (3000, 6144),
        (48, 12288),
        (90000, 96),
        (300000, 160),
    ):
        x = get("x", (rows, width), FP32)
        aten.mean.dim(x, [-1], True)
        aten.sum.dim_IntList(x, [0])
        aten._softmax.default(x, -1, False)
    for rows, width in ((40000, 1031), (9000, 771), (3000, 2307), (20000, 1152), (700, 4104)):
        aten._softmax.default(get("s", (rows, width)), -1, False)
    aten.sum.dim_IntList(get("groups", (1800, 6, 2304)), [1])
    for rows, width in ((3000, 2304), (500, 5120)):
        x = get("n", (rows, width))
        aten.native_layer_norm.default(x, [width], None, None, 1e-6)
        aten.native_layer_norm.default(get("t", (width, rows)).t(), [width], None, None, 1e-6)


def _choices(get: Get) -> None:
    for rows, width in ((24, 50176), (3, 100352), (16, 151936), (48, 32000), (1, 256000)):
        aten.argmax.default(get("logits", (rows, width)), -1)
    for width in (256, 1024, 3000, 20000):
        aten.sort.default(get("ids", (width,), INT64))
    for rows, width, k in ((48, 64, 6), (3000, 64, 6), (1500, 128, 8), (16, 50176, 40)):
        aten.topk.default(get("gates", (rows, width)), k)
    for shape, dim in (((64, 3, 192, 192), -2), ((48, 700), -1), ((2000, 300), -1), ((64,), 0)):
        aten.cumsum.default(get("steps", shape, FP32), dim)
    for batch, heads, keys, width, count in (
        (24, 8, 1500, 96, 1),
        (3, 8, 900, 128, 700),
        (2, 4, 3000, 128, 2000),
    ):
        cache = aten.clone.default(get("cache", (batch, heads, keys, width)))
        at = [get("batch", (batch, 1), INT64, batch), None, get("slot", (batch, count), INT64, keys)]
        aten.index_put_.default(cache, at, get("new", (batch, count, heads, width)))
        aten.index.Tensor(cache, at)
    for count in (96, 5000):
        rows_at = get("rows", (count,), INT64, 4000)
        aten.index.Tensor(get("table", (4000, 2304)), [rows_at])
        aten.index_put_.default(
            aten.clone.default(get("list", (4000,), INT64)), [rows_at], get("put", (count,), INT64)
        )


def _products(get: Get) -> None:
    for batch, m, k, n in (
        (24, 700, 1031, 96),
        (300, 8, 1500, 96),
        (8, 3000, 515, 128),
        (1, 1500, 2307, 1024),
    ):
        left = get("left", (batch, m, k + 3))[..., :k]
        aten.bmm.default(left, get("right", (batch, k, n)))
        aten.bmm.default(get("even", (batch, m, k // 8 * 8)), get("beside", (batch, k // 8 * 8, n)))
    for groups, rows, k, n in (
        (8, 4000, 2304, 3584),
        (16, 64, 3072, 2048),
        (48, 6000, 1536, 2304),
        (64, 200, 2048, 1408),
    ):
        ends = get("ends", (groups,), torch.int32, -rows)
        aten._grouped_mm.default(get("tokens", (rows, k)), get("experts", (groups, k, n)), ends)


def _convolutions(get: Get) -> None:
    bias = get("bias", (1152,))
    for side, patch, channels in ((448, 14, 3), (96, 2, 16), (128, 2, 4)):
        image, filters = (
            get("image", (2, channels, side, side)),
            get("filters", (1152, channels, patch, patch)),
        )
        for added in (bias, None):
            aten.convolution.default(image, filters, added, [patch] * 2, [0, 0], [1, 1], False, [0, 0], 1)
    for batch, channels, length in ((3, 5120, 700), (16, 6144, 4), (1, 8192, 3000)):
        filters = get("taps", (channels, 1, 4))
        shift = get("shift", (channels,))
        for line in (
            get("line", (batch, channels, length)),
            get("turned", (batch, length, channels)).transpose(1, 2),
        ):
            aten.convolution.default(line, filters, shift, [1], [3], [1], False, [0], channels)


GROUPS: dict[str, Callable[[Get], None]] = {
    "attention": _attention,
    "decode": _decode,
    "masked": _masked,
    "single": _single,
    "elementwise": _elementwise,
    "rows": _rows,
    "choices": _choices,
    "products": _products,
    "convolutions": _convolutions,
}


def workloads(device: str = "cuda:0") -> Iterator[tuple[str, Workload]]:
    """Every group as a step of a model named `probe`."""
    for name, group in GROUPS.items():
        yield name, workload(name, group, device)


def workload(name: str, group: Callable[[Get], None], device: str) -> Workload:
    """One group; its tensors are inputs, named by kind, shape and dtype."""
    made: Tensors = {}

    def get(kind: str, shape: tuple[int, ...], dtype: torch.dtype = BF16, below: int = 0) -> torch.Tensor:
        key = f"{kind}_{'x'.join(map(str, shape))}_{dtype}".replace("torch.", "").replace(".", "_")
        return made.setdefault(key, _tensor(shape, dtype, below, device)) if key not in made else made[key]

    with torch.no_grad():
        group(get)  # once outside of the recording, so that every tensor exists

    def call(inputs: Any, state: Any) -> Tensors:
        made.update(inputs)
        group(get)
        return {"done": aten.add.Scalar(next(iter(inputs.values())).flatten()[:8], 1)}

    return Workload(
        Step("probe", name, 1, 1),
        torch.nn.Module(),
        call,
        make_inputs=lambda seed: dict(made),
        make_state=lambda seed: {},
        follow=lambda inputs, run, outputs: dict(inputs),
    )


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, below: int, device: str) -> torch.Tensor:
    if below < 0:  # where each of the groups ends, rows spread evenly
        ends = torch.linspace(-below / shape[0], -below, shape[0], device=device)
        return ends.round().to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
    if dtype is torch.bool:
        return torch.rand(shape, device=device) < 0.5
    return torch.randint(0, below or 1000, shape, device=device, dtype=dtype)
