"""Requirements with every direct dependency at its declared lower bound, for scripts/lowest.sh.

python scripts/lowest.py [EXTRA...]
"""

import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(\[[^\]]*\])?>=(?P<lowest>[0-9.]+)")


def lowest(extras: list[str]) -> dict[str, str]:
    """Name -> lowest version, for the core and the given extras; torch as TORCH or constraints.txt say."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    words = list(project["dependencies"])
    for extra in extras:
        words += project["optional-dependencies"][extra]
    matches = [match for word in words if (match := REQUIREMENT.match(word))]
    bounds = {match["name"]: match["lowest"] for match in matches}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    return bounds | {"torch": os.environ.get("TORCH", pinned["torch"])}


if __name__ == "__main__":
    for name, version in lowest(sys.argv[1:]).items():
        print(f"{name}=={version}")
