"""Waiting in tests: no machine is too slow, and what hangs is ended by the suite's own limit alone."""

import time
from collections.abc import Callable

HUNG_S = 7200.0
"""Timeout for calls that need one: longer than the suite's limit of a test (``timeout`` in pyproject.toml).
So the suite alone ends what hangs, with the stacks of all threads."""

LOOK_EVERY_S = 0.01


def eventually(check: Callable[[], object]) -> None:
    """Wait for what another thread or process brings about, as long as the suite lets a test run."""
    while not check():
        time.sleep(LOOK_EVERY_S)
