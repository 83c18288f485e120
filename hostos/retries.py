"""Retries of calls that may be repeated while a coordinator is away: pauses grow, progress starts anew.

for attempt in retrying(stop_after_attempt(8)):
    with attempt:
        for update in stub.Watch(request):
            progressed(attempt)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tenacity import (
    AttemptManager,
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_never,
    wait_exponential,
)

from atoll.errors import ConnectionFailed

PAUSE_FIRST_S = 0.4
PAUSE_MOST_S = 5.0


Stop = Callable[[RetryCallState], bool]


def retrying(
    stop: Stop = stop_never, sleep: Callable[[float], None] = time.sleep, most_s: float = PAUSE_MOST_S
) -> Retrying:
    """Attempts of what may end in ConnectionFailed, which is raised when ``stop`` says so; any other error
    ends them at once. What ``sleep(seconds)`` raises does, too. Pauses double up to ``most_s``."""
    return Retrying(
        stop=stop,
        sleep=sleep,
        wait=wait_exponential(multiplier=PAUSE_FIRST_S, max=most_s),
        retry=retry_if_exception_type(ConnectionFailed),
        reraise=True,
    )


def stop_after_pauses(seconds: float) -> Stop:
    """Stop once the pauses since the last progress are ``seconds`` long together."""
    return lambda state: state.idle_for >= seconds


def progressed(attempt: AttemptManager) -> None:
    """Something arrived: the next failure counts as a first one."""
    attempt.retry_state.attempt_number, attempt.retry_state.idle_for = 1, 0.0
