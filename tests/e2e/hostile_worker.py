"""`atoll-worker`, whose compute processes run ``hostile``; HOSTILE in its environment: what that is told."""

import json
import os
import sys
from pathlib import Path

from worker.cli.main import main
from worker.hosting.contained import child

if __name__ == "__main__":
    told = json.loads(os.environ["HOSTILE"]) | {"daemon": os.getpid()}
    program = Path(__file__).with_name("hostile.py").read_text()
    child.COMMAND = (sys.executable, "-P", "-c", program, json.dumps(told))
    main()
