"""Run the command as ``python -m worker.cli``."""

from worker.cli.main import main

main()
