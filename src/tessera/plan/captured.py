"""CapturedModel: drafts over captured steps, where only roles and devices are chosen.

Sequences and sizes of steps are those that a service has captured. Memory is counted when a draft is made.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.ir import Role
from tessera.plan.fluid import (
    PREFILL_DECODE,
    SINGLE,
    FluidModel,
    GroupDraft,
    Seat,
    ServiceDraft,
    StepMix,
    together_us,
)


@dataclass(frozen=True, eq=False)
class CapturedModel(FluidModel):
    # Microbatches on all devices.
    microbatches: int = 1
    sequences: int = 1
    sizes: tuple[int, ...] = ()

    def _group(self, role: Role, devices: tuple[int, ...], microbatches: int) -> GroupDraft:
        return GroupDraft(role, devices, self.sequences, self.sizes, microbatches, 0, self.length)

    @property
    def _each(self) -> int:
        return max(1, self.microbatches // len(self.used))

    @property
    def _mean_tokens(self) -> int:
        """All sequences answer, and prompts come as often as answers end."""
        tokens = self.sequences * (self.answers + self.load.prompt_tokens) / max(1, self.answers)
        return round(min(tokens, self.sizes[-1]))

    def _alone(self, device: int, policy: str) -> Iterator[ServiceDraft]:
        mix = self._mean_mix((device,), self.microbatches if policy == SINGLE else self._each)
        yield self._timed(policy, mix, mix.price.total_us(device))

    def _mean_mix(self, devices: tuple[int, ...], microbatches: int) -> StepMix:
        group, tokens = self._group(Role.MIXED, devices, microbatches), self._mean_tokens
        chunk = group.sizes[-1] - self._answering(tokens)
        requests = min(tokens / (self.answers + self.load.prompt_tokens), chunk / self.load.prompt_tokens)
        price = self.price(tokens, self.sequences, self.length)
        return StepMix(group, price, price, requests, math.ceil(self.load.prompt_tokens / max(1.0, chunk)))

    def _seats(self, device: int, policy: str) -> Iterator[Seat]:
        plain, mixed = (
            self.price(tokens, self.sequences, self.length).total_us(device)
            for tokens in (self.sequences, self.sizes[-1])
        )
        role = Role.ANSWERS if policy == PREFILL_DECODE else Role.MIXED
        chunk = self.sizes[-1] - self.sequences if role is Role.MIXED else 0
        yield Seat(self._group(role, (device,), self._each), plain, mixed, max(0, chunk))

    def _prompts(self, device: int) -> tuple[GroupDraft, float]:
        us = self.price(self.sizes[-1], self.sequences, self.load.prompt_tokens).total_us(device)
        group = self._group(Role.PROMPTS, (device,), self.config.prompt_microbatches)
        return group, self.sizes[-1] / us * 1e6

    def _divided(self, policy: str) -> Iterator[ServiceDraft]:
        if len(self.used) < 2:
            return
        least = 1 if self.has_host else self.config.least_microbatches
        mix = self._mean_mix(self.used, max(least, self.microbatches))
        yield self._timed(policy, mix, together_us(mix.price, self.used) / self.config.efficiency)
