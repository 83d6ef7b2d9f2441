"""How much of each package the tests run, from what `make coverage` wrote.

    python scripts/coverage_by_package.py build/coverage.json

A line counts as run if any process ran it that was not killed: tests, commands that they start, workers.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path


def package_of(path: str) -> str:
    """ "plan" of src/tessera/plan/solve.py, "tessera_ptx" of its files; other modules are together."""
    library, *inside = path.partition("src/")[2].split("/")
    if library != "tessera":
        return library
    return inside[0] if len(inside) > 1 else "(modules)"


def main(path: Path) -> None:
    """Prints a row a package, the least covered first, and the sum."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, file in json.loads(path.read_text())["files"].items():
        summary = file["summary"]
        for row in (counts[package_of(name)], counts["all"]):
            row[0] += summary["covered_lines"]
            row[1] += summary["num_statements"]
    whole = counts.pop("all")
    print(f"{'package':<12} {'run':>7} {'lines':>7} {'share':>7}")
    for name, (run, lines) in [*sorted(counts.items(), key=lambda x: x[1][0] / x[1][1]), ("all", whole)]:
        print(f"{name:<12} {run:>7} {lines:>7} {run / lines:>7.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
