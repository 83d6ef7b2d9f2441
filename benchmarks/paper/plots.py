"""One picture a figure, beside the document. Needs matplotlib (the extra `report`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.figures import Figure

from tessera.errors import TesseraError, extra_module


def draw_all(figures: Sequence[Figure], found: dict[str, Any], folder: Path) -> list[Path]:
    """Writes FOLDER/NAME.png for every figure; the label of its numbers stands in the picture."""
    extra_module("matplotlib", "report")
    return [draw(figure, found, folder / f"{figure.name}.png") for figure in figures if figure.name in found]


def draw(figure: Figure, found: dict[str, Any], path: Path) -> Path:
    """One picture."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=figure.size, layout="constrained")
    figure.draw(canvas, found[figure.name])
    scale = found["figures"][figure.name]["scale"]
    canvas.suptitle(f"{figure.title} ({scale} run)", fontsize=11)
    canvas.text(0.0, -0.02, f"{figure.label}; sources by row in paper.json", fontsize=7)
    try:
        canvas.savefig(path, dpi=110, bbox_inches="tight")
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise TesseraError(message, "Choose another place.", str(path)) from error
    return path
