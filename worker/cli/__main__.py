"""Entry of the `atoll-worker` command, also as ``python -m worker.cli``."""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command. Ctrl+C while its modules load ends it as later, without a traceback."""
    # gRPC reads it once, when it loads: its own lines about refused handshakes or a port that is taken would
    # stand before our errors, which say what to do.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from worker.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    except MemoryError:
        sys.exit("error: this process got no memory to load; free some, or raise its limit (`ulimit -v`)")
    run()


if __name__ == "__main__":
    main()
