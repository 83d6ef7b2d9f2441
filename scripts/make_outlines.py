"""Compiles steps of models and writes their outlines into the package.

    python -m scripts.make_outlines llama-3-8b [...]             served steps
    python -m scripts.make_outlines --evaluated llama-3-8b       steps that the evaluation plans alone

Sizes are those that others are interpolated from: `planning.ANCHORS`, and two of `flow.ANCHORS` at which a
step compiles to the same launches. An outline that the package or the cache has is not compiled again: delete
it first.
"""

import argparse
from pathlib import Path

from benchmarks.paper.scale import LOADS

from tessera.capture.outlines import name_of, write
from tessera.flow import LoadSteps
from tessera.ir import Cluster, Trace
from tessera.planning import ServedSteps, compiled

FOLDER = Path("src/tessera/capture/outlines")


def evaluated(model: str) -> list[Trace]:
    """Both recordings that every step is interpolated from."""
    traces = []
    for step in (step for load in LOADS if load.model == model for step in load.steps):
        (family,) = LoadSteps([step], [1], is_compiled=True).families
        traces += [graph.trace for graph in family.recordings]
    return traces


def main() -> None:
    """Models one after the other."""
    parser = argparse.ArgumentParser(description="Outlines of compiled steps.")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--evaluated", action="store_true", help="steps of the evaluation")
    asked = parser.parse_args()
    for model in asked.models:
        traces = (
            evaluated(model) if asked.evaluated else compiled(ServedSteps(model, Cluster((), ())).anchors)
        )
        for trace in traces:
            path = FOLDER / name_of(trace.step)
            write(trace, path)
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
