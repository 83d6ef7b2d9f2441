"""The published evaluation, made again: figures by name, each a set of cases, a document and a plot.

Beside `advise`, above `flow`: it uses the stages as any user would; no planner or simulator of its own.
"""

from tessera.paper.evaluate import evaluate, merged, needed
from tessera.paper.figures import FIGURES, Figure, chosen
from tessera.paper.library import Library
from tessera.paper.scale import FULL, QUICK, Scale, narrowed

__all__ = [
    "FIGURES", "FULL", "QUICK", "Figure", "Library", "Scale", "chosen", "evaluate", "merged", "narrowed",
    "needed",
]  # fmt: skip
