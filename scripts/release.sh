#!/usr/bin/env bash
# Builds the wheel, installs it with the extra `serve` into an empty environment, and serves a model from there.
#
#     scripts/release.sh [--dry-run | --tag]
#
# dist/ has the wheel then. What is uploaded is what was tried. --dry-run checks the changelog too and says what
# --tag would do; --tag tags the commit.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/tessera/__init__.py)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

case "${1:-}" in
    "") ;;
    --dry-run | --tag)
        grep -qE "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md \
            || { echo "CHANGELOG.md has no dated section of $version"; exit 1; }
        ;;
    *) echo "usage: scripts/release.sh [--dry-run | --tag]"; exit 2 ;;
esac
if [ "${1:-}" = --tag ]; then
    [ -z "$(git status --porcelain)" ] || { echo "commit first"; exit 1; }
    ! git rev-parse -q --verify "refs/tags/v$version" > /dev/null || { echo "v$version is tagged already"; exit 1; }
fi

rm -rf dist build
"$python" -m venv "$place/env"
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
"$place/env/bin/python" -m pip wheel --quiet --no-deps --wheel-dir dist/ptx src/tessera_ptx
rm -rf src/tessera_ptx/build  # else the next wheel has it too
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/ptx/*.whl
(cd "$place" && env/bin/python -c 'import tessera_ptx; print(tessera_ptx.analyze)' > /dev/null)
"$place/env/bin/python" -m pip uninstall --quiet --yes tessera-ptx
"$place/env/bin/python" -m pip wheel --quiet --no-deps --wheel-dir dist .
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    "$(echo dist/*.whl)[serve]"

kernel=$(pwd)/$(find corpus -name '*.ptx' | sort | head -1)
cd "$place"
for words in "--help" "gpus" "analyze $kernel" "doctor"; do
    # shellcheck disable=SC2086
    env/bin/tessera $words > out.txt || { cat out.txt; echo "tessera $words failed"; exit 1; }
done
timeout 300 env/bin/python -c "
from tessera import LLM
print(LLM('tiny-llama', devices='emu:a100,emu:l40s', effort='quick').generate(['a'], max_tokens=4)[0].output_tokens)
" > out.txt || { cat out.txt; echo "LLM failed"; exit 1; }
[ "$(cat out.txt)" = 4 ] || { cat out.txt; echo "LLM answered otherwise"; exit 1; }
request='{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 4}}'
echo "$request" > in.jsonl
timeout 300 env/bin/tessera batch in.jsonl out.jsonl --target tiny-llama --devices emu:a100,emu:l40s --effort quick
grep -q '"status_code": 200' out.jsonl || { cat out.jsonl; echo "the service failed"; exit 1; }
cd - > /dev/null
echo "dist/$(basename dist/*.whl) works in an empty environment"
case "${1:-}" in
    --tag) git tag "v$version"; echo "tagged v$version" ;;
    --dry-run) echo "would tag v$version at $(git rev-parse --short HEAD)" ;;
esac
