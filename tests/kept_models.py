"""Tiny built-in models and folders without weights, built once a process for tests that do not judge how:
each gets a copy.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch._guards import detect_fake_mode

from tessera.capture import Workload
from tessera.capture.models import hf
from tessera.ir import Step

_made: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_build = hf._workload


def built(config: Any, step: Step, dtype: torch.dtype, folder: Path | None) -> Workload:
    """`hf._workload`, whose model and layout are copies of the first ones."""
    device = torch.get_default_device().type
    is_kept = step.model.startswith("tiny-") if folder is None else step.random_weights and not holds(folder)
    if not is_kept or step.adapters or device not in ("cpu", "meta") or detect_fake_mode() is not None:
        return _build(config, step, dtype, folder)
    from tessera.capture.models import paged

    made = (step.kind, step.seed, step.joined_products, dtype, device)
    key = (type(config), config.to_json_string(), folder is None, *made)
    if key not in _made:
        workload = _build(config, step, dtype, folder)
        _made[key] = copy.deepcopy((workload.module, paged._LAYOUTS.get(workload.module)))
        return workload
    module, layout = copy.deepcopy(_made[key])
    if layout is not None:
        paged._LAYOUTS[module] = layout
    return hf._maker(config, step)(module, step)


def holds(folder: Path) -> bool:
    """Weights or code, which a configuration does not tell."""
    return bool({".safetensors", ".py"} & {path.suffix for path in folder.iterdir()})
