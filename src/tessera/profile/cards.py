"""Cards: the GPUs of this machine, as the driver describes them, and which known GPU each of them is.

A card is a known GPU if its name holds every word of that GPU's key; the key with most words wins, so that
"NVIDIA A100 80GB PCIe" is `a100-pcie` and not `a100`. A card that no key fits can be measured, not modelled.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tessera.profile.gpus import known_gpus


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU of this machine."""

    # As the driver spells it: "NVIDIA H200".
    name: str
    memory_bytes: int
    num_sms: int


# Asked only when a device list names a CUDA device, since the answer needs torch.
Cards = Callable[[], tuple[Card, ...]]


def cuda_cards() -> tuple[Card, ...]:
    """The GPUs that torch sees here; none without a driver or without a CUDA build."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Card(x.name, x.total_memory, x.multi_processor_count) for x in found)


def key_of(card_name: str) -> str:
    """The known GPU that a card is; empty if none."""
    words = set(re.split(r"[^a-z0-9]+", card_name.lower()))
    keys = [g.name for g in known_gpus() if set(g.name.split("-")) <= words]
    return max(keys, key=lambda key: len(key.split("-")), default="")
