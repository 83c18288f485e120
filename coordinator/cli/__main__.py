"""Entry of the `atoll` command, also as ``python -m coordinator.cli``."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command. Ctrl+C while its modules load ends it as later, without a traceback."""
    try:
        from coordinator.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
