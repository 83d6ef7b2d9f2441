"""Compiles the served step of models and writes its outlines into the package.

    python -m scripts.make_outlines llama-3-8b [...]

Sizes are those that others are interpolated from (`planning.ANCHORS`).
"""

import argparse
from pathlib import Path

from tessera.capture.outlines import name_of, write
from tessera.ir import Cluster
from tessera.planning import ServedSteps, compiled

FOLDER = Path("src/tessera/capture/outlines")


def main() -> None:
    """Models one after the other."""
    parser = argparse.ArgumentParser(description="Outlines of compiled steps.")
    parser.add_argument("models", nargs="+")
    for model in parser.parse_args().models:
        for trace in compiled(ServedSteps(model, Cluster((), ())).anchors):
            path = FOLDER / name_of(trace.step)
            write(trace, path)
            print(path.name, flush=True)


if __name__ == "__main__":
    main()
