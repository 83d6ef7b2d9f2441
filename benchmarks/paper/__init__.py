"""The published evaluation, made again: figures by name, each a set of cases, a document and a plot.

Run it with `python -m benchmarks.paper`. It uses the stages as any user would.
"""

from benchmarks.paper.evaluate import evaluate, merged, needed
from benchmarks.paper.figures import FIGURES, Figure, chosen
from benchmarks.paper.library import Library
from benchmarks.paper.scale import FULL, QUICK, Scale, narrowed

__all__ = [
    "FIGURES", "FULL", "QUICK", "Figure", "Library", "Scale", "chosen", "evaluate", "merged", "narrowed",
    "needed",
]  # fmt: skip
