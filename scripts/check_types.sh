#!/usr/bin/env bash
# Runs mypy on the package as the wheel holds it.
#
#   scripts/check_types.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "${1:-.venv}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/build_wheel.sh "$work" "$venv/bin/python"
"$venv/bin/python" -m zipfile -e "$work"/agentrl-*.whl "$work/site"
cp pyproject.toml "$work/"
cd "$work"
MYPYPATH="$work/site" "$venv/bin/python" -m mypy --config-file pyproject.toml -p agentrl
