"""Tensors of a stage that another thread reads: nothing changes them until it has."""

from __future__ import annotations

import threading
from collections.abc import Callable

POLL_S = 0.25


class Lent:
    """Loans that were not returned; one thread lends and waits, any returns."""

    def __init__(self) -> None:
        self._loans: list[threading.Event] = []

    def __bool__(self) -> bool:
        return bool(self._loans)

    def lend(self) -> Callable[[], None]:
        """Return what is to be called once the tensors have been read."""
        self._loans.append(threading.Event())
        return self._loans[-1].set

    def wait(self, waiting: Callable[[], None]) -> None:
        """Return once all were read; ``waiting`` is called now and then, as a disk may be slow."""
        while self._loans:
            while not self._loans[0].wait(POLL_S):
                waiting()
            del self._loans[0]
