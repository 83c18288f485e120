"""How long tests wait for what comes in milliseconds: no machine is too slow, but what hangs must end."""

import time
from collections.abc import Callable

HUNG_S = 120.0
LOOK_EVERY_S = 0.01


def eventually(check: Callable[[], object]) -> None:
    """Wait for what another thread or process brings about. AssertionError when it never does."""
    ends_s = time.monotonic() + HUNG_S
    while not check():
        assert time.monotonic() < ends_s, "it never came about"
        time.sleep(LOOK_EVERY_S)
