"""Stopping a computation from another thread: every wait of the compute thread watches one."""

from __future__ import annotations

import threading


class Cancelled(Exception):  # not an AtollError: it is shown to no user
    """The step, load or probe was stopped on purpose; its reason is the message."""


class Cancel:
    """A one-way switch; ``check`` raises once it is set."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._reason = ""

    def set(self, reason: str) -> None:
        """Stop the work at its next wait or action; the first reason counts."""
        if not self._event.is_set():
            self._reason = reason
            self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raise Cancelled when set."""
        if self._event.is_set():
            raise Cancelled(self._reason)

    def wait(self, seconds: float) -> None:
        """Sleep, raising Cancelled as soon as it is set."""
        if self._event.wait(seconds):
            raise Cancelled(self._reason)
