#!/usr/bin/env bash
# Builds the wheel from a copy of the files that git knows or would add, so that nothing left by an earlier build gets in.
#
#   scripts/build_wheel.sh OUT [PYTHON]
set -euo pipefail
mkdir -p "$1"
out=$(cd "$1" && pwd)
python=${2:-python3}
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -co --exclude-standard -z | while IFS= read -r -d '' file; do
    if [ -f "$file" ]; then cp --parents "$file" "$work"; fi
done
"$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$out" "$work"
