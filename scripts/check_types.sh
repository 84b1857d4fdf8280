#!/usr/bin/env bash
# Builds the wheel, unpacks it beside nothing else, and runs mypy on the package in it.
#
#   scripts/check_types.sh [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "${1:-.venv}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$work" . 
"$venv/bin/python" -m zipfile -e "$work"/agentrl-*.whl "$work/site"
cp pyproject.toml "$work/"
cd "$work"
MYPYPATH="$work/site" "$venv/bin/python" -m mypy --config-file pyproject.toml -p agentrl
