"""Qwen2.5-VL in three steps: encode an image, prefill with it, decode.

encode returns `context` embeddings per row. prefill reads `context` tokens per row; half stand for the image,
whose embeddings are an input. Positions are in time, height and width. Prefill and decode return where each
row continues.

Window boundaries, which depend on the image size alone, are plain numbers: the tower would read them from the
device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tessera.capture.models.examples import PIXELS, GivenInputs
from tessera.capture.models.generic import NEXT, CachedSteps, newest
from tessera.capture.workload import Tensors, Workload
from tessera.errors import MismatchError
from tessera.ir import Step

# Tokens of a row before its picture.
NUM_LEADING = 1
# Rotary positions [3, tokens] of a picture from its first token, and what later text has more.
Places = tuple[npt.NDArray[np.int64], int]


def vision_workload(model: Any, step: Step) -> Workload:
    return _encode(model, step) if step.kind == "encode" else PictureSteps(model, step).workload()


def grid_of(num_tokens: int) -> tuple[int, int]:
    """Height and width in merged patches, as square as possible."""
    height = next(n for n in range(int(num_tokens**0.5), 0, -1) if num_tokens % n == 0)
    return height, num_tokens // height


def _encode(model: Any, step: Step) -> Workload:
    from transformers import vision_utils

    tower = model.model.visual
    config = tower.config
    merge, height, width = config.spatial_merge_size, *grid_of(step.context)
    num_patches = step.context * merge * merge
    with _disable_current_modes(), torch.device("cpu"):
        grids = torch.tensor([[1, height * merge, width * merge]] * step.batch)
        sides = (merge, config.window_size, config.patch_size)
        order, ends = (t.tolist() for t in vision_utils.get_vision_window_index(grids, *sides))
        patch_places = vision_utils.get_vision_position_ids(grids, merge).tolist()
    images, pieces = np.arange(step.batch + 1) * num_patches, np.array(ends)
    patch_values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    places, index, given = torch.tensor(patch_places), torch.tensor(order), GivenInputs(step)

    def call(inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        windows = {"window_index": inputs["window_index"], "cu_window_seqlens": pieces}
        sizes = {"grid_thw": None, "position_ids": inputs["places"], "cu_seqlens": images}
        features = tower(inputs[PIXELS], **sizes, **windows)
        return {"image": features.pooler_output.view(step.batch, step.context, -1)}

    def make_inputs(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        patches = torch.randn((step.batch * num_patches, patch_values), generator=random).to(model.dtype)
        made = {PIXELS: patches, "places": places.clone(), "window_index": index.clone()}
        return given.over(made, seed)

    return Workload(step, model, call, make_inputs, lambda seed: {}, lambda first, run, last: dict(first))


class PictureSteps(CachedSteps):
    def _count_seen(self) -> int:
        return 0

    def _following(self, inputs: Tensors, last: torch.Tensor | None) -> dict[str, torch.Tensor]:
        rotary = inputs["rotary"].transpose(0, 1).transpose(1, 2)
        positions = inputs["positions"][:, :, None]
        return {NEXT: newest(positions, last) + 1, "next_rotary": newest(rotary, last) + 1}

    def _tokens_at(self, start: torch.Tensor, width: int, random: torch.Generator) -> dict[str, torch.Tensor]:
        inputs = super()._tokens_at(start, width, random)
        return {**inputs, "rotary": inputs["positions"].repeat(3, 1, 1)}

    def _random_inputs(self, seed: int) -> dict[str, torch.Tensor]:
        inputs, step = super()._random_inputs(seed), self._step
        if step.kind == "decode":
            return inputs
        num, random = step.context // 2, torch.Generator().manual_seed(seed + 1)
        places = rotary(np.arange(step.context), [NUM_LEADING], grid_places(num))
        image = torch.randn((step.batch, num, self._config.hidden_size), generator=random)
        return inputs | {
            "rotary": torch.tensor(places.tolist())[:, None].repeat(1, step.batch, 1),
            "last": inputs["last"].clamp(min(step.context - 1, NUM_LEADING + num)),
            "image": image.to(self._model.dtype),
            "image_places": (NUM_LEADING + torch.arange(num)).repeat(step.batch, 1),
        }

    def _follow(self, first: Tensors, run: int, last: Tensors) -> dict[str, torch.Tensor]:
        if self._step.kind == "decode":
            places = last["next_rotary"].t()[:, :, None].contiguous()
            return {**super()._follow(first, run, last), "rotary": places}
        inputs = self._inputs(0)
        if inputs["image"].shape != last["image"].shape:
            raise MismatchError(
                f"the encode returns {last['image'].shape[1]} tokens a row, "
                f"the prefill takes {inputs['image'].shape[1]}",
                "Capture the encode with half the prefill's context, and both with the same batch.",
            )
        return {**inputs, "image": last["image"].clone()}


def grid_places(num: int) -> Places:
    """A picture spans its grid; text continues after the longer side."""
    rows, columns = grid_of(num)
    inside = np.arange(num)
    return np.stack([np.zeros_like(inside), inside // columns, inside % columns]), max(rows, columns) - num


def rotary(positions: npt.NDArray[np.int64], starts: Sequence[int], places: Places) -> npt.NDArray[np.int64]:
    """Rotary positions [3, ...] of tokens at `positions`; pictures begin at `starts`."""
    axes = np.stack([positions] * 3)
    inner, shift = places
    num = inner.shape[1]
    for number, start in enumerate(starts):
        inside = positions - start
        here = inner[:, inside.clip(0, num - 1)] + start + number * shift
        axes = np.where((inside >= 0) & (inside < num), here, axes)
        axes = np.where(inside >= num, positions + (number + 1) * shift, axes)
    return axes


def own_processor(config: Any) -> Any:
    """The class's, for a model without a folder of one."""
    if config.model_type != "qwen2_5_vl":
        return None
    import transformers

    # Older ones have no other than by Pillow.
    kind = getattr(transformers, "Qwen2VLImageProcessorPil", transformers.Qwen2VLImageProcessor)
    return kind(patch_size=config.vision_config.patch_size)
