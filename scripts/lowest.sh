#!/usr/bin/env bash
# Tries the declared lower bounds: every direct dependency at its lowest version that is allowed, then the core tests.
#
#     scripts/lowest.sh [EXTRA...]
#
# torch is installed at the version of constraints.txt unless TORCH names another, because its lowest needs gigabytes
# of CUDA libraries on machines without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/env"
"$python" scripts/lowest.py "$@" > "$place/lowest.txt"
cat "$place/lowest.txt"
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check -r "$place/lowest.txt"
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps .
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt pytest pytest-xdist hypothesis jsonschema
"$place/env/bin/python" -m pytest -n 2 --dist loadfile tests/test_tiny.py tests/unit/ir tests/unit/plan \
    tests/unit/simulate --ignore=tests/unit/ir/test_rebatch.py  # which needs Hugging Face's models
