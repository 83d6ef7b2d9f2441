"""Compiles the steps of models at the usual lengths and writes their outlines into the package.

    python -m scripts.make_outlines llama-3-8b [...] [--prompt 1024] [--output 256]

For each: the decode of a whole request, the decode alone at the context of the prompt, and the prefill, at
the batches that others are written down from.
"""

import argparse
import time
from pathlib import Path

from tessera.capture import place_of
from tessera.capture.outlines import name_of, outlined, write
from tessera.flow import ANCHORS, record_compiled
from tessera.ir import Step

FOLDER = Path("src/tessera/capture/outlines")


def main() -> None:
    """Models one after the other; a file that is there is left."""
    parser = argparse.ArgumentParser(description="Outlines of compiled steps.")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    options = parser.parse_args()
    prompt, output = options.prompt, options.output
    for model in map(place_of, options.models):
        for batch in ANCHORS:
            for step in (
                Step(model, "decode", batch, prompt),
                Step(model, "decode", batch, prompt + output),
                Step(model, "prefill", batch, prompt, reserve=output),
            ):
                path = FOLDER / name_of(step)
                if not path.exists():
                    began = time.perf_counter()
                    write(outlined(record_compiled(step)), path)
                    print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
