"""Run the command as ``python -m coordinator.cli``."""

from coordinator.cli.main import main

main()
