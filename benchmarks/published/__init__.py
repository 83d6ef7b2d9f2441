"""The published evaluation (FluidGPU at SC26, arXiv 2604.10180) in its own set-up, beside ours.

`figures.json` and `kernels_a100_l40s.json` are the publication's figures (see README.md). `costs` holds
modelled costs against kernels and steps that it timed.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@cache
def figures() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "figures.json").read_text(encoding="utf-8")))


@cache
def kernels() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "kernels_a100_l40s.json").read_text(encoding="utf-8")))
