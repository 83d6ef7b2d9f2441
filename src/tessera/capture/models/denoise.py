"""One denoising step of a flow-matching image model: the state is the latents, moved along their velocity.

`context` is the number of image patches a row; the text is as long as the model's encoders make it. Each row
runs twice, with its text and without (classifier-free guidance). `sigmas` are the noise levels before and
after the step, so one trace serves every step of the schedule.
"""

import torch

from tessera.capture.models.mmdit import MMDiT, MMDiTConfig
from tessera.capture.models.vision import grid_of
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError
from tessera.ir import Step

# Of the reference pipeline: steps of the schedule, its shift towards noise, and the guidance.
NUM_STEPS, SHIFT, GUIDANCE = 28, 3.0, 4.5


def denoise_workload(config: MMDiTConfig, num_words: int, dtype: torch.dtype, step: Step) -> Workload:
    """A denoising step of an MMDiT with seeded random weights."""
    rows, columns = grid_of(step.context)
    if max(rows, columns) > config.max_side:
        raise CaptureError(
            f"an image of {rows} x {columns} patches is beyond the {config.max_side} a side of {step.model}",
            "Use a context with divisors nearer to its square root.",
        )
    module = _module(config, dtype, step.seed)
    size = (step.batch, config.channels, rows * config.patch, columns * config.patch)

    def make_inputs(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        text = torch.randn((2 * step.batch, num_words, config.text_width), generator=random)
        pooled = torch.randn((2 * step.batch, config.pooled_width), generator=random)
        return {"text": text.to(dtype), "pooled": pooled.to(dtype), "sigmas": sigmas(0)}

    def make_state(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(seed + 1)
        return {"latents": torch.randn(size, generator=random).to(dtype)}

    return Workload(
        step,
        module,
        lambda inputs, state: _call(module, inputs, state),
        make_inputs,
        make_state,
        lambda first, run, last: {**first, "sigmas": sigmas(run)},
    )


def _module(config: MMDiTConfig, dtype: torch.dtype, seed: int) -> MMDiT:
    """Made in its dtype from the start: fake parameters cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # and no other device\'s
            return MMDiT(config).eval()
    finally:
        torch.set_default_dtype(before)


def _call(module: MMDiT, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
    latents, now, after = state["latents"], inputs["sigmas"][0], inputs["sigmas"][1]
    both = torch.cat([latents, latents])
    time = (now * 1000).expand(both.shape[0])
    bare, guided = module(both, time, inputs["text"], inputs["pooled"]).chunk(2)
    velocity = bare + GUIDANCE * (guided - bare)
    latents.add_((after - now) * velocity)
    return {"latents": latents.clone()}


def sigmas(run: int) -> torch.Tensor:
    """Noise before and after the run-th step; a schedule that has ended changes nothing."""
    levels = [1.0 - min(run + i, NUM_STEPS) / NUM_STEPS for i in (0, 1)]
    return torch.tensor([SHIFT * s / (1 + (SHIFT - 1) * s) for s in levels])
