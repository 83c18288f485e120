"""`atoll-worker`, whose compute processes run ``cheating``; CHEATS_FROM in its environment: which steps."""

import os
import sys
from pathlib import Path

from worker.cli.main import main
from worker.hosting.contained import child

if __name__ == "__main__":
    program = Path(__file__).with_name("cheating.py").read_text()
    child.COMMAND = (sys.executable, "-P", "-c", program, os.environ["CHEATS_FROM"])
    main()
