"""A worker that has loaded its libraries and waits for a line before it joins.

On a host with an eighth of a core, importing alone takes half a minute. Started this way, a fleet
imports at the machine's full speed and together, and still joins one by one, in its own order and
under its own CPU quotas.

  python -m benchmarks.prestart join 10.80.0.1:7700 --token ...     # what follows `atoll-worker`
"""

from __future__ import annotations

import sys

import worker.daemon  # noqa: F401 - torch and the transport come with it
from worker.cli.main import main

if __name__ == "__main__":
    print("built", flush=True)
    sys.stdin.readline()
    main()
