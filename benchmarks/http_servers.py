"""What HTTP costs: the env server, OpenEnv's beside it, rendering by deltas, and the policy server beside vLLM's own.

    python benchmarks/http_servers.py [--parts env rendering openenv policy] [--seconds 4] [--out benchmarks/results/http.json]

Every part measures two sides in turns on one machine; see the modules of http_parts. `openenv` needs `--openenv DIR`.
"""

from __future__ import annotations

from http_parts.run import main

if __name__ == "__main__":
    main()
