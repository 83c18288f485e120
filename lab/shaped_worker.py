"""``atoll-worker`` on slow, distant links that its own transport emulates: a loopback lab's worker.

ATOLL_SHAPER=home1.shaper.json python -m lab.shaped_worker join 127.0.1.1:7700 --token ...
"""

from __future__ import annotations

import os
from pathlib import Path

from lab.shaper import Shaper
from worker.cli.main import main
from worker.transport.network import PeerNetwork

if __name__ == "__main__":
    PeerNetwork.shaping = Shaper.load(Path(os.environ["ATOLL_SHAPER"]))
    main()
