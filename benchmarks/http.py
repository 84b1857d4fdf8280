"""What HTTP costs: the env server, OpenEnv's beside it, rendering by deltas, and the policy server beside vLLM's own.

    python benchmarks/http.py [--parts env rendering openenv policy] [--seconds 4] [--out benchmarks/results/http.json]

Every part measures two sides in turns on one machine; see the modules of http_parts. `openenv` needs `--openenv DIR`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # In place of this file's folder, where `http` would be this file to every library that imports Python's own.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from benchmarks.http_parts.run import main

    main()
