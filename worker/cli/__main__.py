"""Entry of the `atoll-worker` command, also as ``python -m worker.cli``."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command. Ctrl+C while its modules load ends it as later, without a traceback."""
    try:
        from worker.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
