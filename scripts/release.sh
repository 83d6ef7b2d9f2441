#!/usr/bin/env bash
# Builds the wheel, installs it into an empty environment and tries it there; with --tag, tags the commit.
#
#     scripts/release.sh [--tag]
#
# dist/ has the wheel then. What is uploaded is what was tried.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/tessera/__init__.py)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

if [ "${1:-}" = --tag ]; then
    grep -qF "## [$version]" CHANGELOG.md || { echo "CHANGELOG.md says nothing of $version"; exit 1; }
    [ -z "$(git status --porcelain)" ] || { echo "commit first"; exit 1; }
fi

rm -rf dist build
"$python" -m venv "$place/env"
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
"$place/env/bin/python" -m pip wheel --quiet --no-deps --wheel-dir dist/ptx src/tessera_ptx
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/ptx/*.whl
(cd "$place" && env/bin/python -c 'import tessera_ptx; print(tessera_ptx.analyze)' > /dev/null)
"$place/env/bin/python" -m pip uninstall --quiet --yes tessera-ptx
"$place/env/bin/python" -m pip wheel --quiet --no-deps --wheel-dir dist .
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl

kernel=$(pwd)/$(find corpus -name '*.ptx' | sort | head -1)
cd "$place"
for words in "--help" "gpus" "analyze $kernel" "doctor"; do
    # shellcheck disable=SC2086
    env/bin/tessera $words > out.txt || { cat out.txt; echo "tessera $words failed"; exit 1; }
done
cd - > /dev/null
echo "dist/$(basename dist/*.whl) works in an empty environment"
if [ "${1:-}" = --tag ]; then git tag "v$version"; echo "tagged v$version"; fi
