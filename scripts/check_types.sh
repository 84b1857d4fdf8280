#!/usr/bin/env bash
# Runs mypy on the package as the wheel holds it, and on the benchmarks and examples that use it.
#
#   scripts/check_types.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "${1:-.venv}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/build_wheel.sh "$work" "$venv/bin/python"
"$venv/bin/python" -m zipfile -e "$work"/agentrl-*.whl "$work/site"
cp -r pyproject.toml benchmarks examples "$work/"
cd "$work"
mypy=("$venv/bin/python" -m mypy --config-file pyproject.toml --explicit-package-bases)
MYPYPATH="$work/site" "${mypy[@]}" -p agentrl
MYPYPATH="$work/site:$work/benchmarks" "${mypy[@]}" benchmarks/*.py examples/*.py
