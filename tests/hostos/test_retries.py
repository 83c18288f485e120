"""Retries: pauses that grow to a bound, progress that starts anew, and what is not tried again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tenacity import AttemptManager, Retrying, stop_after_attempt

from atoll.errors import AtollError, ConnectionFailed, StorageError
from hostos.retries import progressed, retrying, stop_after_pauses


def fails(
    attempts: Retrying, error: AtollError, before: Callable[[AttemptManager], None] = lambda attempt: None
) -> None:
    for attempt in attempts:
        with attempt:
            before(attempt)
            raise error


def test_pauses_double_to_their_bound_until_they_are_too_long_together():
    pauses: list[float] = []
    with pytest.raises(ConnectionFailed, match="away"):
        fails(retrying(stop_after_pauses(10.0), pauses.append, most_s=2.0), ConnectionFailed("away"))
    assert pauses == [0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]


def test_progress_starts_the_count_and_the_pauses_anew():
    pauses: list[float] = []
    tries = 0

    def advance_once(attempt: AttemptManager) -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            progressed(attempt)

    with pytest.raises(ConnectionFailed):
        fails(retrying(stop_after_attempt(3), pauses.append), ConnectionFailed("away"), advance_once)
    assert tries == 4
    assert pauses == [0.4, 0.4, 0.8]


def test_any_other_error_ends_it_at_once():
    pauses: list[float] = []
    with pytest.raises(StorageError):
        fails(retrying(sleep=pauses.append), StorageError("full"))
    assert pauses == []
